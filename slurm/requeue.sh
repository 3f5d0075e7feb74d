#!/usr/bin/env bash
# exec slurm/requeue.sh srun …: when this job's time is nearly up, have the ranks save and stop, and put the job into the queue
# again. It keeps its number, by which the trainer knows the checkpoint for its own and goes on from there. The job needs
#
#   #SBATCH --signal=B:USR1@60      # to this script, a minute before the end
#   #SBATCH --open-mode=append      # one log for all its parts
set -uo pipefail
again=
trap 'trap "" USR1; again=yes; echo "time is nearly up: job $SLURM_JOB_ID shall save, stop and queue again"
    kill -USR1 "$ranks"' USR1 # once: a second signal would cut the wait for the ranks short

"$@" & # srun and mpirun pass a signal on to the ranks
ranks=$!
wait "$ranks"
code=$?
if [[ -n $again ]]; then
    wait "$ranks" # the first was cut short by the signal
    code=$?
    ((code == 0)) || exec scontrol requeue "$SLURM_JOB_ID" # or they were done anyway
fi
exit "$code"
