#!/usr/bin/env bash
# Stop what hub/up.sh has started: servers, hub, proxy, Slurm. Learners' files and the accounts stay. make hub-down
set -uo pipefail
DIR=$(realpath -ms "${1:-${COURSE_HUB:-/tmp/course-hub-$(id -un)}}")
ROOT=$(realpath "$(dirname "$0")/..")
[[ -d $DIR && ! -L $DIR && -O $DIR ]] || exit 0
for name in hub proxy; do
    pid=$(cat "$DIR/$name.pid" 2>/dev/null) || continue
    # A number from before this machine was restarted may be anybody's by now.
    if grep -qszxF "COURSE_HUB_STATE=$DIR" "/proc/$pid/environ"; then
        kill "$pid"
        for _ in {1..100}; do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        kill -9 "$pid" 2>/dev/null
    fi
    rm -f "$DIR/$name.pid"
done
[[ -f $DIR/slurm/slurm.conf ]] || exit 0
SLURM_CONF=$DIR/slurm/slurm.conf timeout 10 scancel --partition=course 2>/dev/null
"$ROOT/slurm/local/down.sh" "$DIR/slurm"
