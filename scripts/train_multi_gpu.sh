#!/usr/bin/env bash
# Multi-GPU training on one machine: uses every GPU in CUDA_VISIBLE_DEVICES, or as many processes as
# accelerate_config_single_node.yaml sets. NPROC overrides both, also on machines without GPUs. Further arguments go to
# train.py.
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
