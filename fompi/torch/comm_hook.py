"""Smaller gradients for torch's own DistributedDataParallel: a communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fompi.backends.wires import Feedback
from fompi.base.wires import wire_of
from fompi.ops import operations
from fompi.torch import streams
from fompi.torch.groups import communicator
from fompi.torch.work import Work


def wire(name: str, *, feedback: bool = True) -> Callable[[Any, torch.distributed.GradBucket], torch.futures.Future]:
    """gradient = mean over the ranks of what messages of this wire carry of their gradients, for float32 parameters

        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(None, fompi.torch.wire("int8"))

    `name`: "bfloat16", "float16", "int8", "fp8_e4m3" or "int4" (`fompi.base.wires`). With `feedback`, what the messages
    of this rank have lost is added to its next gradient (error feedback, Seide et al., Interspeech 2014). All ranks get
    the same bits. The state of the hook is the process group, or None for that of all ranks; a group of another backend
    than fompi needs MPI beside it. Raises DtypeError for an unknown name. Gradients of other dtypes, and on a device,
    are refused in the backward, on all ranks.
    """
    wire_of(name, "float32")
    left: dict[int, Feedback] = {}  # what was lost of each bucket

    def hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future:
        comm, x = communicator(torch.distributed.group.WORLD if state is None else state), bucket.buffer()
        if feedback and x.dtype == torch.float32 and x.device.type == "cpu":
            of_bucket = left.setdefault(bucket.index(), Feedback(name, comm.size, comm.rank))
            of_bucket.give_back(x.numpy())  # torch cuts other buckets after the first step: then nothing is added
            of_bucket.keep()
        start = operations.all_reduce.start
        pending = start(x, op="mean", out=x, comm=comm, wire=name, schedule="direct", slices=1)
        return Work(f"all_reduce with the wire {name}", comm, [pending], None, x, streams.order_of(x)).get_future()

    hook.__annotations__.clear()  # torch compares them with its types, and these are strings
    return hook
