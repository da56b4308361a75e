"""Machine: what a call costs here, in a handful of numbers. Presets, and JSON files of the same fields."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from fompi.errors import LayoutError


@dataclass(frozen=True)
class Machine:
    """Seconds, bytes and floating-point operations per second, of one rank and of the link that it has.

    A message takes `latency + nbytes / bandwidth`; a rank sends one at a time and receives one at a time.
    A kernel takes `overhead + max(flops / flops_rate, nbytes / memory_rate)`.
    """

    name: str
    latency: float
    bandwidth: float
    flops_rate: float
    memory_rate: float
    overhead: float
    source: str = ""

    def message(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth

    def kernel(self, flops: int, nbytes: int) -> float:
        return self.overhead + max(flops / self.flops_rate, nbytes / self.memory_rate)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def load(name: str | Path) -> Machine:
        """A preset by its name, or a file that `save` wrote."""
        if str(name) in PRESETS:
            return PRESETS[str(name)]
        path = Path(name)
        if not path.is_file():
            raise LayoutError(f"no machine {str(name)!r}: neither a file nor one of {', '.join(PRESETS)}")
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise LayoutError(f"{path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise LayoutError(f"{path}: a machine is an object with the fields {_FIELDS}")
        for field in fields(Machine):
            value, text = data.get(field.name, field.default), field.name in ("name", "source")
            if value is MISSING:
                raise LayoutError(f"{path}: {field.name} is missing; a machine has {_FIELDS}")
            if not isinstance(value, str if text else (int, float)) or isinstance(value, bool):
                raise LayoutError(f"{path}: {field.name} must be {'a text' if text else 'a number'}, not {value!r}")
            if isinstance(value, (int, float)):
                least = 1e-300 if field.name.endswith(("rate", "width")) else 0  # a divisor
                if not least <= value <= 1e300:
                    raise LayoutError(f"{path}: {field.name}={value!r} is out of range")
        if unknown := set(data) - {f.name for f in fields(Machine)}:
            raise LayoutError(f"{path}: unknown field {sorted(unknown)[0]!r}; a machine has {_FIELDS}")
        return Machine(**data)


_FIELDS = ", ".join(f.name for f in fields(Machine))

PRESETS = {
    m.name: m
    for m in (
        Machine("gigabit", 50e-6, 118e6, 5e10, 1e10, 2e-6, "TCP over 1 Gbit/s Ethernet, one core a rank"),
        Machine("laptop", 2e-6, 4e9, 5e10, 1e10, 2e-6, "shared memory, one core a rank"),
        Machine(
            "h100-nvlink",
            3e-6,
            400e9,
            6e14,
            3e12,
            4e-6,
            "H100 SXM data sheet: 450 GB/s each way, 990 TFLOP/s",
        ),
    )
}
