"""The sum of gradients of replicated parameters over the ranks: `fompi.sum_replicated`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fompi.backends.cuda import backend_of
from fompi.base.call_options import CallOptions
from fompi.base.differences import detail
from fompi.base.errors import TensorError
from fompi.ops.operations import all_reduce
from fompi.tensors import dlpack
from fompi.tensors.dlpack import Tensor


def sum_replicated(grads: Iterable[Any], comm: Any = None, *, out: Iterable[Any] | None = None) -> list[Any]:
    """[all_reduce(grad, comm=comm) for grad in grads]

    For the gradients of parameters that are the same on all ranks, such as a norm or a bias after a sum: each rank has
    one term of the gradient. All gradients of one dtype travel in one all-reduce, so that many small ones cost as much
    as a large one.

        own = [p.grad for p in replicated]                 # PyTorch: sum in place
        fompi.sum_replicated(own, comm=comm, out=own)

        leaves, tree = jax.tree.flatten(grads)             # JAX: new arrays
        grads = jax.tree.unflatten(tree, fompi.sum_replicated(leaves, comm=comm))

    `grads` are tensors of NumPy, PyTorch, JAX or with `__dlpack__`, of any shape, in the same order on all ranks. The
    sums have the same order. `out` are tensors for the sums, for example the gradients themselves; they are returned.
    Raises TensorError on the rank that has None or a wrong `out`, and MismatchError on the others, and on all ranks if
    their gradients have different shapes or dtypes. The ranks then have written nothing of that dtype.
    """
    try:
        if not isinstance(grads, Iterable) or not isinstance(out, Iterable | None):
            raise TensorError("sum_replicated takes a list of gradients, and out= a list too: [p.grad for p in ...]")
        given = [dlpack.borrow(grad, f"gradient {i}") for i, grad in enumerate(grads)]
        if any(tensor.device is not given[0].device for tensor in given):
            raise TensorError("sum_replicated: the gradients are on different devices")
        targets = None if out is None else list(out)
        written = None if targets is None else _targets(targets, given)
    except Exception as error:
        all_reduce.refuse(error, comm)
        raise
    sums: list[Any] = [None] * len(given)
    forms = "".join(detail(f"gradient {i}", f"{t.dtype} {t.array.shape}") for i, t in enumerate(given))
    for dtype in dict.fromkeys(tensor.dtype for tensor in given):
        numbers = [i for i, tensor in enumerate(given) if tensor.dtype == dtype]
        total = _total([given[i] for i in numbers], dtype, comm, f"of gradients{forms}")
        begin = 0
        for i in numbers:
            array = given[i].array
            sums[i] = total[begin : (begin := begin + array.size)].reshape(array.shape)
    if targets is None or written is None:
        return [dlpack.lend(array, tensor.dtype, tensor) for array, tensor in zip(sums, given, strict=True)]
    for target, array in zip(written, sums, strict=True):
        dlpack.mark_written(target.owner)
        if target.device is None:
            target.array[...] = array
        else:
            backend_of(target.device).copy((target.array, array))
    return targets


def _total(tensors: Sequence[Tensor], dtype: str, comm: Any, words: str) -> Any:
    """The sums of the tensors, one behind the other. `words`: what the ranks compare, besides their total."""
    device = tensors[0].device
    if device is None:
        flat = np.concatenate([tensor.array.reshape(-1) for tensor in tensors])
    else:
        flat = backend_of(device).joined([tensor.array for tensor in tensors])
    arguments, _, _ = all_reduce.read((dlpack.lend(flat, dtype, "dlpack" if device is None else "device"),), {})
    total = all_reduce.run(replace(arguments, words=words), comm, CallOptions())
    return total.array if device is None else dlpack.borrow(total).array


def _targets(out: Sequence[Any], grads: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `out`, each as fit for its sum."""
    if len(out) != len(grads):
        raise TensorError(f"sum_replicated: out= has {len(out)} tensors for {len(grads)} gradients")
    targets = [dlpack.borrow(tensor, f"out {i}") for i, tensor in enumerate(out)]
    for i, (target, grad) in enumerate(zip(targets, grads, strict=True)):
        if target.readonly:
            raise TensorError(f"sum_replicated: out {i} is read-only")
        if target.device is not grad.device:
            raise TensorError(f"sum_replicated: out {i} is on another device than its gradient")
        if (target.dtype, target.array.shape) != (grad.dtype, grad.array.shape):
            raise TensorError(
                f"sum_replicated: out {i} is {target.dtype} {target.array.shape}, but its gradient is "
                f"{grad.dtype} {grad.array.shape}"
            )
    return targets
