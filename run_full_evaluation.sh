#!/usr/bin/env bash
# Generate images from a model and a prompt table, evaluate them and write a report:
#   export USE_MULTIGPU=true GPU_IDS="0 1 2 3" MODEL_PATH=/path/to/your/model NUM_SAMPLES=5000
#   bash run_full_evaluation.sh
# The same command resumes.
#   PROMPTS_CSV        prompt table                              default ./mscoco_data/prompts.csv
#   OUTPUT_DIR         images; scores go to evaluation/          default ./generated_images
#   USE_MULTIGPU       true: GPU_IDS, or all; false: one GPU, the first of GPU_IDS, or 0    default true
#   NUM_SAMPLES        first rows of the table                   default all
#   REFERENCE          folder of real images, or stats.npz       without it, only metrics that need no reference
#   INCEPTION_WEIGHTS  Inception's weights of 2015-12-05         for FID, KID, precision, recall, density, coverage, IS
#   CLIP_PATH          folder of a CLIP model                    for CLIP score and CMMD
#   DINOV2_PATH        folder of a DINOv2 model                  for FD-DINOv2
#   EVALUATE_FLAGS     further flags of `muralist evaluate`      such as "--metrics fid,kid,clip --resize clean-fid"
# Further arguments go to batch_generate_t2i_multigpu.py, whose defaults apply: bash run_full_evaluation.sh --num_inference_steps 50
set -euo pipefail

: "${MODEL_PATH:?Set MODEL_PATH to the model to evaluate.}"
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

read -r -a evaluate_flags <<<"${EVALUATE_FLAGS:-}"
evaluate=(muralist evaluate --images "$OUTPUT_DIR" --prompts_csv "$PROMPTS_CSV" --output_dir "$OUTPUT_DIR/evaluation" "${on_gpus[@]}"
  ${REFERENCE:+--reference "$REFERENCE"} ${INCEPTION_WEIGHTS:+--inception_weights "$INCEPTION_WEIGHTS"}
  ${CLIP_PATH:+--clip_path "$CLIP_PATH"} ${DINOV2_PATH:+--dinov2_path "$DINOV2_PATH"} "${evaluate_flags[@]}")
# Generating takes hours: a wrong path ends the script here, and missing scores are named here.
plan=$("${evaluate[@]}" --dry_run)
echo "$plan"
if [[ $plan == *$'\nNo '* ]]; then
  echo "The variables at the top of run_full_evaluation.sh give these inputs; the same command then adds the scores to the images."
fi

started=$(mktemp)
trap 'rm -f "$started"' EXIT
generated=0
python "$(dirname "${BASH_SOURCE[0]}")/batch_generate_t2i_multigpu.py" --prompts_csv "$PROMPTS_CSV" --output_dir "$OUTPUT_DIR" --model_path "$MODEL_PATH" \
  ${NUM_SAMPLES:+--num_samples "$NUM_SAMPLES"} "${on_gpus[@]}" "$@" || generated=$?
# Failed rows are in the report, and the others are evaluated. A command that was refused or interrupted generated nothing:
# images of an earlier command in the folder must not be evaluated in its place.
if ((generated > 1)) || { ((generated)) && [[ ! $OUTPUT_DIR/ledger.jsonl -nt $started ]]; }; then
  exit "$generated"
fi
"${evaluate[@]}"
exit "$generated"
