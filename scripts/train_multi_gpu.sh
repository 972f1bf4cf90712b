#!/usr/bin/env bash
# Guide 2, one machine: trains on every GPU named in CUDA_VISIBLE_DEVICES, or on as many processes as
# accelerate_config_single_node.yaml says. NPROC overrides both (and is how machines without GPUs choose). Further
# arguments go to train.py.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -d .venv/bin ] && PATH="$PWD/.venv/bin:$PATH"
processes=${NPROC:-}
if [ -z "$processes" ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
  IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
  processes=${#devices[@]}
fi
exec accelerate launch --config_file accelerate_config_single_node.yaml ${processes:+--num_processes "$processes"} \
  train.py --config configs/base_config.yaml "$@"
