"""What `fompi doctor` finds in what it has measured: `findings(facts)`, worst first, each with its remedy.

Pure: values in, values out. `fompi.cli.doctor` measures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from fompi.engine.progress import ENOUGH_SHARE
from fompi.model.fit import Pairs
from fompi.model.machine import Level
from fompi.traces.clocks import Clock
from fompi.tuning.verdict import others_in_words

SEVERITIES = ("error", "warning", "note")
"""What a finding can be, worst first. An error makes the exit status 1."""

SHM_NBYTES, ENOUGH_SHM_NBYTES = 8 << 20, 64 << 20
"""With less free memory per rank in /dev/shm than the first, an MPI library may not start. Below the second it may
fail later: MPICH takes 4 MB per rank, Open MPI 16 MB.
"""

TEMPORARY_NBYTES = 64 << 20
"""The least free memory in the folder for temporary files: Open MPI and compilers put files there."""

LINK_SHARE, OUTLIER_SHARE, OUTLIER_SHARE_WITHIN = 0.5, 0.6, 0.4
"""Below these shares a pair of ranks is a finding: of the rate of the link between their hosts, and of the median of
the other pairs. Within a host two sockets differ by a factor of two.
"""

SLOW_LATENCY = 1e-3
"""A message that takes longer than this is slow on any network, in seconds."""

HELPED_SHARE = 0.5
"""At least this share of a message should move while kernels run."""

WALL_SECONDS, CLOCK_ERROR, DRIFT = 1.0, 1e-3, 2e-4
"""Above these the clocks are a finding: the difference of wall clocks, the error of an offset, the drift per second."""

PRODUCT, PRODUCTS, CROWDED_RATIO = 512, 20, 1.5
"""PRODUCTS products of PRODUCT x PRODUCT matrices show whether ranks slow each other down: by more than this ratio."""

BETWEEN, WITHIN = "between hosts", "within a host"

RECORD_NBYTES, MOST_LINKS = 32768, 32
"""The size of what a rank says of its place, and the most links in it."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, how bad it is, and what to do."""

    severity: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}\n    {self.remedy}"


@dataclass(frozen=True)
class HostFacts:
    """What a rank says of its host. Bytes are free bytes; None: there is no such folder, or it cannot be written.

    `cache` is why the folder of FOMPI_CACHE cannot be written. `links` are bytes per second of network links, by name.
    `wall` is the wall clock minus the clock of measurements.
    """

    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    shm: int | None = None
    temporary: str = ""
    temporary_free: int | None = None
    cache: str = ""
    links: Mapping[str, float] = field(default_factory=dict)
    wall: float = 0.0

    def pack(self) -> bytes:
        """The facts as bytes, as many on all ranks: only the fastest links are kept."""
        links = sorted(self.links.items(), key=lambda link: -link[1])[:MOST_LINKS]
        return json.dumps(asdict(replace(self, links=dict(links)))).encode().ljust(RECORD_NBYTES)

    @classmethod
    def unpack(cls, record: bytes) -> HostFacts:
        return cls(**json.loads(record))


class Products(NamedTuple):
    """Seconds of a product on a host: while one rank computes, and while all do. The one rank used `threads` cores."""

    alone: float
    together: float
    threads: float


@dataclass(frozen=True)
class Facts:
    """What was collected and measured. `levels` are links, each BETWEEN hosts or WITHIN one.

    `failure` is why no communicator could be made, `undone` are skipped steps.
    """

    info: Mapping[str, Any]
    places: Sequence[HostFacts] = ()
    failure: str = ""
    pairs: Pairs = field(default_factory=dict)
    levels: Sequence[tuple[str, Level]] = ()
    moved: float | None = None
    clocks: Mapping[int, Clock] = field(default_factory=dict)
    products: Mapping[str, Products] = field(default_factory=dict)
    others: tuple[float, int] = (0.0, 0)
    undone: Sequence[str] = ()


