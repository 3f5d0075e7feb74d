# The only file that a site edits. Every job sources it; source it yourself before sbatch, and its SBATCH_* lines count too.
# shellcheck shell=bash

# 1. What sbatch itself should know: EDIT, or leave out.
# export SBATCH_PARTITION=gpu SBATCH_ACCOUNT=project123 SBATCH_GPUS_PER_NODE=4

# 2. Software: EDIT, modules or conda in place of the venv that `make setup` has made.
# module load python/3.11 cuda
VENV=${VENV:-$PWD/.venv}
PATH="$VENV/bin:$PATH"

# 3. Ranks on each node: one for each GPU that the job has, or one for each core.
ranks_per_node() { echo $((${SLURM_GPUS_ON_NODE:-0} > 0 ? SLURM_GPUS_ON_NODE : ${SLURM_CPUS_PER_TASK:-1})); }

# 4. Network: EDIT where gloo or NCCL choose a slow interface by themselves.
# export GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0

# ---- nothing to edit from here on ----------------------------------------------------------------------------------------
export PATH VENV OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=PASSIVE COURSE_PLAIN=1
if [[ -n ${SLURM_JOB_ID:-} ]]; then # where the ranks meet: the first node, at a port that hardly any other job has
    MEET_AT=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    MEET_PORT=$((10000 + SLURM_JOB_ID % 20000)) # below those that the system gives to anybody
    RANKS_PER_NODE=${RANKS_PER_NODE:-$(ranks_per_node)}
    TORCHELASTIC_RUN_ID=$SLURM_JOB_ID           # the same when the job is queued again
    TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[rank \${rank}] " # torchrun fills it in
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or ranks that torchrun starts again look for the dead ones: see world.py
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE MEET_AT MEET_PORT RANKS_PER_NODE TORCHELASTIC_RUN_ID TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE
fi
