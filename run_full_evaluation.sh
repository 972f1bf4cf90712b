#!/usr/bin/env bash
# From a model and a table of prompts to pictures, numbers and a report:
#   export USE_MULTIGPU=true GPU_IDS="0 1 2 3" MODEL_PATH=/path/to/your/model NUM_SAMPLES=5000
#   bash run_full_evaluation.sh
# The same command again goes on where the last one was stopped.
#   PROMPTS_CSV        table of prompts                          default ./mscoco_data/prompts.csv
#   OUTPUT_DIR         where pictures go; numbers in evaluation/  default ./generated_images
#   USE_MULTIGPU       true: GPU_IDS, or all; false: one GPU, the first of GPU_IDS, or 0    default true
#   NUM_SAMPLES        first rows of the table                   default all
#   REFERENCE          folder of real pictures, or stats.npz     without it, only metrics that need none
#   INCEPTION_WEIGHTS  Inception's weights of 2015-12-05         for FID, KID, precision, recall, density, coverage, IS
#   CLIP_PATH          folder of a CLIP model                    for CLIP score and CMMD
#   DINOV2_PATH        folder of a DINOv2 model                  for FD-DINOv2
# What else `muralist generate` takes can be given as arguments: bash run_full_evaluation.sh --num_inference_steps 50
set -euo pipefail

: "${MODEL_PATH:?Set MODEL_PATH to the model that is to be evaluated.}"
PROMPTS_CSV=${PROMPTS_CSV:-./mscoco_data/prompts.csv}
OUTPUT_DIR=${OUTPUT_DIR:-./generated_images}

read -r -a gpus <<<"${GPU_IDS:-}"
if [[ ${USE_MULTIGPU:-true} != true ]]; then
  gpus=("${gpus[0]:-0}")
fi
on_gpus=()
if ((${#gpus[@]})); then
  on_gpus=(--gpu_ids "${gpus[@]}")
fi

started=$(mktemp)
trap 'rm -f "$started"' EXIT
generated=0
muralist generate --prompts_csv "$PROMPTS_CSV" --output_dir "$OUTPUT_DIR" --model_path "$MODEL_PATH" \
  ${NUM_SAMPLES:+--num_samples "$NUM_SAMPLES"} "${on_gpus[@]}" "$@" || generated=$?
# Rows that failed are in the report, and the others are evaluated all the same. But a command that was refused or interrupted
# made nothing: what an older one left in the folder is not what was asked for.
if ((generated > 1)) || { ((generated)) && [[ ! $OUTPUT_DIR/ledger.jsonl -nt $started ]]; }; then
  exit "$generated"
fi
muralist evaluate --images "$OUTPUT_DIR" --prompts_csv "$PROMPTS_CSV" --output_dir "$OUTPUT_DIR/evaluation" "${on_gpus[@]}" \
  ${REFERENCE:+--reference "$REFERENCE"} ${INCEPTION_WEIGHTS:+--inception_weights "$INCEPTION_WEIGHTS"} \
  ${CLIP_PATH:+--clip_path "$CLIP_PATH"} ${DINOV2_PATH:+--dinov2_path "$DINOV2_PATH"}
exit "$generated"
