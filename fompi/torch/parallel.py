"""Tensor parallelism of torch with fused operations: `parallelize_module` and the plan stay as they are.

    fompi.torch.install()
    mesh = init_device_mesh("cpu", (4,))                     # on the backend "fompi"
    model = parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

`install` changes torch's own `ColwiseParallel`, `RowwiseParallel` and `PrepareModuleInput`. The classes of the same
names in this file do the same without a change in torch.

The parameters are DTensors that torch has sharded. The forward of a Linear is ours:

| style | layout | forward | backward |
|---|---|---|---|
| Colwise | input Shard(dim) | all_gather_matmul | matmul_reduce_scatter, all_gather_weight_gradient |
| Colwise | input Replicate | no communication | matmul_all_reduce |
| Rowwise | output Shard(dim) | matmul_reduce_scatter | all_gather_matmul_weight_gradient |
| Rowwise | output Replicate | matmul_all_reduce | no communication |

A loss that all ranks compute alike counts once, as everywhere in DTensor.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from contextlib import ExitStack
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel import style as styles

from fompi.base.errors import LayoutError
from fompi.engine.handshake import agree
from fompi.parallel.shares import features
from fompi.plans.meaning import MEANING
from fompi.torch import operators, private, swap
from fompi.torch.groups import communicator
from fompi.torch.nn import sum_gradients
from fompi.torch.process_group import on_device
from fompi.torch.sharded import PartLayout, runs_of

HALF = (torch.bfloat16, torch.float16)
REPLICATE, LAST = (Replicate(),), (Shard(-1),)
GATHERS_INPUTS = private.has_gradient_placements()


class FusedCalls(NamedTuple):
    """`ran`: fused operations, by name. `as_torch`: what torch did instead, by reason."""

    ran: dict[str, int]
    as_torch: dict[str, int]


FUSED = {name for name, meaning in MEANING.items() if meaning.weight or meaning.operand}
_LEFT: Counter[str] = Counter()


def fused_calls() -> FusedCalls:
    """How often each fused operation ran in this process since `install`, what torch did instead, and why.

    What is clear when a module is parallelized counts there, once. What depends on the input counts at each call. In a
    compiled function it counts when it is compiled.
    """
    return FusedCalls({name: calls for name, calls in operators.RAN.items() if name in FUSED}, dict(_LEFT))


@private.run_by_the_compiler
def _leave(reason: str) -> None:
    """Count what is left to torch."""
    _LEFT[reason] += 1


# ------------------------------------------------------------------------------------------------------- the products


_NUMBERS: defaultdict[str, count[int]] = defaultdict(count)
"""How many modules have been parallelized on each group: the ranks of a group do so in one order."""


def _next_number(mesh: Any) -> int:
    return next(_NUMBERS[mesh.get_group().group_name])


def _layer(number: int) -> str:
    """Which layer calls, in the words that the ranks compare. In compiled code nothing: it would differ in each one."""
    return "" if torch.compiler.is_compiling() else f"{operators.OF_LAYER} {number}"


def _node(name: str, **given: Any) -> Any:
    """The operator of an operation, in eager and in compiled code. `comm` is the name of a group."""
    return operators.node(name, {"gradient": "sum", **given})


class _GatheredColumns(torch.autograd.Function):
    """full = all_gather(x, dim); return full, full @ w0, full @ w1, ...: one gather here, and two in the backward."""

    @staticmethod
    def forward(
        ctx: Any, group: str, dim: int, rows: list[int] | None, words: str, x: Tensor, *ws: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *ws)
        ctx.group, ctx.dim, ctx.rows, ctx.words = group, dim, rows, words
        return _products(group, dim, rows, words, x, *ws)

    @staticmethod
    def backward(ctx: Any, dfull: Tensor | None, *dys: Tensor | None) -> tuple[Any, ...]:
        x, *ws = ctx.saved_tensors
        words = operators.joined("in the backward", ctx.words)
        common: dict[str, Any] = {"dim": ctx.dim, "comm": ctx.group, "words": words}
        dx, dws = None, [None] * len(ws)
        read = [i for i, dy in enumerate(dys) if dy is not None]
        if read:
            dy, w = torch.cat([dys[i] for i in read], -1), torch.cat([ws[i] for i in read], 1)
            if ctx.needs_input_grad[4]:
                dx = _node("matmul_reduce_scatter", x=dy, w=w.mH, counts=ctx.rows, **common)
            if any(ctx.needs_input_grad[5:]):
                x = x.conj().resolve_conj()
                dw = _node("all_gather_weight_gradient", x=x, h=dy, arriving=ctx.rows, **common)
                for i, part in zip(read, dw.split([ws[i].shape[1] for i in read], 1), strict=True):
                    dws[i] = part
        if dfull is not None and ctx.needs_input_grad[4]:
            term = _node("reduce_scatter", x=dfull, counts=ctx.rows, **common)
            dx = term if dx is None else dx + term
        return None, None, None, None, dx, *dws


def _products(group: str, dim: int, rows: list[int] | None, words: str, x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
    given = {"x": x, "ws": ws, "dim": dim, "comm": group, "arriving": rows, "words": words}
    full, products = _node("all_gather_matmul_many", **given)
    return full, *products


def _gathered_columns(
    group: str, dim: int, rows: list[int] | None, layer: str, x: Tensor, *ws: Tensor
) -> tuple[Tensor, ...]:
    """`_GatheredColumns` if there will be a backward. torch.compile reads that class only then."""
    words = operators.joined(operators.wanted({"x": x, "ws": list(ws)}, "sum"), layer)
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *ws))
    return (_GatheredColumns.apply if needs else _products)(group, dim, rows, words, x, *ws)


def _cast(*tensors: Tensor | None) -> list[Any]:
    """The tensors as torch.autocast gives them to a product."""
    device = next(t for t in tensors if t is not None).device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def _local(t: Any, *grad_placements: Any) -> Any:
    """The part of t on this rank."""
    return t.to_local(grad_placements=grad_placements or None) if isinstance(t, DTensor) else t


def _dim(x: Tensor, placement: Any) -> int | str | None:
    """The dimension along which the rows are sharded, None for no dimension, or a reason why it cannot be fused."""
    if x.dim() < 2:
        return "an input of one dimension"
    if placement == Replicate():
        return None
    if type(placement) is not Shard:
        return f"an input or output {placement}"
    dim = placement.dim % x.dim()
    return dim if dim < x.dim() - 1 else "the last dimension is sharded"


def _uneven(rows: int, size: int) -> list[int] | None:
    """The rows of each rank, as DTensor shards them. None if they divide evenly."""
    if rows % size == 0:
        return None
    most = -(-rows // size)
    return [max(0, min(most, rows - rank * most)) for rank in range(size)]


class Gathered(NamedTuple):
    """Rows that a product gathers: the local ones, their dimension, and how many each rank has, if not all the same."""

    x: Tensor
    dim: int | None
    rows: list[int] | None = None

    @staticmethod
    def of(x: Tensor, placement: Any, mesh: Any) -> Gathered | str:
        """An input with this placement if it is no DTensor, or a reason why it cannot be fused."""
        if not isinstance(x, DTensor):
            dim = _dim(x, placement)
            return dim if isinstance(dim, str) else Gathered(x, dim)
        if x.device_mesh != mesh:
            return "the input is on another mesh"
        dim = _dim(x, x.placements[0])
        if isinstance(dim, str):
            return dim
        return Gathered(x.to_local(), dim, None if dim is None else _uneven(x.shape[dim], mesh.size()))


class Taken(NamedTuple):
    """A product that was made before its Linear is called, and for which input."""

    input: Tensor
    version: int
    y: Tensor

    def is_for(self, x: Tensor) -> bool:
        """True if x is the input, which nobody has changed. Hooks of a module may wrap the same memory anew."""
        if torch.compiler.is_compiling():
            if x is self.input:
                private.refuse_changed(x)
            return x is self.input
        if type(x) is not type(self.input) or not x._version == self.input._version == self.version:
            return False
        with torch.no_grad():
            here, there = _local(x), _local(self.input)
        return here.data_ptr() == there.data_ptr() and here.shape == there.shape and here.stride() == there.stride()


class _Linear:
    """The forward of a Linear on `mesh`, instead of `nn.Linear.forward`."""

    layout: tuple[Any, ...]
    """What torch makes of the input before the product."""

    def __init__(self, style: Any, module: torch.nn.Module, mesh: Any, number: int):
        self.style, self.module, self.mesh, self.number = style, module, mesh, number
        self.group, self.size = mesh.get_group().group_name, mesh.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Linear:
        return type(self)(self.style, memo[id(self.module)], self.mesh, self.number)

    def words(self, x: Tensor, w: Tensor, bias: Tensor | None, gradient: str = "sum") -> str:
        """What the ranks compare: whose gradients a call wants, and which layer it is."""
        return operators.joined(operators.wanted({"x": x, "w": w, "bias": bias}, gradient), _layer(self.number))

    def as_torch(self, x: Tensor, reason: str) -> Any:
        _leave(f"{type(self).__name__}: {reason}")
        x = private.prepared_input(self.style, self.layout, self.module, x, self.mesh)
        if hasattr(self.module, "layouts"):  # its parameters are no DTensors
            return self.by_shares(x)
        return self.given(F.linear(x, self.module.weight, self.module.bias))

    def by_shares(self, x: Any) -> Any:
        """The product of unequal parts, without a fused operation."""
        w, bias = self.module.weight, self.module.bias
        if self.layout == REPLICATE:
            return F.linear(_local(x, Partial()), w, bias)
        y = self.given(DTensor.from_local(F.linear(_local(x), w), self.mesh, (Partial(),)))
        return y if bias is None else y + self.bias(self.style.output_layouts[0])

    def bias(self, output: Any) -> Any:
        """The bias for an output with this placement. Of a sharded one each rank knows a term of its gradient."""
        bias = self.module.bias
        if bias is None or isinstance(bias, DTensor) or output == Replicate():
            return _local(bias, Replicate() if output == Replicate() else Partial())
        return sum_gradients(bias, comm=self.module.comm)[0]

    def given(self, y: DTensor) -> Any:
        """y in the layout that the style promises."""
        return private.prepared_output(self.style, self.module, y, self.mesh)

    def distributed(self, y: Tensor, placement: Any, rows: Any) -> DTensor:
        """The DTensor of which y is the part on this rank. `rows` is its shape without the last dimension."""
        shape = torch.Size((*rows, self.module.weight.shape[0]))
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(y, self.mesh, (placement,), shape=shape, stride=strides)


class ColwiseLinear(_Linear):
    layout = REPLICATE
    taken: Taken | None = None
    """The product that `_Gather` has made together with others."""

    reads_gathered = True

    def __call__(self, input: Tensor) -> Any:
        y = self.product(input)
        if isinstance(y, str):
            return self.as_torch(input, y)
        if self.style.use_local_output and self.style.output_layouts == LAST:
            return y
        return self.given(self.distributed(y, Shard(y.dim() - 1), y.shape[:-1]))

    def product(self, input: Tensor) -> Tensor | str:
        """The columns of this rank of input @ weight.T + bias, or a reason why it is not fused."""
        w, bias = _local(self.module.weight), _local(self.module.bias)
        if self.taken is not None and self.taken.is_for(input):
            y, self.taken = self.taken.y, None
            return y if bias is None else y + _cast(bias)[0]
        given = Gathered.of(input, self.style.input_layouts[0], self.mesh)
        if isinstance(given, str):
            return given
        x, w, bias = _cast(given.x, w, bias)
        if given.dim is not None:
            words = self.words(x, w, bias)
            common: dict[str, Any] = {"dim": given.dim, "comm": self.group, "arriving": given.rows, "words": words}
            return _node("all_gather_matmul", x=x, w=w.t(), bias=bias, **common).contiguous()
        if isinstance(input, DTensor):  # torch sums the gradients of all readers of the input before it reduces them
            _leave("ColwiseLinear: the input is a replicated DTensor")
            return F.linear(_cast(_local(input, Partial()))[0], w, bias)
        return torch.ops.fompi.replicated_matmul(x, w.t(), bias, self.group, _layer(self.number))


class RowwiseLinear(_Linear):
    layout = LAST

    def __call__(self, input: Tensor) -> Any:
        x = self.columns(input)
        local = _local(x)
        dim = _dim(local, self.style.output_layouts[0])
        if local.is_cpu and _cast(local)[0].dtype in HALF:  # terms of sums are float32: torch is several times as fast
            dim = "products of half types that are summed"
        if isinstance(dim, str):
            return self.as_torch(x, dim)
        y = self.product(local, dim)
        if self.style.use_local_output:
            return y
        return self.distributed(y, Replicate() if dim is None else Shard(dim), local.shape[:-1])

    def product(self, x: Tensor, dim: int | None) -> Tensor:
        """The sum of the products of all ranks, and the bias: all rows if `dim` is None, else those of this rank."""
        x, w, bias = _cast(x, _local(self.module.weight), self.bias(Replicate() if dim is None else Shard(dim)))
        if dim is None:
            words, rows = self.words(x, w, bias, "replicated"), x.shape[:-1]
            x = x.flatten(0, -2)  # the first dimension is cut: of a batch of one sequence it has one row
            common: dict[str, Any] = {"comm": self.group, "gradient": "replicated", "words": words}
            return _node("matmul_all_reduce", x=x, w=w.t(), bias=bias, **common).unflatten(0, rows)
        counts, words = _uneven(x.shape[dim], self.size), self.words(x, w, bias)
        common = {"dim": dim, "counts": counts, "comm": self.group, "words": words}
        return _node("matmul_reduce_scatter", x=x, w=w.t(), bias=bias, **common).contiguous()

    def columns(self, x: Tensor) -> Tensor:
        """A local tensor with the columns of this rank, or a DTensor whose last dimension is sharded."""
        if not isinstance(x, DTensor):
            if self.style.input_layouts in (LAST, (Shard(x.dim() - 1),)):
                return x
            x = DTensor.from_local(x, self.mesh, self.style.input_layouts, run_check=False)
        return x.redistribute(placements=LAST)


class _Gather:
    """One gather for all column-parallel Linears that read an input of a module.

    It stands in place of the method of `PrepareModuleInput` that prepares an input. The children of the module with a
    ColwiseLinear are expected to read the input, except those that did not do so before.
    """

    def __init__(self, style: Any, module: torch.nn.Module, number: int):
        self.module, self.style, self.as_torch = module, style, private.prepare_argument(style)
        self.number = number

    def begin(self, module: torch.nn.Module) -> None:
        """Before the forward of `module`. It may be a copy, which shares the hooks of the original."""
        self.module = module
        for f in _colwise(module):
            f.taken = None  # of a forward that an exception has ended

    def __call__(self, input: Any, mesh: Any, layout: Any, desired: Any) -> Any:
        if layout is None or desired != Replicate() or layout == desired:
            return self.as_torch(input, mesh, layout, desired)
        readers = [f for f in _colwise(self.module) if f.reads_gathered and f.taken is None and f.mesh == mesh]
        given = Gathered.of(input, layout, mesh)
        if not isinstance(given, str) and not readers:
            given = "no child is a ColwiseLinear that reads the input"
        elif not isinstance(given, str) and not GATHERS_INPUTS:
            given = f"torch {torch.__version__} has no DTensor.from_local(grad_placements=)"
        elif not isinstance(given, str) and _cast(given.x)[0].dtype != given.x.dtype:
            given = "autocast changes the dtype of the input"  # the module must see the dtype that it has now
        if isinstance(given, str) or given.dim is None:
            if isinstance(given, str):
                _leave(f"PrepareModuleInput: {given}")
            return self.as_torch(input, mesh, layout, desired)
        x, *ws = _cast(given.x, *(_local(f.module.weight) for f in readers))
        group, dim, rows = readers[0].group, given.dim, given.rows
        full, *products = _gathered_columns(group, dim, rows, _layer(self.number), x, *(w.t() for w in ws))
        full = DTensor.from_local(full, mesh, REPLICATE, run_check=False, grad_placements=(Partial(),))
        gathered = full.to_local() if self.style.use_local_output else full
        version = 0 if torch.compiler.is_compiling() else gathered._version
        for f, y in zip(readers, products, strict=True):
            f.taken = Taken(gathered, version, y.contiguous())
        return gathered

    def end(self, module: torch.nn.Module) -> None:
        """After the forward of `module`: forget what it has not read."""
        for f in _colwise(module):
            if f.taken is not None:
                f.taken, f.reads_gathered = None, False
                _leave("PrepareModuleInput: a child does not read the gathered input")


def _colwise(module: torch.nn.Module) -> list[ColwiseLinear]:
    """Those of the children of `module` that take replicated inputs."""
    forwards = [child.__dict__.get("forward") for child in module.children()]
    return [f for f in forwards if isinstance(f, ColwiseLinear) and f.style.input_layouts == REPLICATE]


# --------------------------------------------------------------------------------------------------------- the styles


class ColwiseParallel(styles.ColwiseParallel):
    """`torch.distributed.tensor.parallel.ColwiseParallel`, with the forward of `ColwiseLinear` on a mesh of fompi."""

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        return _parallelize(self, module, device_mesh, ColwiseLinear, styles.ColwiseParallel)


class RowwiseParallel(styles.RowwiseParallel):
    """`torch.distributed.tensor.parallel.RowwiseParallel`, with the forward of `RowwiseLinear` on a mesh of fompi."""

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        return _parallelize(self, module, device_mesh, RowwiseLinear, styles.RowwiseParallel)


class PrepareModuleInput(styles.PrepareModuleInput):
    """`torch.distributed.tensor.parallel.PrepareModuleInput`, which gathers rows in the products that read them."""

    def _apply(self, module: torch.nn.Module, device_mesh: Any) -> torch.nn.Module:
        original = _ORIGINAL[styles.PrepareModuleInput]
        if not _is_ours(device_mesh) or not private.is_plain(self, styles.PrepareModuleInput):
            return original(self, module, device_mesh)
        style, gather = copy.copy(self), _Gather(self, module, _next_number(device_mesh))
        private.replace_argument(style, gather)
        module.register_forward_pre_hook(lambda module, _: gather.begin(module))
        module.register_forward_hook(lambda module, *_: gather.end(module))
        return original(style, module, device_mesh)


def _is_ours(mesh: Any) -> bool:
    """True if the collectives of this mesh run on fompi."""
    return on_device(mesh.get_group(), mesh.device_type) is not None


def _parallelize(style: Any, module: torch.nn.Module, mesh: Any, forward: type[_Linear], base: Any) -> torch.nn.Module:
    """Shard the parameters as torch does it. The forward is ours where it can be."""
    if not _is_ours(mesh):
        reason = "the mesh is on another backend"
    elif type(module) is not torch.nn.Linear:
        reason = f"{type(module).__name__} instead of Linear"
    elif not private.is_plain(style, base):
        reason = f"{type(style).__name__} has methods of its own"
    else:
        if (shares := _SHARES["all"]) is None:
            private.partition(style, module, mesh)
        else:
            _deal(style, module, mesh, shares, 0 if forward is ColwiseLinear else 1)
        module.forward = forward(style, module, mesh, _next_number(mesh))
        return module
    _leave(f"{base.__name__}: {reason}")
    return _ORIGINAL[base](style, module, mesh)


def _deal(style: Any, module: torch.nn.Linear, mesh: Any, shares: Any, dim: int) -> None:
    """Keep the part of this rank of a Linear, by its shares of dimension `dim` of the weight. Collective."""
    comm, shape = communicator(mesh.get_group()), tuple(module.weight.shape)
    refusal, counts = None, tuple[int, ...]()
    try:
        counts = features(shares, shape[dim], comm.size)
        if (style.output_layouts, style.input_layouts)[dim] != LAST or not style.use_local_output:
            raise LayoutError(f"shares= is for local tensors whose last dimension is sharded, not {style}")
    except LayoutError as error:
        refusal = error
    agree(comm, f"{type(style).__name__} of {shape}, shares={[*counts]}", refusal)
    layouts = {"weight": PartLayout(shape, dim, runs_of(counts))}
    if module.bias is not None:
        layouts["bias"] = PartLayout(shape[:1]) if dim else PartLayout(shape[:1], 0, runs_of(counts))
    for name, layout in layouts.items():
        setattr(module, name, torch.nn.Parameter(layout.shard(getattr(module, name).detach(), comm.rank)))
    module.layouts, module.comm = layouts, comm  # as a Sharded module: `full_state_dict` has all of it


_SHARES: dict[str, Any] = {"all": None}
"""Those of `install`, for torch's own styles."""

