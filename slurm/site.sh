# The only file that a site edits. Every job sources it; source it yourself before sbatch, and its SBATCH_* lines count too.
# shellcheck shell=bash

# 1. What sbatch itself should know: EDIT, or leave out.
# export SBATCH_PARTITION=gpu SBATCH_ACCOUNT=project123

# 2. Software: EDIT, modules or conda in place of the venv that `make setup` has made.
# module load python/3.11 cuda
PATH="$PWD/.venv/bin:$PATH"

# 3. Ranks on each node: one for each GPU that the job has, or one for each core.
gpus=${SLURM_GPUS_ON_NODE:-0}
RANKS_PER_NODE=${RANKS_PER_NODE:-$((gpus > 0 ? gpus : ${SLURM_CPUS_PER_TASK:-1}))}

# 4. Network: EDIT where gloo or NCCL choose a slow interface by themselves.
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

# ---- nothing to edit from here on ----------------------------------------------------------------------------------------
export PATH RANKS_PER_NODE OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE COURSE_PLAIN=1
if [[ -n ${SLURM_JOB_ID:-} ]]; then # where the ranks meet: the first node, at a port that no other job has
    MEET_AT=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MEET_PORT=$((20000 + SLURM_JOB_ID % 20000))
    export MEET_AT MEET_PORT
fi
