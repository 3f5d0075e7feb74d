#!/usr/bin/env bash
# The same training on 1, 2, 4, … ranks: a job for each, and one that draws the figure when all of them are done.
#
#   slurm/sweep.sh 1,2,4 --global-batch 16     # strong scaling: the same work, shared by more ranks
#   slurm/sweep.sh 1,2,4 --batch 16            # weak scaling: as much work for each rank
#   slurm/sweep.sh 1,2,4%1 --global-batch 16   # one after the other: where nodes are shared they would disturb each other
#   slurm/sweep.sh 1,2,4 --seeds 0,1,2 --name weak     # three runs each; called again, it goes on where it was cut off
#
# Called again while its jobs are still there, it finds them instead of submitting them twice. Runs, table and figure:
# runs/<name>/
set -euo pipefail
source slurm/site.sh
ranks=${1:?which numbers of ranks? slurm/sweep.sh 1,2,4 --global-batch 16}
[[ $ranks =~ ^[0-9]+(,[0-9]+)*(%1)?$ ]] || { echo "numbers of ranks look like 1,2,4 and not like $ranks" >&2 && exit 2; }
shift

name=sweep-$(date +%Y%m%d-%H%M%S) before=
for word in "$@"; do
    [[ $before != --name ]] || name=$word
    [[ $word != --name=* ]] || name=${word#--name=}
    before=$word
done
jobs=()
for n in $(tr , ' ' <<<"${ranks%\%1}"); do
    label=sweep-$name-$n key=$(cksum <<<"$PWD $n $*" | tr ' ' -)
    [[ $ranks != *%1 ]] || label=sweep-$name # jobs of one name take turns, as all do that write into the same folders
    job=$(squeue --me --noheader --states=PD,CF,R,S --name="$label" --format="%A $key %k" | awk '$2 == $3 {print $1}')
    [[ $job ]] || job=$(sbatch --parsable --job-name="$label" --comment="$key" --dependency=singleton --ntasks="$n" \
        slurm/sweep.sbatch --ranks "$n" --name "$name" "$@")
    jobs+=("${job%%;*}")
done
all=$(tr ' ' : <<<"${jobs[*]}")
plot=$(sbatch --parsable --dependency="afterok:$all" --kill-on-invalid-dep=yes slurm/sweep_plot.sbatch --name "$name" "$@")
echo "jobs ${jobs[*]} train on $ranks ranks; then ${plot%%;*} writes scaling.png beside the runs"
