#!/usr/bin/env bash
# srun slurm/rank_env.sh PROGRAM …: one task is one rank; Slurm's words for its place become those that all launchers share.
set -euo pipefail
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
export MASTER_ADDR=${MEET_AT:?source slurm/site.sh in the job first} MASTER_PORT=$MEET_PORT
exec "$@"
