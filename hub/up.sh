#!/usr/bin/env bash
# The hub on this one machine, with a Slurm of its own: make hub
#
#   hub/up.sh [DIR]     state, logs and secrets in DIR (default: /tmp/course-hub-<you>), and nowhere else
#
# Root only: every name in hub/site.toml is, or becomes, an account of this machine, and servers are jobs in these names.
set -euo pipefail
ROOT=$(realpath "$(dirname "$0")/..")
DIR=$(realpath -ms "${1:-${COURSE_HUB:-/tmp/course-hub-$(id -un)}}")
VENV=$ROOT/.venv
export COURSE_HUB_STATE=$DIR COURSE_NODE_SETUP=$ROOT/hub/node.sh COURSE_ROOT=$ROOT
cd "$ROOT"
[[ $(id -u) == 0 ]] || { echo "the hub starts jobs in the names of others, so it needs root: sudo make hub" >&2 && exit 2; }
[[ -x $VENV/bin/jupyterhub ]] || { echo "JupyterHub is missing; make hub brings it" >&2 && exit 2; }
command -v curl >/dev/null || { echo "curl is missing; on Debian or Ubuntu: apt-get install curl" >&2 && exit 2; }
URL=$("$VENV/bin/python" -m hub.site url)
TEACHERS=$("$VENV/bin/python" -m hub.site teachers)
LEARNERS=$("$VENV/bin/python" -m hub.site learners)

mkdir -p "$(dirname "$DIR")"
mkdir -m 711 "$DIR" 2>/dev/null || [[ -d $DIR && ! -L $DIR && -O $DIR ]] ||
    { echo "$DIR can't be made or belongs to somebody else; name another folder: COURSE_HUB=..." >&2 && exit 2; }
chmod 711 "$DIR"
ours() { local pid && pid=$(cat "$DIR/$1.pid" 2>/dev/null) && grep -qszxF "COURSE_HUB_STATE=$DIR" "/proc/$pid/environ"; }
if ! ours hub && ! ours proxy; then
    curl -s -o /dev/null --noproxy '*' --max-time 5 "$URL" && answer=0 || answer=$? # 6, 7: nobody listens there
    [[ $answer == [67] ]] ||
        { echo "another program listens at $URL: stop it, or choose another url in ${COURSE_HUB_SITE:-hub/site.toml}" >&2 && exit 2; }
fi
COURSE_PYTHON=$("$VENV/bin/python" -c 'import sys; print(sys.base_prefix)')
export COURSE_PYTHON
COURSE_FIRST_JOB=$(($(date +%s) + 10000)) # far from those of make cluster: ranks meet at a port that follows from it
export COURSE_FIRST_JOB
slurm=$(slurm/local/up.sh "$DIR/slurm")
eval "$slurm"

[[ -s $DIR/password ]] || (umask 077 && head -c 9 /dev/urandom | base64 | tr '+/' 'xy' >"$DIR/password")
getent group course-teachers >/dev/null || groupadd course-teachers
for name in $TEACHERS $LEARNERS; do
    id -u "$name" >/dev/null 2>&1 && continue
    useradd --create-home --shell /bin/bash --comment "course demo" "$name"
    chmod 700 "$(getent passwd "$name" | cut -d: -f6)"
done
for name in $TEACHERS; do usermod --append --groups course-teachers "$name"; done
mkdir -p "$DIR/exchange"
chmod 1777 "$DIR/exchange"
teacher=${TEACHERS%% *} # who releases and collects; were the course's folder missing, any learner could make it
[[ -d $DIR/exchange/ddl ]] || install -d -m 755 -o "${teacher:-root}" "$DIR/exchange/ddl"
"$VENV/bin/python" -m hub.publish "$DIR/published" --teachers course-teachers

if ours hub; then
    echo "the hub is running: $URL"
    exit 0
fi

# A shell lets what runs in its background ignore ^C, and a hub stops its services by just that signal.
umask 077
# shellcheck disable=SC2016 # expanded inside
setsid env --default-signal=INT unshare -m --propagation slave sh -c 'mount --bind "$1" /etc/hosts; shift; exec "$@"' - "$DIR/slurm/hosts" \
    "$VENV/bin/jupyterhub" -f hub/jupyterhub_config.py >>"$DIR/hub.log" 2>&1 </dev/null &
for _ in {1..300}; do
    if curl -fsS -o /dev/null --noproxy '*' "$URL/hub/login" 2>/dev/null; then
        echo "the hub is at $URL; the password of the demo is in $DIR/password; make hub-down stops it"
        exit 0
    fi
    kill -0 $! 2>/dev/null || break
    sleep 0.2
done
echo "the hub did not come up; what it said:" >&2
tail -n 20 "$DIR/hub.log" >&2
exit 1
