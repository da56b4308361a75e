#!/usr/bin/env bash
# Take down what up.sh started under PREFIX, and nothing else: down.sh PREFIX [--keep-logs]
# The exit status is 3 if processes of jobs were still there afterwards. They are named, and ended.
set -euo pipefail
prefix=${1:?down.sh PREFIX [--keep-logs]} keep=${2:-}
[[ -f $prefix/pids ]] || { echo "down.sh: $prefix was not made by up.sh" >&2; exit 2; }
export SLURM_CONF=$prefix/slurm.conf PATH=$PATH:/usr/sbin
same() { [[ -r /proc/$1/stat && $(awk '$3 != "Z" {print $22}' "/proc/$1/stat" 2>/dev/null) == "$2" ]]; }

# Jobs first, while there are daemons to end them.
read -r pid start _ <"$prefix/pids" || pid=0 start=0 # up.sh was killed before it started a daemon
if same "$pid" "$start"; then
    timeout 10 scancel --quiet --state=PENDING --user="$(id -un)" 2>/dev/null || true
    timeout 10 scancel --quiet --user="$(id -un)" 2>/dev/null || true
    for ((t = 0; t < 50; t++)); do
        [[ -z $(timeout 5 squeue -h 2>/dev/null) ]] && break
        sleep 0.2
    done
fi
tac "$prefix/pids" | while read -r pid start name; do
    if same "$pid" "$start"; then kill -TERM "$pid" 2>/dev/null || true; fi
done
for ((t = 0; t < 50; t++)); do
    left=0
    while read -r pid start name; do if same "$pid" "$start"; then left=1; fi; done <"$prefix/pids"
    [[ $left == 0 ]] && break
    sleep 0.1
done
while read -r pid start name; do
    if same "$pid" "$start"; then
        echo "down.sh: $name ($pid) ended by SIGKILL" >&2
        kill -KILL "$pid" || true
    fi
done <"$prefix/pids"

# What jobs left: processes whose environment says that they are of a job of this slurm.conf. And daemons that up.sh had
# no time to note, because it was killed. slurmstepd has no environment, but the log of its node.
status=0
python3 - "$prefix" <<'PY' || status=3
import os, signal, sys, time
from contextlib import suppress
from pathlib import Path

prefix = sys.argv[1]
conf, daemons = f"{prefix}/slurm.conf", {"env", "setsid", "unshare", "sh", "slurmctld", "slurmd"}


def is_left(folder, line):
    """Whether this process belongs to this Slurm. OSError: it has ended, or belongs to somebody else."""
    if line.startswith("slurmstepd"):
        return any(os.readlink(file).startswith(f"{prefix}/log/") for file in (folder / "fd").iterdir())
    words = (folder / "environ").read_bytes().split(b"\0")
    is_of_job = any(word.startswith((b"SLURM_JOB_ID=", b"SLURMD_NODENAME=")) for word in words)
    is_daemon = conf in line and line.split()[0].rpartition("/")[2] in daemons
    return f"SLURM_CONF={conf}".encode() in words and (is_of_job or is_daemon)


def left():
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if line and is_left(folder, line):
                found[int(folder.name)] = line
    return found


end = time.monotonic() + 2
while (found := left()) and time.monotonic() < end:
    time.sleep(0.1)
for pid, line in found.items():
    print(f"down.sh: left behind, ended: {pid} {line[:120]}", file=sys.stderr)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
sys.exit(bool(found))
PY
if [[ $keep == --keep-logs ]]; then rm -rf "$prefix"/{state,spool,pid}; else rm -rf "$prefix"; fi
exit $status
