#!/usr/bin/env bash
# Sampling test on 4 GPUs (or 4 CPU processes): trains the small HunyuanDiT for ten steps, with samples at steps 5 and 10,
# and checks that all four images and prompts exist.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv/bin ] && PATH="$PWD/.venv/bin:$PATH"
export NPROC=${NPROC:-4}
rm -rf results/test_sampling  # a second test must not find the images of the first
muralist launch hydit --max-training-steps 10 --ckpt-every 5 --ckpt-latest-every 5 --image-size 64 64 --batch-size 1 \
  --warmup-num-steps 1 --run_name test_sampling --num-workers 0 --val_fraction 0 "$@"
missing=0
for step in 0000005 0000010; do
  for ((rank = 0; rank < NPROC; rank++)); do
    for file in "gpu_${rank}_sample.png" "gpu_${rank}_prompt.txt"; do
      [ -s "results/test_sampling/samples/step_$step/$file" ] || { echo "missing: step_$step/$file" >&2; missing=1; }
    done
  done
done
[ $missing = 0 ] && echo "Sampling works: $NPROC images at each of 2 checkpoints, in results/test_sampling/samples"
exit $missing
