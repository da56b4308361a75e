"""The text of a plan, read back: what `str(op)` and `Plan.to_json` wrote."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from fompi.base.errors import PlanError
from fompi.base.layout import Sizes
from fompi.plans.plan import Buffer, Chunk, Collective, Compute, Op, Plan, Program, Recv, Send, UserKernel

_CHUNK = re.compile(r"(\w+)\[(\d+)(?::(\d+))?\]")


def _chunks(text: str) -> tuple[Chunk, ...]:
    return tuple(map(_chunk, text.split(", "))) if text else ()


def _chunk(text: str) -> Chunk:
    if found := _CHUNK.fullmatch(text):
        return Chunk(found[1], int(found[2]), int(found[3] or int(found[2]) + 1))
    raise PlanError(f"not a chunk: {text!r}")


def parse(text: str) -> Op:
    """The op that prints as `text`: `parse(str(op)) == op`."""
    if message := re.fullmatch(r"(\w+\[[\d:]+\])([<>])(\d+)", text):
        (chunk,) = _chunks(message[1])
        return (Send if message[2] == ">" else Recv)(int(message[3]), chunk)
    if kernel := re.fullmatch(r"(\w+)(?:<(\d+(?:, \d+)*)>)?\((.*)\) -> (.*)", text):
        args = tuple(map(int, kernel[2].split(", "))) if kernel[2] else ()
        return Compute(kernel[1], _chunks(kernel[3]), _chunks(kernel[4]), args)
    if collective := re.fullmatch(r"(\w+)\{(.*) -> (.*)\}", text):
        return Collective(collective[1], _chunks(collective[2]), _chunks(collective[3]))
    raise PlanError(f"not an op: {text!r}")


def programs_from_json(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of the Problem and the fields of the Plan, from the text that `Plan.to_json` wrote."""
    data = json.loads(text)
    size, shares = len(data["programs"]), tuple(map(int, data["shares"]))
    parts = len(shares) * max(data["problem"].get("experts") or (1,))
    programs = tuple(
        Program(rank, size, parts, tuple(_buffer(b) for b in p["buffers"]), tuple(map(parse, p["ops"])))
        for rank, p in enumerate(data["programs"])
    )
    pairs = tuple(tuple(row) for row in data["sizes"]["pairs"])
    sizes = Sizes(tuple(data["sizes"]["rows"]), pairs)
    if data["sizes"].get("runs"):
        sizes = Sizes.grouped(data["sizes"]["runs"])
    fields = {"schedule": data["schedule"], "shares": shares, "sizes": sizes, "window": data["window"]}
    kernels = tuple(map(_kernel, data.get("kernels", ())))
    fields |= {"kernels": kernels, "in_order": bool(data.get("in_order"))}
    fields["roundings"] = int(data.get("roundings", 0))
    return data["problem"], {**fields, "programs": programs}


def _kernel(fields: dict[str, Any]) -> UserKernel:
    return UserKernel(fields["name"], tuple(fields["seconds"]), tuple(map(_kernel, fields.get("beside", ()))))


def _buffer(fields: dict[str, Any]) -> Buffer:
    return Buffer(**{**fields, "row": tuple(fields["row"])})


def with_program(plan: Plan, program: Program) -> Plan:
    """The plan with another program for one rank."""
    return replace(plan, programs=tuple(program if p.rank == program.rank else p for p in plan.programs))