def findings(facts: Facts) -> list[Finding]:
    """All findings, worst first."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    return sorted(dict.fromkeys(found), key=lambda finding: SEVERITIES.index(finding.severity))


def _launch(facts: Facts) -> Iterator[Finding]:
    given, size = facts.info, len(facts.info["ranks"])
    for name in ("mpi_error", "warning"):
        if given[name]:
            yield Finding("error", *_divided(given[name]))
    if facts.failure:
        yield Finding("error", *_divided(facts.failure))
    elif given["environment"]:
        yield Finding("warning", *_divided(given["environment"]))
    for note in given["notes"]:
        yield Finding("warning", *_divided(note))
    if given["threads"] and not any(_ratio(products) > CROWDED_RATIO for products in facts.products.values()):
        yield Finding("warning", *_divided(given["threads"]))
    if size == 1 and not given["mpi_error"] and not given["warning"]:
        yield Finding("note", "one rank has no links to measure", "start it as mpirun -n 4 python -m fompi doctor")
    for step in facts.undone:
        yield Finding("warning", f"no time was left for this step: {step}", "give more time: --seconds 120")


def _divided(text: str) -> tuple[str, str]:
    """A sentence "what: remedy" in two parts."""
    what, _, remedy = text.partition(": ")
    return what, remedy or "see docs/howto/launchers.md"


def _versions(facts: Facts) -> Iterator[Finding]:
    for name in dict.fromkeys(name for place in facts.places for name in place.versions):
        ranks_of: dict[str, list[int]] = {}
        for rank, place in enumerate(facts.places):
            ranks_of.setdefault(place.versions.get(name, "none"), []).append(rank)
        if len(ranks_of) > 1:
            which = ", ".join(f"{version} on rank {ranks[0]}" for version, ranks in ranks_of.items())
            hosts = " and ".join(dict.fromkeys(facts.places[ranks[0]].host for ranks in ranks_of.values()))
            yield Finding(
                "error" if name in ("fompi", "MPI") else "warning",
                f"the ranks have different versions of {name}: {which}",
                f"use one environment on all hosts ({hosts}): the same module, and the same folder on a shared disk",
            )


def _folders(facts: Facts) -> Iterator[Finding]:
    for host, ranks in _ranks_of(facts.places).items():
        place, count = facts.places[ranks[0]], len(ranks)
        if place.shm is None:
            yield Finding(
                "warning",
                f"{host} has no /dev/shm: ranks of one host cannot share memory",
                "mount it (in a container: --ipc=host, or Apptainer, which keeps that of the host)",
            )
        elif place.shm < count * ENOUGH_SHM_NBYTES:
            yield Finding(
                "error" if place.shm < count * SHM_NBYTES else "warning",
                f"/dev/shm of {host} has {_size(place.shm)} free for {_counted(count, 'rank')}",
                "remove files of ended jobs there (mpich_shm_*, vader_segment*), or make it larger",
            )
        if place.temporary_free is None:
            yield Finding(
                "error", f"{place.temporary} cannot be written on {host}", "set TMPDIR to a folder of each node"
            )
        elif place.temporary_free < TEMPORARY_NBYTES:
            yield Finding(
                "warning",
                f"{place.temporary} of {host} has {_size(place.temporary_free)} free",
                "set TMPDIR to a folder with more space, or clean up",
            )
        if place.cache:
            yield Finding(
                "warning",
                f"measured choices are not kept on {host}: {place.cache}",
                "set FOMPI_CACHE to a folder that can be written, or to 0",
            )


def _links(facts: Facts) -> Iterator[Finding]:
    hosts = [place.host for place in facts.places]
    between = {pair: rate for pair, rate in facts.pairs.items() if hosts[pair[0]] != hosts[pair[1]]}
    within = {pair: rate for pair, rate in facts.pairs.items() if pair not in between}
    if between:
        pair = max(between, key=lambda pair: between[pair])
        links = [facts.places[rank].links for rank in pair]
        if all(links):
            name, rate = min((max(link.items(), key=lambda item: item[1]) for link in links), key=lambda item: item[1])
            if between[pair] < LINK_SHARE * rate:
                slower = [
                    f" It is as fast as {other}." for other, r in links[0].items() if between[pair] <= 1.1 * r < rate
                ]
                yield Finding(
                    "warning",
                    f"the fastest pair of ranks on two hosts moves {_gigabits(between[pair])}, "
                    f"but {name} carries {_gigabits(rate)}.{''.join(slower[-1:])}",
                    "does the MPI library use this network? MPICH: MPIR_CVAR_CH4_NETMOD=ucx, FI_PROVIDER; "
                    "Open MPI: --mca pml ucx, UCX_NET_DEVICES; use the MPI module of the site, not a wheel",
                )
    yield from _outliers(between, OUTLIER_SHARE, hosts)
    if facts.info["cores_per_rank"] >= 1:  # else a rank may have had no core at that moment
        yield from _outliers(within, OUTLIER_SHARE_WITHIN, hosts)


def _outliers(pairs: Pairs, least: float, hosts: Sequence[str]) -> Iterator[Finding]:
    """Pairs that are slower than the median of all. If all pairs of a rank are, the rank is named instead."""
    if len(pairs) < 3:
        return
    usual = median(pairs.values())
    slow = {pair: rate for pair, rate in pairs.items() if rate < least * usual}
    ranks = sorted({rank for pair in pairs for rank in pair})
    bad = [rank for rank in ranks if all(pair in slow for pair in pairs if rank in pair)]
    for rank in bad:
        rate = max(rate for pair, rate in pairs.items() if rank in pair)
        yield Finding(
            "warning",
            f"every link of rank {rank} on {hosts[rank]} is slow: {_gigabits(rate)}, others have {_gigabits(usual)}",
            f"leave {hosts[rank]} out (--exclude={hosts[rank]}), and report it to the site",
        )
    for (a, b), rate in slow.items():
        if a not in bad and b not in bad:
            places = f"{hosts[a]} and {hosts[b]}" if hosts[a] != hosts[b] else hosts[a]
            yield Finding(
                "warning",
                f"the link between ranks {a} and {b} ({places}) is slow: {_gigabits(rate)}, "
                f"others have {_gigabits(usual)}",
                "measure again; if it stays, `fompi calibrate` makes plans for slow links",
            )


def _latencies(facts: Facts) -> Iterator[Finding]:
    for where, level in facts.levels:
        if level.latency > SLOW_LATENCY and facts.info["cores_per_rank"] >= 1:
            yield Finding(
                "warning",
                f"a short message takes {milliseconds(level.latency)} {where}",
                "are the cores busy with something else? Ask for whole nodes (--exclusive), and for a core per rank",
            )


def _progress(facts: Facts) -> Iterator[Finding]:
    progress, mpi = facts.info["progress"], facts.info["mpi"]
    if progress is None or mpi is None or len(facts.info["ranks"]) == 1:
        return
    if mpi["thread_provided"] != "multiple":
        yield Finding(
            "warning",
            f"messages do not move while a kernel runs: {mpi['library']} allows threads only at the level "
            f"{mpi['thread_provided']}",
            "use an MPI library with MPI_THREAD_MULTIPLE (Open MPI: --enable-mpi-threads; mpi4py.rc.thread_level)",
        )
    elif progress["mode"] == "poll":
        yield Finding(
            "warning", "messages do not move while a kernel runs: FOMPI_PROGRESS=poll", "unset FOMPI_PROGRESS"
        )
    elif progress["mode"] == "library" and (progress["unaided"]["share"] or 0.0) < ENOUGH_SHARE:
        yield Finding(
            "warning",
            f"FOMPI_PROGRESS=library, but {mpi['library']} moves {progress['unaided']['share'] or 0.0:.0%} by itself",
            "unset FOMPI_PROGRESS: then a thread moves messages",
        )
    elif facts.moved is not None and facts.moved < HELPED_SHARE:
        cores = facts.info["cores_per_rank"]
        yield Finding(
            "warning" if cores >= 1 else "note",
            f"only {facts.moved:.0%} of a message moves while kernels run, with {_counted(cores, 'core')} per rank",
            "give each rank two cores (--cpus-per-task=2), one for messages"
            if cores < 2
            else "are the ranks bound to these cores? `fompi info` shows it",
        )


def _clocks(facts: Facts) -> Iterator[Finding]:
    for rank, clock in facts.clocks.items():
        host = facts.places[rank].host
        ahead = wall_ahead(facts.places[0], facts.places[rank], clock)
        if abs(ahead) > WALL_SECONDS + clock.error:
            way = "ahead of" if ahead > 0 else "behind"
            yield Finding(
                "warning",
                f"the wall clock of {host} is {abs(ahead):.3g} s {way} that of {facts.places[0].host}",
                "logs and time stamps of files are misleading: the site should synchronise its clocks (chrony)",
            )
        if clock.error > CLOCK_ERROR:
            yield Finding(
                "note",
                f"the clock of rank {rank} on {host} is known to {milliseconds(clock.error)} only",
                "merged traces show messages no better than that: measure while the links are idle",
            )
        if abs(clock.drift) > DRIFT:
            yield Finding(
                "note",
                f"the clock of {host} drifts by {1e6 * clock.drift:.0f} us per second",
                "call fompi.runtime.alignment.read_clocks(comm) before a long run that is traced",
            )


def wall_ahead(zero: HostFacts, place: HostFacts, clock: Clock) -> float:
    """How far the wall clock of a rank is ahead of that of rank 0. `clock` maps its clock to that of rank 0."""
    return place.wall - zero.wall - clock.offset


def _cores(facts: Facts) -> Iterator[Finding]:
    cores, ranks_of = facts.info["cores_per_rank"], _ranks_of(facts.places)
    words = others_in_words(*facts.others)
    for host, products in facts.products.items():
        ratio, count = _ratio(products), len(ranks_of.get(host, ()))
        slower = f"on {host} a product takes {ratio:.1f} times as long while all {count} ranks compute"
        if count < 2 or ratio <= CROWDED_RATIO:
            continue
        if facts.info["threads"] or products.threads > 1.25 * max(1.0, cores):
            yield Finding(
                "warning",
                f"{slower}: BLAS starts more threads than a rank has cores ({cores:.3g})",
                f"set OMP_NUM_THREADS={max(1, int(cores))} OPENBLAS_NUM_THREADS={max(1, int(cores))}",
            )
        elif cores >= 1 and words is None:
            yield Finding(
                "warning",
                f"{slower}, although each rank has {_counted(cores, 'core')}",
                "do two ranks share the hyper-threads of a core? --hint=nomultithread gives each rank whole cores",
            )
    if words is not None:
        yield Finding("warning", f"{words} during this test", "ask for whole nodes (--exclusive), and measure again")


def _gpus(facts: Facts) -> Iterator[Finding]:
    given = facts.info
    rows = [row for row in given["ranks"] if row["device"] != "cpu"]
    if not rows or given["mpi"] is None:
        return
    without = [row for row in given["ranks"] if row["device"] == "cpu"]
    if without:
        yield Finding(
            "warning",
            f"rank {without[0]['rank']} on {without[0]['host']} has no GPU, but rank {rows[0]['rank']} has one",
            "ask for GPUs on every node (--gpus-per-node)",
        )
    if not given["versions"].get("cupy"):
        yield Finding("note", "there are GPUs, but CuPy is not installed", 'pip install ".[cuda13]"')
    if given["mpi"]["gpu_aware"] is False:
        yield Finding(
            "note",
            f"{given['mpi']['library']} does not take GPU memory ({given['mpi']['gpu_aware_source']}): "
            "messages of GPU arrays go through host memory",
            "load an MPI that was built with CUDA; FOMPI_GPU_AWARE=1 if it is one and does not say so",
        )


_CHECKS = (_launch, _versions, _folders, _links, _latencies, _progress, _clocks, _cores, _gpus)


def _ratio(products: Products) -> float:
    return products.together / max(products.alone, 1e-9)


def _ranks_of(places: Sequence[HostFacts]) -> dict[str, list[int]]:
    """The ranks of each host."""
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        ranks.setdefault(place.host, []).append(rank)
    return ranks


def _counted(count: float, noun: str) -> str:
    return f"{count:.3g} {noun}{'s' * (count != 1)}"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB" if nbytes < 10 << 30 else f"{nbytes / (1 << 30):.0f} GiB"


def _gigabits(rate: float) -> str:
    return f"{8e-9 * rate:.3g} Gbit/s"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
