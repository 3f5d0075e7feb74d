#!/usr/bin/env bash
# The same training on 1, 2, 4, … ranks: one array of jobs, and a job that draws the figure when all of them are done.
#
#   slurm/sweep.sh 1,2,4 --global-batch 16     # strong scaling: the same work, shared by more ranks
#   slurm/sweep.sh 1,2,4 --batch 16            # weak scaling: as much work for each rank
#   slurm/sweep.sh 1,2,4%1 --global-batch 16   # one after the other: where nodes are shared they would disturb each other
#   slurm/sweep.sh 1,2,4 --seeds 0,1,2 --name weak     # three runs each; called again, it goes on where it was cut off
#
# Runs, table and figure: runs/sweep-<job>/, or runs/<name>/
set -euo pipefail
source slurm/site.sh
ranks=${1:?which numbers of ranks? slurm/sweep.sh 1,2,4 --global-batch 16}
[[ $ranks =~ ^[0-9]+(,[0-9]+)*(%[0-9]+)?$ ]] || { echo "numbers of ranks look like 1,2,4 and not like $ranks" >&2 && exit 2; }
shift

most=$(tr , '\n' <<<"${ranks%\%*}" | sort -n | tail -n 1)
array=$(sbatch --parsable --array="$ranks" --ntasks="$most" slurm/sweep.sbatch "$@")
plot=$(sbatch --parsable --dependency="afterok:$array" --kill-on-invalid-dep=yes slurm/sweep_plot.sbatch --name "sweep-$array" "$@")
echo "array $array trains on $ranks ranks; then $plot writes scaling.png beside the runs"
