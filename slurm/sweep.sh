#!/usr/bin/env bash
# The same training on 1, 2, 4, … ranks: a job for each, and one that draws the figure when all of them are done.
#
#   slurm/sweep.sh 1,2,4 --global-batch 16     # strong scaling: the same work, shared by more ranks
#   slurm/sweep.sh 1,2,4 --batch 16            # weak scaling: as much work for each rank
#   slurm/sweep.sh 1,2,4%1 --global-batch 16   # one after the other: where nodes are shared they would disturb each other
#   slurm/sweep.sh 1,2,4 --seeds 0,1,2 --name weak     # three runs each; called again, it goes on where it was cut off
#
# Runs, table and figure: runs/<name>/
set -euo pipefail
source slurm/site.sh
ranks=${1:?which numbers of ranks? slurm/sweep.sh 1,2,4 --global-batch 16}
[[ $ranks =~ ^[0-9]+(,[0-9]+)*(%1)?$ ]] || { echo "numbers of ranks look like 1,2,4 and not like $ranks" >&2 && exit 2; }
shift

name=sweep-$(date +%Y%m%d-%H%M%S)
turns=()
[[ $ranks != *%1 ]] || turns=(--dependency=singleton)
jobs=()
for n in $(tr , ' ' <<<"${ranks%\%1}"); do
    job=$(sbatch --parsable --ntasks="$n" ${turns[@]+"${turns[@]}"} slurm/sweep.sbatch --ranks "$n" --name "$name" "$@")
    jobs+=("${job%%;*}")
done
all=$(tr ' ' : <<<"${jobs[*]}")
plot=$(sbatch --parsable --dependency="afterok:$all" --kill-on-invalid-dep=yes slurm/sweep_plot.sbatch --name "$name" "$@")
echo "jobs ${jobs[*]} train on $ranks ranks; then ${plot%%;*} writes scaling.png beside the runs"
