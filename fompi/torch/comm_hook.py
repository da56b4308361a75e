"""Smaller gradients for torch's own DistributedDataParallel: a communication hook."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fompi.backends.wires import Feedback
from fompi.base.wires import WIDE, wire_of
from fompi.engine.communicator import Communicator
from fompi.ops import operations
from fompi.parallel.sums import summing
from fompi.tensors import dlpack
from fompi.torch import streams
from fompi.torch.groups import communicator
from fompi.torch.work import Work


class LostPart:
    """What messages of this rank have lost of a parameter: a part of what is lost of a bucket."""

    feedback, part = Feedback("", 0, 0, np.zeros(0, np.float32)), slice(0)  # nothing
    has_gradient = True
    """In this backward. Of a parameter that no rank uses, torch does not apply what the hook returns."""

    def found(self, _: object) -> None:
        self.has_gradient = True


def give_back(
    known: WeakTensorKeyDictionary, wire: str, comm: Communicator, bucket: torch.distributed.GradBucket
) -> Callable[[object], None]:
    """Add to a bucket what was lost of its parameters. Returns what is called when the sum has come to its end."""
    x, parameters = dlpack.borrow(bucket.buffer()), bucket.parameters()
    for parameter in parameters:
        if parameter not in known:
            known[parameter] = loss = LostPart()
            parameter.register_post_accumulate_grad_hook(loss.found)
    losses: list[LostPart] = [known[parameter] for parameter in parameters]
    parts = [slice(a, b) for a, b in pairwise(accumulate((p.numel() for p in parameters), initial=0))]
    feedback = losses[0].feedback
    same = [loss.feedback is feedback and loss.part == part for loss, part in zip(losses, parts, strict=True)]
    if not all(same) or feedback.lost.size != x.array.size or feedback.ranks != (comm.size, comm.rank):
        lost = np.zeros(x.array.size, np.float32)  # torch has cut other buckets
        feedback = Feedback(wire, comm.size, comm.rank, lost)
        for loss, part in zip(losses, parts, strict=True):
            if loss.feedback.lost.size:
                lost[part] = loss.feedback.lost[loss.part]
            loss.feedback, loss.part = feedback, part
    held = [loss.part for loss in losses if not loss.has_gradient]
    for loss in losses:
        loss.has_gradient = False
    feedback.give_back(x.array, x.dtype, held)
    return lambda _: feedback.keep(held)


def wire(name: str, *, feedback: bool = True) -> Callable[[Any, torch.distributed.GradBucket], torch.futures.Future]:
    """gradient = mean over the ranks of what messages of this wire carry of their gradients

        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, fompi.torch.wire("int8"))

    `name`: "bfloat16", "float16", "int8", "fp8_e4m3" or "int4" (`fompi.base.wires`), for float32 parameters; the last
    three for half types, too. With `feedback`, what the messages of this rank have lost of a parameter is added to its
    next gradient on this rank (error feedback, Seide et al., Interspeech 2014). All ranks get the same bits. Several
    models may have one hook. The state of the hook is the process group, or None for that of all ranks; a group of
    another backend than fompi needs MPI besides. Raises DtypeError for an unknown name. Gradients of other dtypes,
    and on a device, are refused in the backward, on all ranks.
    """
    wire_of(name, "float32")
    known = WeakTensorKeyDictionary()  # parameter -> its LostPart

    def hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future:
        comm, x = communicator(torch.distributed.group.WORLD if state is None else state), bucket.buffer()
        keep, dtype = None, str(x.dtype).removeprefix("torch.")
        if feedback and name in WIDE.get(dtype, ()) and x.device.type == "cpu":
            keep = give_back(known, name, comm, bucket)
        start = operations.all_reduce.start
        sums = summing(comm, {"wire": name})
        pending = start(x, op="mean", out=x, comm=sums, wire=name)  # named here, it is refused where x takes none
        return Work(f"all_reduce with the wire {name}", comm, [pending], keep, x, streams.order_of(x)).get_future()

    hook.__annotations__.clear()  # torch compares them with its types, and these are strings
    return hook
