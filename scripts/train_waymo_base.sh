#!/usr/bin/env bash
# HunyuanDiT fine-tuning: `bash scripts/train_waymo_base.sh 5000` trains on driving scenes for 5000 steps, on every GPU in
# CUDA_VISIBLE_DEVICES or else on all GPUs (NPROC on machines without GPUs), with a sample image from each rank at every
# checkpoint. Further arguments go to hydit/train_deepspeed.py. The run is results/waymo_base; the same command resumes.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv/bin ] && PATH="$PWD/.venv/bin:$PATH"
steps=${1:-5000}
exec muralist launch hydit --max-training-steps "$steps" --run_name waymo_base "${@:2}"
