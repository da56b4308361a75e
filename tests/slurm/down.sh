#!/usr/bin/env bash
# Take down what up.sh started under PREFIX, and nothing else: down.sh PREFIX [--keep-logs]
# The exit status is 3 if processes of jobs were still there afterwards. They are named, and ended.
set -euo pipefail
prefix=${1:?down.sh PREFIX [--keep-logs]} keep=${2:-}
[[ -f $prefix/slurm.conf && -f $prefix/pids ]] || { echo "down.sh: $prefix was not made by up.sh" >&2; exit 2; }
export SLURM_CONF=$prefix/slurm.conf PATH=$PATH:/usr/sbin
same() { [[ -r /proc/$1/stat && $(awk '{print $22}' "/proc/$1/stat" 2>/dev/null) == "$2" ]]; }

# Jobs first, while there are daemons to end them.
read -r pid start _ <"$prefix/pids"
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

# What jobs left: processes whose environment says that they are of a job of this slurm.conf.
status=0
python3 - "$prefix" <<'PY' || status=3
import os, signal, sys
from pathlib import Path

conf, found = f"SLURM_CONF={sys.argv[1]}/slurm.conf".encode(), False
for folder in Path("/proc").glob("[0-9]*"):
    try:
        words = (folder / "environ").read_bytes().split(b"\0")
        line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it has ended, or belongs to somebody else
        continue
    if conf in words and any(word.startswith((b"SLURM_JOB_ID=", b"SLURMD_NODENAME=")) for word in words):
        print(f"down.sh: left behind, ended: {folder.name} {line[:120]}", file=sys.stderr)
        found = True
        os.kill(int(folder.name), signal.SIGKILL)
sys.exit(found)
PY
if [[ $keep == --keep-logs ]]; then rm -rf "$prefix"/{state,spool,pid}; else rm -rf "$prefix"; fi
exit $status
