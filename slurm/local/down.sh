#!/usr/bin/env bash
# Stop what slurm/local/up.sh has started, and nothing else: make cluster-down
set -uo pipefail
DIR=$(realpath -ms "${1:-${COURSE_CLUSTER:-/tmp/course-cluster-$(id -un)}}")
[[ -d $DIR && ! -L $DIR && -O $DIR ]] || exit 0
export SLURM_CONF=$DIR/slurm.conf

# Zombies have no environment; and a number from before this machine was restarted may be anybody's by now.
alive() { grep -qszxF "SLURM_CONF=$SLURM_CONF" "/proc/$1/environ"; }
pid_of() { cat "$DIR/run/$1.pid" 2>/dev/null || true; }

if controller=$(pid_of slurmctld) && [[ -n $controller ]] && alive "$controller"; then
    timeout 10 scancel --user="$(id -un)" --state=PENDING 2>/dev/null
    timeout 10 scancel --user="$(id -un)" 2>/dev/null
    for _ in {1..50}; do
        [[ -z $(timeout 5 squeue -h 2>/dev/null) ]] && break
        sleep 0.2
    done
fi
for file in "$DIR"/run/slurmd.*.pid "$DIR"/run/slurmctld.pid "$DIR"/run/munged.pid; do
    [[ -s $file ]] || continue
    pid=$(<"$file")
    alive "$pid" || continue
    kill "$pid"
    for _ in {1..100}; do
        alive "$pid" || break
        sleep 0.1
    done
    if alive "$pid"; then kill -9 "$pid"; fi
done
exit 0
