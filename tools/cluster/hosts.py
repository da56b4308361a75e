"""The hosts and the links between them."""

from __future__ import annotations

import os
import shlex
import signal
import socket
from contextlib import suppress
from pathlib import Path

from cluster.cores import HostCores
from cluster.namespaces import MS_BIND, MS_PRIVATE, MS_REC, NEWNET, NEWNS, NEWUTS, exit_with, libc, mount, tool
from cluster.relay import Relay
from cluster.values import Change, Cores, Distance, Lab, Rate, Refused, allowed_congestion_controls

LAB = Path("/dev/shm/netlab")
"""The folder of the cluster's files. It is in a private tmpfs, which disappears with the cluster."""

SUBNET, CONTROL = "10.77.0", "10.78.0"
"""The networks of messages (eth0) and of launchers (eth1)."""


class Cluster:
    """The running hosts and links. Each host is a process with namespaces of its own."""

    def __init__(self, lab: Lab, cores: HostCores | None = None) -> None:
        self.lab, self.cores = lab, cores
        keep_cores_awake()
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
        mount("proc", "/proc", "proc")
        use_congestion_control(lab.congestion)  # here first, so that an error is printed once
        mount("tmpfs", "/dev/shm", "tmpfs")
        LAB.mkdir()
        names = [f"{SUBNET}.{host + 1} {name}\n" for host, name in enumerate(lab.names)]
        (LAB / "hosts").write_text("".join(["127.0.0.1 localhost\n", f"{CONTROL}.254 switch\n", *names]))
        mount(str(LAB / "hosts"), "/etc/hosts", flags=MS_BIND)
        socket.sethostname("switch")
        self.pids = [start_host(name, lab.congestion) for name in lab.names]
        self._relay = Relay()
        self._lay_links()
        self._relay.start()
        self._write_scripts()

    def _lay_links(self) -> None:
        lab = self.lab
        make = ["link set lo up", f"address add {CONTROL}.254/24 dev control"]
        make[1:1] = [
            f"link {verb}" for name in ("lab", "control") for verb in (f"add {name} type bridge", f"set {name} up")
        ]
        switches = ["lab"]
        if lab.between:
            switches = [f"group{group}" for group in range(lab.groups)]
            for group, switch in enumerate(switches):
                up, down = f"up{group}", f"down{group}"
                make += [
                    f"link add {switch} type bridge",
                    *self._join(down, up, None, lab.far),
                    f"link set {up} master {switch} up",
                    f"link set {down} master lab up",
                    f"link set {switch} up",
                ]
        for host, pid in enumerate(self.pids):
            make += [
                *self._join(f"port{host}", "eth0", pid, lab.near),
                f"link set port{host} master {switches[lab.group(host)]} up",
                f"link add control{host} type veth peer eth1 netns {pid}",
                f"link set control{host} master control up",
                f"link set control{host} type bridge_slave isolated on",
            ]
        tool("ip", "-batch", "-", text="\n".join(make))
        for host, pid in enumerate(self.pids):
            inside = ["link set lo up", "link set eth0 up", "link set eth1 up"]
            inside += [f"address add {net}.{host + 1}/24 dev eth{i}" for i, net in enumerate((SUBNET, CONTROL))]
            tool("ip", "-batch", "-", text="\n".join(inside), pid=pid)
        for host, rate in enumerate(lab.rates):
            self.apply(Change(f"h{host}", rate))
        if lab.between:
            self.apply(Change("between", lab.between))

    def _join(self, port: str, far: str, pid: int | None, distance: Distance | None) -> list[str]:
        """The commands that make a link: `port` here, `far` in the namespace of process `pid`."""
        there = f" netns {pid}" if pid else ""
        if distance is None:
            return [f"link add {port} type veth peer {far}{there}"]
        inner = f"in{port}"  # its name until it is there: the switch has an eth0 of each host for a moment
        self._relay.make(inner, port, distance.loss)
        return [f"link set {inner}{there} name {far}"]

    def move_apart(self) -> None:
        """Give the links their latencies and losses. Rates are measured before: then TCP fills a link at once."""
        if self.lab.far:
            self.apply(Change("between", None, self.lab.far))
        if self.lab.near:
            for name in self.lab.names:
                self.apply(Change(name, None, self.lab.near))

    def _write_scripts(self) -> None:
        """Write the stand-in for ssh, and the script that starts a rank."""
        for name, pid in zip(self.lab.names, self.pids, strict=True):
            (LAB / name).write_text(f"{pid}\n")
            (LAB / f"gate-{name}").write_text(f"{self.cores.gate(name) if self.cores else '/dev/null'}\n")
        for name, text in (("agent", AGENT), ("rank", rank_script(self.lab.pinned))):
            (LAB / name).write_text(text)
            (LAB / name).chmod(0o755)

    def apply(self, change: Change) -> None:
        """Change a link in both directions, or all links between groups; or the cores of a host.

        Packets that wait in the old token bucket are dropped. One of them may be too large for the new bucket, and
        would block it.
        """
        if isinstance(change.what, Cores):
            assert self.cores
            return self.cores.limit(change.link, change.what)
        if change.link == "between":
            links: list[tuple[str, str, int | None]] = [(f"down{k}", f"up{k}", None) for k in range(self.lab.groups)]
        else:
            host = self.lab.names.index(change.link)
            links = [(f"port{host}", "eth0", self.pids[host])]
        for port, far, pid in links:  # `far` is in the namespace of process `pid`
            if change.distance:
                self._relay.change(port, change.distance)
            if isinstance(change.what, Rate):
                shape = change.what.shape(self.lab.burst)
                for device, where in ((port, None), (far, pid)):
                    commands = f"qdisc replace dev {device} root pfifo\nqdisc replace dev {device} root {shape}"
                    tool("tc", "-batch", "-", text=commands, pid=where)
                if pid and self.lab.near:
                    # What does not fit into the bucket is split into frames, which cost the relay more. 1/16: headers.
                    most = min(change.what.bucket(self.lab.burst) * 15 // 16, 65536)
                    tool("ip", "link", "set", far, "gso_max_size", str(most), pid=pid)
            elif change.what:  # a port that is down drops packets without an error
                tool("ip", "link", "set", port, "down" if change.what == "cut" else "up")


# Used like ssh: agent [options] host command. A launcher's daemon leaves files in /tmp when it is killed. Here it
# writes into an overlay above /tmp that disappears with it. If the kernel has no overlays, it writes to /tmp itself.
AGENT = f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1; shift
echo 0 > "$(cat {LAB}/gate-$host)"
exec nsenter --target "$(cat {LAB}/$host)" --net --uts --mount -- unshare --mount sh -c '
    layer={LAB}/layer-$(hostname)-$$
    mkdir -p $layer/upper $layer/work
    mount -t overlay overlay -o lowerdir=/tmp,upperdir=$layer/upper,workdir=$layer/work /tmp 2>/dev/null
    exec sh -c "$0"' "$*"
"""


def rank_script(pinned: bool) -> str:
    """The script that starts a rank: outside of the daemon's overlay of /tmp, and pinned to its core."""
    folder = os.environ.get("TMPDIR")
    own_folder = f"export TMPDIR={shlex.quote(folder)}" if folder else "unset TMPDIR"
    cores = sorted(os.sched_getaffinity(0))
    index = f"$((${{PMI_RANK:-$OMPI_COMM_WORLD_RANK}} % {len(cores)}))"
    pins = [f'{i}) set -- taskset -c {core} "$@" ;;' for i, core in enumerate(cores)] if pinned else []
    return "\n".join(
        [
            "#!/bin/sh",
            own_folder,
            f'case "{index}" in',
            *pins,
            "esac",
            f'exec nsenter --target "$(cat {LAB}/$(hostname))" --mount -- sh -c \'cd "$0" && exec "$@"\' "$PWD" "$@"',
            "",
        ]
    )


def keep_cores_awake() -> None:
    """Keep this machine's idle cores from sleeping while this process lives, if the machine allows it.

    A sleeping core of a virtual machine is lent to others, and needs milliseconds to wake up. Links of 120 MB/s carried
    40 to 100 MB/s with sleeping cores, and 120 MB/s with cores kept awake.
    """
    with suppress(OSError):
        latency = os.open("/dev/cpu_dma_latency", os.O_WRONLY)
        os.write(latency, bytes(4))  # the most microseconds until a core is awake: 0


def use_congestion_control(name: str) -> None:
    """Set the congestion control of TCP in this network namespace."""
    setting, why = Path("/proc/sys/net/ipv4/tcp_congestion_control"), ""
    try:
        setting.write_text(name)
    except OSError as error:
        why = f" ({error.strerror})"
    if setting.read_text().strip() != name:  # the kernel accepts an empty name without an error, and ignores it
        allowed = ", ".join(allowed_congestion_controls())
        raise Refused(f"the hosts' TCP cannot use '{name}'{why}: give --congestion one of {allowed}")


def start_host(name: str, congestion: str) -> int:
    """Start a process that makes its namespaces and then only waits. Returns its pid when the namespaces exist."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:

        def body() -> int:
            libc("unshare", NEWNS | NEWNET | NEWUTS)
            use_congestion_control(congestion)
            socket.sethostname(name)
            shared = os.open(LAB, os.O_PATH)
            mount("tmpfs", "/dev/shm", "tmpfs")
            LAB.mkdir()
            mount(f"/proc/self/fd/{shared}", str(LAB), flags=MS_BIND)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)  # a host exists as long as the cluster
            os.write(writing, b"!")
            while True:
                signal.pause()

        exit_with(body)
    os.close(writing)
    if not os.read(reading, 1):
        raise Refused(f"host {name} cannot be made: see the lines above")
    os.close(reading)
    return child
