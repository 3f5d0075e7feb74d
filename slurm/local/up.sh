#!/usr/bin/env bash
# A real Slurm with two nodes on this one machine: make cluster
#
#   slurm/local/up.sh [DIR]        state, logs and sockets in DIR (default: /tmp/course-cluster-<you>), and nowhere else
#   eval "$(slurm/local/up.sh)"    and this shell's sbatch, srun, squeue talk to it
#
# As root jobs may run as any user, otherwise as you. Loopback addresses, no systemd, no cgroups. Running already: it says so.
set -euo pipefail
export PATH=$PATH:/usr/sbin
DIR=$(realpath -ms "${1:-${COURSE_CLUSTER:-/tmp/course-cluster-$(id -un)}}")
NODES=2 CPUS=${COURSE_CPUS:-8} MEMORY=8000 # CPUs and MB that each node claims to have; ranks here are small
export SLURM_CONF=$DIR/slurm.conf

for program in munged slurmctld slurmd sinfo; do
    command -v $program >/dev/null || {
        echo "$program is missing; on Debian or Ubuntu: apt-get install slurm-wlm slurm-client munge" >&2
        exit 2
    }
done

mkdir -p "$(dirname "$DIR")"
mkdir "$DIR" 2>/dev/null || [[ -d $DIR && ! -L $DIR && -O $DIR ]] ||
    { echo "$DIR can't be made or belongs to somebody else; name another folder: COURSE_CLUSTER=..." >&2 && exit 2; }
idle() { { timeout 5 sinfo -h -N -p course -t idle,mixed,allocated -o %N 2>/dev/null || true; } | sort -u | wc -l; }
if [[ -f $SLURM_CONF && $(idle) == "$NODES" ]]; then
    echo "export SLURM_CONF=$SLURM_CONF"
    exit 0
fi

# ---- our own munge: a key and a socket that nobody else uses -------------------------------------------------------------
mkdir -p "$DIR"/{munge,state,spool,run,log,tmp}
chmod 755 "$DIR" "$DIR"/{munge,spool,run,log,tmp}
chmod 700 "$DIR/state" # the environments of jobs
[[ -s $DIR/munge/key ]] || (umask 077 && head -c 128 /dev/urandom >"$DIR/munge/key")
munge -S "$DIR/munge/socket" -n >/dev/null 2>&1 ||
    munged --key-file="$DIR/munge/key" --socket="$DIR/munge/socket" --pid-file="$DIR/run/munged.pid" \
        --log-file="$DIR/munge/log" --seed-file="$DIR/munge/seed" --num-threads=2

# ---- the configuration ---------------------------------------------------------------------------------------------------
free_ports() {
    python3 -c 'import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))' "$1"
}
read -r -a PORTS <<<"$(free_ports $((NODES + 1)))"
{
    cat <<END
ClusterName=course
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=${PORTS[0]}
SlurmUser=$(id -un)
FirstJobId=$((${COURSE_FIRST_JOB:-$(date +%s)} % 10000000))
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/socket,cred_expire=10
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
TmpFS=$DIR/tmp/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=100000,sched_interval=5,bf_interval=5
ReturnToService=2
SlurmdTimeout=60
KillWait=5
MinJobAge=3600
MpiDefault=none
JobRequeue=1
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobs.txt
AccountingStorageType=accounting_storage/none
END
    for ((i = 1; i <= NODES; i++)); do
        echo "NodeName=node$i NodeHostname=node$i NodeAddr=127.0.1.$i Port=${PORTS[$i]} CPUs=$CPUS RealMemory=$MEMORY"
    done
    echo "PartitionName=course Nodes=node[1-$NODES] Default=YES DefMemPerCPU=$((MEMORY / CPUS)) MaxTime=04:00:00 DefaultTime=00:10:00"
} >"$SLURM_CONF"
echo "CgroupPlugin=cgroup/v1" >"$DIR/cgroup.conf" # slurmd 22.05 looks for cgroups even though nothing here uses them
{
    cat /etc/hosts
    for ((i = 1; i <= NODES; i++)); do echo "127.0.1.$i node$i"; done
} >"$DIR/hosts"

# ---- the daemons: each node has a host name and a hosts file of its own --------------------------------------------------
node() { unshare -u -m --propagation slave -- "$@"; }
[[ $(id -u) == 0 ]] || node() { unshare -c --keep-caps -u -m -- "$@"; }
slurmctld
for ((i = 1; i <= NODES; i++)); do
    mkdir -p "$DIR/spool/node$i" "$DIR/tmp/node$i"
    chmod 1777 "$DIR/tmp/node$i"
    # shellcheck disable=SC2016 # expanded inside
    node sh -c 'hostname "$1"; mount --bind "$2" /etc/hosts; [ -z "$3" ] || . "$3"; exec slurmd -N "$1"' - \
        "node$i" "$DIR/hosts" "${COURSE_NODE_SETUP:-}"
done

for _ in {1..150}; do
    [[ $(idle) == "$NODES" ]] && echo "export SLURM_CONF=$SLURM_CONF" && exit 0
    sleep 0.1
done
echo "the nodes did not come up; what the daemons said:" >&2
tail -n 20 "$DIR"/log/*.log >&2
exit 1
