"""`fompi up`, on values: which networks hosts share, which one is chosen, what is said, and what starts the job."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import pytest

from fompi.base.errors import LaunchError
from fompi.cli.up import HostsRequest, files_of
from fompi.hosts import agent, networks, start
from fompi.hosts.networks import ROUTED, NetworkInterface, NoWay, Way
from fompi.hosts.remote import Remote, why_unreached
from fompi.model.machine import PRESETS, Machine

WIRELESS = {
    host: NetworkInterface("wlan0", f"192.168.1.{i}", is_wireless=True) for i, host in enumerate(("h0", "h1"), 5)
}
CABLE = {host: NetworkInterface("eth1", f"10.0.0.{i}", megabits=1000) for i, host in enumerate(("h0", "h1"), 1)}
BRIDGE = NetworkInterface("docker0", "172.17.0.1", 16, is_cable=False)
HOSTS = {host: (WIRELESS[host], CABLE[host], BRIDGE) for host in ("h0", "h1")}
NAMES = {host: each.address for host, each in WIRELESS.items()}


def mbit(there, back=None, latency=1e-4):
    return Way(latency, there * 125e3, (back or there) * 125e3)


def measured(shared, **ways):
    """The networks with these ways, by the names of the interfaces."""
    return [replace(each, ways={("h0", "h1"): ways[each.names[0]]}) for each in shared]


def test_shared_networks_leave_out_what_all_hosts_have_alike():
    found = networks.shared(HOSTS, NAMES)
    assert [network.subnet for network in found] == ["10.0.0.0/24", "192.168.1.0/24"]
    assert [str(network) for network in found] == ["eth1 10.0.0.0/24", "wlan0 192.168.1.0/24"]
    assert networks.shared({"h0": HOSTS["h0"]}, NAMES) == ()


def test_hosts_without_a_common_network_are_routed():
    far = NetworkInterface("ens3", "10.9.0.7", 16)
    hosts = {"h0": (CABLE["h0"], BRIDGE), "h1": (far, BRIDGE)}
    (network,) = networks.shared(hosts, {"h0": "10.0.0.1", "h1": "10.9.0.7"})
    assert network.subnet == ROUTED and network.ends == {"h0": CABLE["h0"], "h1": far}
    assert networks.shared(hosts, {"h0": "10.0.0.1"}) == ()  # the address of h1 is behind a translation
    three = {**HOSTS, "h2": (CABLE["h1"],)}  # an address twice: no network of all
    assert all("h2" not in network.ends for network in networks.shared(three, {}))


def test_of_two_interfaces_in_one_network_the_cable_counts():
    cable = {host: NetworkInterface("eth0", f"192.168.1.{i}", megabits=1000) for i, host in enumerate(("h0", "h1"), 15)}
    (network,) = networks.shared({host: (WIRELESS[host], cable[host]) for host in cable}, NAMES)
    assert network.ends == cable


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_every_pair_of_hosts_is_in_one_round_and_no_host_twice(count):
    hosts = [f"h{i}" for i in range(count)]
    found = networks.rounds(hosts)
    assert sorted(pair for pairs in found for pair in pairs) == sorted(combinations(hosts, 2))
    for pairs in found:
        used = [host for pair in pairs for host in pair]
        assert len(used) == len(set(used))


def test_the_fastest_network_is_chosen_and_of_two_alike_the_one_with_less_latency():
    shared = networks.shared(HOSTS, NAMES)

    def chosen(**ways):
        best = networks.choose(measured(shared, **ways))
        return best and best.names

    assert chosen(wlan0=mbit(40), eth1=mbit(940)) == ("eth1",)
    assert chosen(wlan0=mbit(40), eth1=mbit(940, back=10)) == ("wlan0",)  # the slower direction counts
    assert chosen(wlan0=mbit(100, latency=1e-3), eth1=mbit(95)) == ("eth1",)
    assert chosen(wlan0=mbit(100), eth1=mbit(95, latency=1e-3)) == ("wlan0",)
    assert chosen(wlan0=mbit(40), eth1=NoWay("h0", "h1", "dropped")) == ("wlan0",)
    assert chosen(wlan0=NoWay("h0", "h1", "refused"), eth1=NoWay("h1", "h0", "dropped")) is None


def said(hosts=None, reached=None, **ways):
    hosts, reached = hosts or HOSTS, NAMES if reached is None else reached
    shared = measured(networks.shared(hosts, reached), **ways)
    return [*networks.remarks(shared, networks.choose(shared), hosts, reached)]


def test_remarks_name_the_slow_network_that_a_name_leads_over():
    lines = said(wlan0=mbit(40), eth1=mbit(940))
    assert lines == [
        f"{host} is reached by its name over wlan0 (Wi-Fi): 40 Mbit/s. The job uses eth1: 940" for host in ("h0", "h1")
    ]
    assert said(wlan0=mbit(40), eth1=mbit(940), reached={}) == []


def test_remarks_name_a_cable_below_its_rate():
    lines = said(wlan0=mbit(10), eth1=mbit(94), reached={})
    assert len(lines) == 2
    assert lines[0].startswith("h0: eth1 has agreed on 1000 Mbit/s and carries 94: look at the cable")


def test_remarks_name_cables_without_an_address():
    loose = NetworkInterface("eth2", "", megabits=10000)
    hosts = {host: (WIRELESS[host], loose, BRIDGE) for host in HOSTS}
    (line,) = said(hosts, wlan0=mbit(40))
    assert line == (
        "wlan0 192.168.1.0/24 gives 40 Mbit/s. These have a cable of 10000 and no address: eth2 of h0, eth2 of h1. "
        "On h0 type `sudo ip address add 10.99.0.1/24 dev eth2`, on h1 `sudo ip address add 10.99.0.2/24 dev eth2`"
    )
    down = NetworkInterface("eth2", "", megabits=10000, is_up=False)
    assert said({**hosts, "h1": (WIRELESS["h1"], down)}, wlan0=mbit(40)) == []


def test_an_obstacle_names_the_host_with_the_firewall():
    lines = said(wlan0=mbit(40), eth1=NoWay("h1", "h0", "dropped"))
    assert lines == [
        "h0: packets from h1 to 10.0.0.1 (eth1) are dropped: a firewall? on h0 type `sudo ufw allow from 10.0.0.0/24`, "
        "or open TCP ports 1024 to 65535 for h1"
    ]


def test_rows_show_each_pair_over_each_network():
    ways = {"wlan0": NoWay("h0", "h1", "refused"), "eth1": mbit(940, 2000)}
    shared = measured(networks.shared(HOSTS, NAMES), **ways)
    assert networks.rows(shared, shared[0]) == [
        ["h0", "h1", "eth1 10.0.0.1", "eth1 10.0.0.2", "100", "940", "2000", "<- the job uses it"],
        ["h0", "h1", "wlan0 (Wi-Fi) 192.168.1.5", "wlan0 (Wi-Fi) 192.168.1.6", "refused", "", "", ""],
    ]


# -------------------------------------------------------------------------------------------------------------- hosts


def test_hosts_are_words_and_lines_of_a_hostfile():
    text = "# two nodes\nn1 slots=4  # fast\nn2:2\n\nn3\n10.0.0.7 slots=2 max_slots=4\n"
    assert start.hosts_of(["h0", "h1:3"], text) == {"h0": 1, "h1": 3, "n1": 4, "n2": 2, "n3": 1, "10.0.0.7": 2}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["h0:0"], "'h0:0' is no host: write h0, or h0:4 for four ranks"),
        (["h0:x"], "is no host"),
        (["-h0"], "is no host"),
        (["me@h0"], "write `User` for it into ~/.ssh/config"),
        (["h0", "h0:2"], "h0 is named twice: write h0:3 once"),
    ],
)
def test_a_word_that_is_no_host_is_refused(words, why):
    with pytest.raises(LaunchError, match=why):
        start.hosts_of(words)


HERE = {
    "name": "box",
    "executable": "/env/bin/python",
    "python": "3.11.7",
    "versions": {"fompi": "0.1.0", "numpy": "2.0.0", "mpi4py": "4.1.2"},
    "mpi": "MPICH Version: 5.0.2",
    "mpirun": True,
    "full": [],
    "folder": True,
    "files": {"train.py": "abc"},
}


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({}, None),
        ({"python": "3.11.2"}, None),
        ({"python": "3.12.0"}, "h1: Python 3.12.0, and 3.11.7 here: make /env anew there"),
        (
            {"executable": "/usr/bin/python3"},
            "h1: no /env/bin/python there, only /usr/bin/python3 (3.11.7): make the same environment in /env, or copy "
            "this one: `rsync -a /env/ h1:/env/`",
        ),
        (
            {"versions": {**HERE["versions"], "mpi4py": ""}, "mpi": "error: No module named 'mpi4py'"},
            "h1: no mpi4py, and 4.1.2 here: there type `/env/bin/python -m pip install mpi4py==4.1.2`",
        ),
        (
            {"mpi": "MPICH Version: 4.3.0"},
            "h1: MPI is MPICH Version: 4.3.0, and MPICH Version: 5.0.2 here: install the same one",
        ),
        (
            {"name": "box"},
            "h1: it calls itself box, as h0 does, and MPI would take them for one machine: there type "
            "`sudo hostnamectl set-hostname h1`",
        ),
        ({"mpirun": False}, "h1: the mpirun of this environment is not there: install the same MPI"),
        (
            {"full": ["/dev/shm: No space left on device"]},
            "h1: /dev/shm: No space left on device: no file can be written there: type `ssh h1 df -h /dev/shm`",
        ),
        ({"folder": False}, "h1: no folder /work there: copy it with --sync, or share it"),
        ({"files": {"train.py": ""}}, "h1: train.py is not there: copy the folder with --sync"),
        ({"files": {"train.py": "xyz"}}, "h1: train.py is another one: copy the folder with --sync"),
    ],
)  # fmt: skip
def test_a_host_unlike_this_one_is_one_line_with_a_remedy(other, line):
    assert [*start.problems({"h0": HERE, "h1": {**HERE, "name": "other", **other}}, HERE, "/work")] == (
        [line] if line else []
    )


def test_clocks_far_apart_are_a_remark():
    assert [*start.clock_remarks({"h0": 0.2, "h1": -100.0, "h2": 2.5})] == [
        "h1: its clock is 100 s behind: there type `sudo timedatectl set-ntp true`",
        "h2: its clock is 2.5 s ahead: there type `sudo timedatectl set-ntp true`",
    ]


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("ssh: connect to host h1 port 22: Connection timed out", "h1: no answer within 6 s: is it on"),
        ("ssh: connect to host h1 port 22: Connection refused", "h1: it has no ssh server: on h1 type"),
        ("ssh: connect to host h1 port 22: No route to host", "h1: no way to it: is it in this network?"),
        ("ssh: Could not resolve hostname h1: Name or service not known", "h1: no such name: write its address into"),
        ("me@h1: Permission denied (publickey,password).", "h1: it takes no key of yours: type `ssh-copy-id h1`"),
        ("Host key verification failed.", "h1: its key is unknown here, or has changed: type `ssh h1 true`"),
        ("fompi-no-python", "h1: it has no python3"),
        ("kex: reset\n", "h1: ssh ended (kex: reset): try `ssh h1 python3"),
        ("", "h1: ssh ended: try `ssh h1 python3 --version`"),
    ],
)  # fmt: skip
def test_what_ssh_says_becomes_a_remedy(said, line):
    assert why_unreached("h1", said).startswith(line) and "\n" not in why_unreached("h1", said)


@pytest.mark.parametrize("said", ["Welcome", "42\n", "null\n", "[1]\n", '{"a": 1}\n', "\\377\n"])
def test_what_a_host_prints_at_a_login_is_no_answer(said, tmp_path):
    (tmp_path / "ssh").write_text(f"#!/bin/sh\nprintf '{said}'\nfor command; do :; done\nexec sh -c \"$command\"\n")
    (tmp_path / "ssh").chmod(0o755)
    with Remote("h1", [str(tmp_path / "ssh")]) as host:
        assert host.answer("clock") > 0


def test_an_agent_imports_nothing_from_where_it_starts(monkeypatch, tmp_path):
    (tmp_path / "platform.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    with Remote("h0", ()) as host:
        assert host.answer("clock") > 0


def test_files_of_a_program_are_words_that_name_one(tmp_path):
    (tmp_path / "train.py").write_text("")
    request = HostsRequest({"h0": 1}, ("python", "train.py", "x" * 300, "nothing.py", "."), folder=str(tmp_path))
    assert files_of(request) == ["train.py"]


def test_large_files_are_compared_by_beginning_and_size(monkeypatch, tmp_path):
    monkeypatch.setattr(agent, "DIGEST_NBYTES", 2)
    digests = []
    for text in ("abc", "abd", "abcd", "axc"):
        (tmp_path / "data").write_text(text)
        digests.append(agent.digest(tmp_path / "data"))
    assert digests[0] == digests[1] and len(set(digests)) == 3 and agent.digest(tmp_path / "none") == ""


def test_nothing_is_written_into_a_folder_of_another_user(monkeypatch, tmp_path):
    agent.write(str(tmp_path / "up" / "ssh"), "text", 0o755)
    assert (tmp_path / "up").stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(agent.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(OSError, match="belongs to another user"):
        agent.write(str(tmp_path / "up" / "ssh"), "other")
    assert (tmp_path / "up" / "ssh").read_text() == "text"


# ------------------------------------------------------------------------------------------------------------ the job


def job(mpi, **changes):
    hosts = {"h0": 1, "h1": 2}
    network = networks.shared(HOSTS, NAMES)[0]
    given = {"mpi": mpi, "mpirun": "/env/bin/mpirun", "hosts": hosts, "hostfile": "/c/hosts",
             "program": ("python", "t.py"), "folder": "/work", "network": network, "own_interface": "eth1"}  # fmt: skip
    return start.JobOnHosts(**{**given, **changes})


def test_the_command_of_mpich():
    given = start.variables("mpich", job("mpich").network)
    assert given == {"FI_TCP_IFACE": "eth1", "UCX_NET_DEVICES": "eth1", "GLOO_SOCKET_IFNAME": "eth1"}
    text = "/env/bin/mpirun -launcher ssh -iface eth1 -f /c/hosts -n 3 -wdir /work python t.py"
    assert " ".join(start.launch(job("mpich"), given, {})) == text
    assert start.hostfile_of({"h0": 1, "h1": 2}, "mpich") == "h0:1\nh1:2\n"
    assert " ".join(start.launch(job("mpich", ssh="/c/ssh", own_interface=""), given, {})) == (
        "/env/bin/mpirun -launcher ssh -launcher-exec /c/ssh -f /c/hosts -n 3 -wdir /work python t.py"
    )


def test_the_command_of_open_mpi():
    given = start.variables("openmpi", job("openmpi").network)
    assert given["OMPI_MCA_btl_tcp_if_include"] == "10.0.0.0/24"
    command = start.launch(
        job("openmpi"), {"UCX_NET_DEVICES": "eth1"}, {"HOME": "/h", "OMP_NUM_THREADS": "2", "PATH": "/b"}
    )
    assert " ".join(command) == (
        "/env/bin/mpirun --hostfile /c/hosts -n 3 --wdir /work --map-by slot:oversubscribe --bind-to none "
        "--prtemca plm_ssh_no_tree_spawn 1 --prtemca prte_if_include 10.0.0.0/24 "
        "-x OMP_NUM_THREADS -x PATH -x UCX_NET_DEVICES python t.py"
    )
    assert start.hostfile_of({"h0": 1, "h1": 2}, "openmpi") == "h0 slots=1\nh1 slots=2\n"


def test_interfaces_with_other_names_are_set_by_each_host():
    other = NetworkInterface("enp3s0", "10.0.0.2")
    (network,) = networks.shared({"h0": (CABLE["h0"],), "h1": (other,)}, {})
    given = start.variables("mpich", network)
    *_, script, _ = start.of_host(network, given, {"h0": "box", "h1": "other box"})
    assert "box) export FI_TCP_IFACE=eth1; export UCX_NET_DEVICES=eth1;" in script
    assert "'other box') export FI_TCP_IFACE=enp3s0;" in script


def test_another_mpi_is_refused():
    assert start.mpi_of("Open MPI v5.0.11") == "openmpi" and start.mpi_of("MPICH Version: 5.0.2") == "mpich"
    with pytest.raises(LaunchError, match="use the launcher of that library"):
        start.mpi_of("Intel(R) MPI Library 2021.16")


def test_the_machine_file_has_the_slowest_way_and_the_slowest_kernels():
    kernels = {"h0": [4e10, 2e10], "h1": [3e10, 3e10]}
    one = start.machine_of({"h0": 1, "h1": 1}, mbit(940), kernels)
    assert (one.latency, one.bandwidth, one.flops_rate, one.memory_rate) == (1e-4, 940 * 125e3, 3e10, 2e10)
    assert one.levels == () and Machine.from_json(one.to_json()) == one
    two = start.machine_of({"h0": 2, "h1": 1}, mbit(940), {**kernels, "h1": [0.0, 0.0]})
    assert two.latency == PRESETS["laptop"].latency and two.flops_rate == 4e10
    assert [(level.ranks, level.bandwidth, level.shared) for level in two.levels] == [(2, 940 * 125e3, True)]
    assert "940 Mbit/s and 100 us by TCP" in two.source


def test_interfaces_are_read_from_the_facts_of_an_agent():
    facts = {"interfaces": [{"name": "eth1", "address": "10.0.0.1", "bits": 24, "megabits": 1000, "is_wireless": False,
                             "is_cable": True, "is_up": True}]}  # fmt: skip
    assert networks.interfaces_of(SimpleNamespace(**facts).__dict__) == (CABLE["h0"],)
