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
# Guide 2, several machines: `sbatch scripts/train_slurm_multi_node.sh` from the repository's folder; further arguments go
# to train.py. Three minutes before --time is up the run is saved, and the job goes back into the queue and on from there:
# --time is the length of a turn, not of the training. Nodes and GPUs are counted from the lines above, the rest is in
# accelerate_config_multi_node.yaml. On nodes without GPUs take out the two lines that name them, and set NPROC to the
# number of processes per node.
set -euo pipefail
# SLURM runs a copy of this file from a folder of its own.
cd "${SLURM_SUBMIT_DIR:?this is a job: sbatch scripts/train_slurm_multi_node.sh}"
[ -d .venv/bin ] && PATH="$PWD/.venv/bin:$PATH"
trap "" USR1  # for the moment until the next line listens to it
exec python -m muralist.scale.slurm_job accelerate launch --config_file accelerate_config_multi_node.yaml \
  train.py --config configs/base_config.yaml "$@"
