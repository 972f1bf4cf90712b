#!/usr/bin/env bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-gpu=8
#SBATCH --partition=gpu
#SBATCH --time=24:00:00
#SBATCH --output=logs/train_%j.out
#SBATCH --error=logs/train_%j.err
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
# Multi-node training: run `sbatch scripts/train_slurm_multi_node.sh` in the root of the repository; further arguments go to
# train.py. Three minutes before --time is up the run saves, and the job is requeued and resumes: --time limits one attempt,
# not the training. The numbers of nodes and GPUs come from the lines above, the rest from
# accelerate_config_multi_node.yaml. On nodes without GPUs delete the two lines that name them, and set NPROC to the number
# of processes per node.
set -euo pipefail
# SLURM runs a copy of this file in a spool folder.
cd "${SLURM_SUBMIT_DIR:?this is a job: sbatch scripts/train_slurm_multi_node.sh}"
[ -d .venv/bin ] && PATH="$PWD/.venv/bin:$PATH"
trap "" USR1  # until the next command has a handler
exec python -m muralist.tools.launch accelerate launch --config_file accelerate_config_multi_node.yaml \
  train.py --config configs/base_config.yaml "$@"
