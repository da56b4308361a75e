#!/usr/bin/env bash
# A Slurm of some nodes on this machine, for tests: up.sh PREFIX [NODES [CPUS]]
#
#   . "$(tests/slurm/up.sh /tmp/slurm/a 2 16)"     prints the file to source (SLURM_CONF); ends when all nodes are idle
#   srun -N 2 hostname
#   tests/slurm/down.sh /tmp/slurm/a
#
# Everything is in PREFIX, which must not exist. SIGINT and SIGTERM take down what is up. Ports are free ones. Root gives
# every node a host name and a /dev/shm of its own (n1, n2, ...); without root the nodes share both. No munge, no
# database, no cgroups, no /etc/slurm. Needs
#   apt-get install --no-install-recommends slurmctld slurmd slurm-client libpmix2
set -euo pipefail
prefix=${1:?up.sh PREFIX [NODES [CPUS]]} nodes=${2:-2} cpus=${3:-16}
here=$(dirname "$(readlink -f "$0")") host=$(hostname -s) user=$(id -un) PATH=$PATH:/usr/sbin
die() { echo "up.sh: $*" >&2; exit 2; }
[[ $prefix == /* && $prefix != *[[:space:]]* ]] || die "$prefix: give an absolute path without spaces"
for tool in slurmctld slurmd sinfo python3; do
    command -v $tool >/dev/null || die "there is no $tool: apt-get install --no-install-recommends slurmctld slurmd slurm-client libpmix2"
done
if [[ $(id -u) == 0 ]] && ! unshare --uts --mount true 2>/dev/null; then
    echo "up.sh: this kernel makes no namespaces, so the nodes can have no names of their own" >&2
    exit 4
fi
mkdir -p "$(dirname "$prefix")"
mkdir "$prefix" 2>/dev/null || die "$prefix exists: down.sh $prefix, or another prefix"
# A signal ends this through EXIT. bash may fail to parse the trap of a signal that comes while it expands $(...) ("unexpected
# EOF", status 2): EXIT is left then too.
trap 'status=$?; trap "" INT TERM HUP; [[ $status == 0 ]] || "$here/down.sh" "$prefix" >&2 || true; exit $status' EXIT
trap 'exit 130' INT TERM HUP
: >"$prefix/pids"  # from here on it takes itself down
mkdir "$prefix"/{state,spool,log,pid,tmp}

# Slurm's plug-in opens the name libpmix.so, which only the package for developers has.
pmix=/usr/lib/$(uname -m)-linux-gnu/pmix2/lib
[[ ! -e $pmix/libpmix.so.2 || -e $pmix/libpmix.so || ! -w $pmix ]] || ln -sfn libpmix.so.2 "$pmix/libpmix.so"

cp /etc/hosts "$prefix/hosts"
for ((i = 1; i <= nodes; i++)); do
    mkdir "$prefix"/{spool,tmp}/n$i
    echo "127.0.0.1 n$i" >>"$prefix/hosts"
done
read -r -a ports < <(python3 - $((nodes + 1)) <<'PY'
import socket, sys
held = [socket.socket() for _ in range(int(sys.argv[1]))]
for one in held:
    one.bind(("127.0.0.1", 0))
print(*(one.getsockname()[1] for one in held))
PY
)
{
    cat <<CONF
ClusterName=$(basename "$prefix" | tr -c 'a-z0-9\n' x)
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/none
CredType=cred/none
StateSaveLocation=$prefix/state
SlurmdSpoolDir=$prefix/spool/%n
TmpFS=$prefix/tmp/%n
SlurmctldPidFile=$prefix/pid/slurmctld
SlurmdPidFile=$prefix/pid/%n
SlurmctldLogFile=$prefix/log/slurmctld
SlurmdLogFile=$prefix/log/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
MessageTimeout=10
KillWait=2
OverTimeLimit=0
MinJobAge=3600
InactiveLimit=0
UnkillableStepTimeout=600
JobRequeue=1
CONF
    for ((i = 1; i <= nodes; i++)); do
        echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[i]} CPUs=$cpus RealMemory=4000 State=UNKNOWN"
    done
    echo "PartitionName=test Nodes=ALL Default=YES MaxTime=1:00:00 DefMemPerCPU=100 State=UP OverSubscribe=NO"
} >"$prefix/slurm.conf"
echo "export SLURM_CONF=$prefix/slurm.conf" >"$prefix/env"
export SLURM_CONF=$prefix/slurm.conf

# The daemons get none of the variables of a job in which this may run, and sessions of their own. With -D the pid is
# that of the daemon. It is noted with its start time, because pids come again.
daemon() {
    local name=$1
    shift
    env -i PATH="$PATH" HOME="${HOME:-/}" LANG="${LANG:-C.UTF-8}" SLURM_CONF="$SLURM_CONF" setsid "$@" </dev/null >>"$prefix/log/out" 2>&1 &
    echo "$! $(awk '{print $22}' "/proc/$!/stat") $name" >>"$prefix/pids"
}
stop() { "$here/down.sh" "$prefix" --keep-logs >&2 || true; trap - EXIT; exit 1; }
daemon slurmctld slurmctld -D -c -f "$SLURM_CONF"
for ((i = 1; i <= nodes; i++)); do
    if [[ $(id -u) == 0 ]]; then
        daemon n$i unshare --uts --mount sh -c 'hostname "$1"; mount -t tmpfs -o mode=1777 none /dev/shm
            mount --bind "$3" /etc/hosts; exec slurmd -D -N "$1" -f "$2"' sh n$i "$SLURM_CONF" "$prefix/hosts"
    else
        daemon n$i slurmd -D -N n$i -f "$SLURM_CONF"
    fi
done
for ((t = 0; t < 150; t++)); do
    if [[ $(sinfo -h -N -o %t 2>/dev/null | sort | uniq -c | tr -s ' ') == " $nodes idle" ]]; then
        echo "$prefix/env"
        exit 0
    fi
    while read -r pid start name; do
        kill -0 "$pid" 2>/dev/null && continue
        echo "up.sh: $name has ended:" >&2
        tail -3 "$prefix/log/out" >&2
        stop
    done <"$prefix/pids"
    sleep 0.2
done
echo "up.sh: the nodes are not idle after 30 s:" >&2
sinfo -N -l >&2 || true
stop
