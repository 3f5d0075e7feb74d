#!/usr/bin/env bash
# Run a job script on this machine without Slurm: the same file, the same number of ranks, all of them here.
#
#   slurm/local/run.sh [SBATCH OPTIONS] SCRIPT [FLAGS]
#   slurm/local/run.sh --nodes=1 slurm/04_ddp.sbatch --epochs 5
#
# Of the options, and of the script's own #SBATCH lines, those count that say how many ranks there are.
set -euo pipefail
nodes=1 ntasks='' ntasks_per_node=1 cpus_per_task=1

understand() {
    case $1 in
    --nodes=*) nodes=${1#*=} ;;
    --ntasks=*) ntasks=${1#*=} ;;
    --ntasks-per-node=*) ntasks_per_node=${1#*=} ;;
    --cpus-per-task=*) cpus_per_task=${1#*=} ;;
    esac
}
options=()
while [[ ${1:-} == -* ]]; do
    options+=("$1")
    shift
done
script=${1:?which script? slurm/local/run.sh slurm/04_ddp.sbatch}
shift
for option in $(sed -n 's/^#SBATCH \(--[^ ]*\).*/\1/p' "$script") ${options[@]+"${options[@]}"}; do understand "$option"; done

if grep -q ' torchrun ' "$script"; then # one for all the nodes, since they are one machine
    ntasks=1
    export RANKS_PER_NODE=$((nodes * cpus_per_task))
fi
export SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=localhost SLURM_NNODES=1 SLURM_CPUS_PER_TASK=$cpus_per_task
export SLURM_NTASKS=${ntasks:-$((nodes * ntasks_per_node))}
export SLURM_NTASKS_PER_NODE=$SLURM_NTASKS

srun() {
    local tasks=() task code=0 how count=$SLURM_NTASKS
    while [[ $1 == -* ]]; do
        [[ $1 != --ntasks=* ]] || count=${1#*=}
        shift
    done
    for ((task = 0; task < count; task++)); do
        {
            SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=$count SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 \
                SLURM_STEP_NUM_TASKS=$count "$@" || code=$?
            how="Exited with exit code $code"
            ((code <= 128)) || how="Killed by signal $((code - 128))"
            ((code == 0)) || echo "srun: error: localhost: task $task: $how" >&2
            exit "$code"
        } &
        tasks+=($!)
    done
    for task in "${tasks[@]}"; do wait "$task" || code=$?; done
    return "$code"
}
scontrol() { echo localhost; } # show hostnames
mpirun() { env -u SLURM_JOB_ID -u SLURM_JOB_NODELIST mpirun "$@"; }
export -f srun scontrol mpirun
exec bash "$script" "$@"