_OWN = {cls.__mro__[1]: cls for cls in (ColwiseParallel, RowwiseParallel, PrepareModuleInput)}
_ORIGINAL = {theirs: theirs._apply for theirs in _OWN}


def install(shares: Any = None) -> ExitStack:
    """From now on torch's ColwiseParallel, RowwiseParallel and PrepareModuleInput do as the classes of this file.

    Models of Hugging Face's transformers compute prompts in halves (`fompi.torch.transformers`). `shares`: those of
    unequal ranks, what `fompi.balance` returns or {"heads": [...], "columns": [...]}, for modules that are parallelized
    from then on. `nn.full_state_dict` has the whole parameters of such modules.
    Modules that are parallelized already stay as they are. In a `with` statement it holds until the end of the block:
    then everything is as it was before, also inside of another block. `fused_calls` begins to count anew.
    """
    before = {theirs: theirs._apply for theirs in _OWN}
    before_shares, _SHARES["all"] = _SHARES["all"], shares
    _set({theirs: own._apply for theirs, own in _OWN.items()})
    swap.watch_transformers(is_installed)
    operators.RAN.clear()
    _LEFT.clear()
    until = ExitStack()
    until.callback(_set, before)
    until.callback(_SHARES.update, all=before_shares)
    return until


STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
"""The words of a `tp_plan` of transformers that are dealt by shares."""


def by_tp_plan(model: Any, mesh: Any, shares: Any) -> Any:
    """`model` of transformers, loaded whole, by its own `tp_plan`, with the heads and columns of unequal ranks

    transformers itself only makes equal parts. What else its plan names stays whole on each rank. Collective. Raises
    the errors of `parallelize_module` under `install(shares=)`.
    """
    plan = {name: STYLES[style]() for name, style in model.tp_plan.items() if style in STYLES}
    with install(shares):
        return parallelize_module(model, mesh, plan)


def is_installed() -> bool:
    return styles.RowwiseParallel._apply is RowwiseParallel._apply


def uninstall() -> None:
    """Undo `install`. Modules that are parallelized already stay as they are."""
    _set(_ORIGINAL)
    _SHARES["all"] = None


def _set(methods: dict[Any, Any]) -> None:
    for theirs, method in methods.items():
        theirs._apply = method
