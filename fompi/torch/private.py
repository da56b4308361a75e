"""The names of torch that are not public. `CHECKED` says on which versions.

Other files of fompi use these names through this one. Two have their own: `import fompi` marks a function for the
compiler without torch, and `process_group` has methods that torch calls. `missing` says what a version of torch has
changed.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, reduce, wraps
from importlib.util import find_spec
from inspect import signature
from pkgutil import resolve_name
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from fompi.base.errors import LaunchError, StateError

F = TypeVar("F", bound=Callable[..., Any])

CHECKED = ("2.6", "2.8", "2.10", "2.12", "2.13", "2.14", "2.15")
"""The versions of torch with which the process group has been tested (`make test-torch`)."""

NAMES = {
    "torch._C": "_len_torch_dispatch_stack",
    "torch._C._distributed_c10d": "Work Store",
    "torch.autograd.Variable._execution_engine": "queue_callback",
    "torch.distributed": "DistBackendError",
    "torch.distributed.distributed_c10d": "_resolve_process_group _new_process_group_helper",
    "torch.distributed.fsdp.FSDPModule": "_get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_common": "DDPMeshInfo",
    "torch.distributed.rendezvous": "_rendezvous_handlers",
    "torch.nn.parallel.distributed": "_verify_param_shape_across_processes",
    "torch.utils._python_dispatch": "_pop_mode_temporarily",
}
"""What must exist, by the module or class that has it. STYLES has more."""

WORK: Any = c10d.Work
"""What a backend returns for a call in flight. `torch.distributed.Work` is the same class."""

ALIASES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Methods of a ProcessGroup: the name in torch 2.13, and that in 2.6 to 2.12."""

OPERATORS = {
    name: f"{ALIASES.get(name, name)}_"
    for name in (
        *("allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "allgather", "allgather_coalesced"),
        *("broadcast", "gather", "scatter", "alltoall"),
        *ALIASES,
    )
}
"""Methods of a ProcessGroup, and the operators of `torch.ops.c10d` by which C++ calls them of a backend in C++."""


def group_named(name: str) -> Any:
    """The ProcessGroup with this name: `group.group_name`. Raises LaunchError if there is none."""
    try:
        return sys.modules["torch.distributed.distributed_c10d"]._resolve_process_group(name)
    except (LookupError, RuntimeError, ValueError) as error:
        raise LaunchError(f"torch.distributed has no group of the name {name!r}") from error


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int("".join(filter(str.isdigit, part))) for part in version.split(".")[:2])


BACKEND: Any = c10d.Backend if release(torch.__version__) >= (2, 14) else None
"""The base class of a backend for one device of a group. Before torch 2.14, Python cannot make one."""


ERROR_TYPE: Any = getattr(c10d, "ErrorType", None)
"""What `get_error` of a group says, from torch 2.14 on."""

KEEPS_WORK = release(torch.__version__) >= (2, 8)
"""True if torch keeps the Python half of a Work as long as its C++ half, which waits for the call."""


def backend_of(group: Any, device: str) -> Any:
    """The backend that carries out the calls of a ProcessGroup on tensors on `device`. None: it has none."""
    try:
        return group._get_backend(torch.device(device))
    except (RuntimeError, ValueError):  # with "cpu:gloo" a group has no backend for "cuda"
        return None


def with_communicator(group: Any) -> Any:
    """The backend of a ProcessGroup that has a communicator of fompi. None: it has other backends only."""
    found = [group, *(backend_of(group, device) for device in ("cpu", "cuda"))]
    return next((each for each in found if hasattr(each, "comm")), None)


def store_of_default_group() -> Any:
    """The store by which the processes have met."""
    return dist.distributed_c10d._get_default_store()


def backends_of_new_group() -> dict[str, str]:
    """The backend of each device, of the group that torch is making.

    torch tells a backend nothing of the others. So this reads the variable of the function that calls it.
    """
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("backend_config")
    return {} if config is None else {device: str(name) for device, name in config.get_device_backend_map().items()}


class _Operator:
    """`torch.ops.c10d.<name>` as a CommDebugMode wants it: what it counts, and what it calls, which is `call`."""

    def __init__(self, name: str, call: Callable[[], Any]):
        self._overloadpacket, self._name, self._call = getattr(torch.ops.c10d, name), name, call

    def __call__(self, *_: Any, **__: Any) -> Any:
        call, self._call = self._call, lambda: None  # the mode keeps this object: it must not keep the tensors
        return call()

    def __str__(self) -> str:
        return f"c10d.{self._name}.default"


def _counted(name: str, call: Callable[[], Any]) -> Any:
    if not torch._C._len_torch_dispatch_stack():
        return call()
    debug = sys.modules.get("torch.distributed.tensor.debug")
    with sys.modules["torch.utils._python_dispatch"]._pop_mode_temporarily() as mode:
        if debug is None or not isinstance(mode, debug.CommDebugMode):
            return _counted(name, call)
        return mode.__torch_dispatch__(_Operator(name, lambda: _counted(name, call)), ())


def counted(method: F, name: str) -> F:
    """`method` of a group, of which each `CommDebugMode` that is on counts a call, as one of `torch.ops.c10d.<name>`.

    The mode sees operators. It does not see the methods of a group in Python, which torch calls without one.
    """

    @wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        return _counted(name, lambda: method(*args, **options))

    return cast(F, call)


def named(group: Any, name: str) -> Any:
    """Give the C++ half of a group a name. From torch 2.15 on its flight recorder wants it, and asks a backend.

    Returns what must live as long as the group.
    """
    if release(torch.__version__) < (2, 15):
        return None
    kind = type("Named", (BACKEND,), {"getBackendName": lambda self: "fompi"})
    backend = kind(group.rank(), group.size())
    backend._set_group_uid(name)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.UNDEFINED, backend)
    return backend


def factor_of(op: Any) -> Any:
    """The factor of a ReduceOp PREMUL_SUM. Older versions of torch tell it only to pickle."""
    return op.factor if hasattr(op, "factor") else op.__getstate__()[1]


def keep_in_order(operator: Any) -> None:
    """Let a custom operator run, used or not, in the order of the program. Older versions of torch cannot."""
    if hasattr(operator, "register_effect"):
        from torch.library import EffectType

        operator.register_effect(EffectType.ORDERED)


def missing() -> list[str]:
    """The names that this version of torch does not have. "env://" must also have a handler."""
    names = {place: text.split() for place, text in NAMES.items()}
    names |= {f"torch.distributed.tensor.parallel.{kind}": [*methods] for kind, methods in STYLES.items()}
    lost = [f"{place}.{n} is gone" for place, own in names.items() for n in own if not hasattr(resolve_name(place), n)]
    return lost or ([] if "env" in _handlers() else ["_rendezvous_handlers has no handler of env:// any more"])


def _handlers() -> dict[str, Callable[..., Any]]:
    return sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers


def extend_env_method(meet: Callable[..., Any]) -> None:
    """Let `env://`, the default init method, use `meet` where torch would raise an error: without MASTER_ADDR."""
    handlers = _handlers()
    known = handlers["env"]

    def env(url: str, **options: Any) -> Any:
        return (known if "MASTER_ADDR" in os.environ else meet)(url, **options)

    handlers["env"] = env


# -------------------------------------------------------------------------------------------------- parallelize_module

STYLES = {
    "ColwiseParallel": ("_apply", "_partition_linear_fn", "_prepare_input_fn", "_prepare_output_fn"),
    "RowwiseParallel": ("_apply", "_partition_linear_fn", "_prepare_input_fn", "_prepare_output_fn"),
    "PrepareModuleInput": ("_apply", "_prepare_input_arg"),
}
"""The methods of the styles of `torch.distributed.tensor.parallel` that are not public."""


def is_plain(style: Any, base: Any) -> bool:
    """True if the class of `style` has no methods of its own in place of those of `base`, a class of torch."""
    names = [name for name in STYLES[base.__name__] if name != "_apply"]
    return all(getattr(type(style), name) is getattr(base, name) for name in names)


def partition(style: Any, module: Any, mesh: Any) -> None:
    """Make the parameters of a Linear DTensors, as `style` wants them."""
    from torch.distributed.tensor import distribute_module

    distribute_module(module, mesh, style._partition_linear_fn)


def prepared_input(style: Any, layout: Any, module: Any, x: Any, mesh: Any) -> Any:
    """x as the hook of torch gives it to a Linear, as a DTensor with `layout`."""
    return style._prepare_input_fn(style.input_layouts, layout, module, (x,), mesh)


def prepared_output(style: Any, module: Any, y: Any, mesh: Any) -> Any:
    """y as the hook of torch returns it from a Linear."""
    return style._prepare_output_fn(style.output_layouts, style.use_local_output, module, y, mesh)


def prepare_argument(style: Any) -> Callable[..., Any]:
    """The method of a PrepareModuleInput that prepares one input: (input, mesh, layout, desired layout) -> input."""
    return style._prepare_input_arg


def replace_argument(style: Any, method: Callable[..., Any]) -> None:
    """Let a PrepareModuleInput prepare each input by `method`."""
    style._prepare_input_arg = method


def run_by_the_compiler(function: F) -> F:
    """Let torch.compile run `function` once, while it reads a call of it. The result is a constant.

    It is `torch.compiler.assume_constant_result`, which imports the whole compiler. That takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


COMPILES_OBJECTS = release(torch.__version__) >= (2, 12)
"""True if what `run_by_the_compiler` runs may have an argument that is no constant of torch, as a communicator."""


def has_gradient_placements() -> bool:
    """True if `DTensor.from_local` takes grad_placements=. Older versions of torch do not."""
    from torch.distributed.tensor import DTensor

    return "grad_placements" in signature(DTensor.from_local).parameters


def refuse_changed(x: Any) -> None:
    """While torch.compile reads a function: raise StateError if it has changed x in place before."""
    from torch._dynamo.comptime import comptime

    def look(compiler: Any) -> None:
        if compiler.get_local("x").as_fake()._version:
            raise StateError(
                "PrepareModuleInput has gathered an input, but the module changes it in place before a Linear reads "
                "it: write x = x + 1 instead of x += 1"
            )

    comptime(look)


# ------------------------------------------------------------------------------------------------------------ autograd


def before_gradient_is_added(parameter: Any, hook: Callable[[Any], None]) -> Any:
    """Call hook(gradient) before autograd adds a gradient to parameter.grad, behind all hooks of the tensor.

    Returns what must be kept as long as the hook is wanted. It keeps the parameter alive.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    node.register_prehook(lambda gradients: hook(gradients[0]))
    return node


def when_gradient_was_added(parameter: Any, hook: Callable[[Any], None]) -> Any:
    """Call hook(parameter) when autograd has added to parameter.grad, before such hooks that it has already.

    Returns a handle that can remove it.
    """
    earlier = dict(parameter._post_accumulate_grad_hooks or {})
    if earlier:
        parameter._post_accumulate_grad_hooks.clear()
    handle = parameter.register_post_accumulate_grad_hook(hook)
    parameter._post_accumulate_grad_hooks.update(earlier)
    return handle


def renew_hooks(parameter: Any) -> None:
    """`torch.utils.swap_tensors` leaves the hooks behind a gradient in Python's table, but autograd forgets them."""
    if parameter._post_accumulate_grad_hooks is not None:
        parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


# --------------------------------------------------------------------------------------------------------------- FSDP2

ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Public functions whose names torch 2.13 has changed."""


FSDP_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"


def fsdp_groups(module: Any) -> list[Any]:
    """The parameter groups of an FSDP module."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.13 there was one, or None
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    return list(groups)


def is_untouched(module: Any) -> bool:
    """True if the program has chosen neither collectives nor the order of gathers for an FSDP module."""
    names = [type(comm).__name__ for g in fsdp_groups(module) for comm in (g._all_gather_comm, g._reduce_scatter_comm)]
    return (
        all(name.startswith("Default") for name in names) and not module._get_fsdp_state()._states_to_forward_prefetch
    )


def at_first_forward(prepare: Callable[[Any], object]) -> None:
    """Call `prepare(model)` before the first forward of each model that FSDP2 has sharded. Once per process."""

    def patch(module: Any) -> None:
        original = module.FSDPState._lazy_init

        def lazy_init(state: Any) -> None:
            is_first = state._is_root is None
            original(state)
            if is_first:
                prepare(state._modules[0])

        module.FSDPState._lazy_init = lazy_init

    after_import(FSDP_STATE, patch)


def before_ddp_compares(compare: Callable[[Any, Any], object]) -> None:
    """Call `compare(wrapper, module)` where torch's DistributedDataParallel compares shapes, without names."""
    place: Any = sys.modules["torch.nn.parallel.distributed"]
    verify = place._verify_param_shape_across_processes

    @wraps(verify)
    def compared(*args: Any, **options: Any) -> Any:
        here = sys._getframe(1).f_locals  # of the constructor
        if isinstance(here.get("self"), place.DistributedDataParallel) and here.get("init_sync_buffers", True):
            compare(here["self"], here["module"])
        return verify(*args, **options)

    place._verify_param_shape_across_processes = compared


def after_import(name: str, then: Callable[[Any], object]) -> None:
    """Call `then(module)` once the module `name` has been imported: now, or when the program imports it."""
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport:
    """A finder that calls `then(module)` after the module `name` has been imported."""

    def __init__(self, name: str, then: Callable[[Any], object]):
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def reads_gradients_at_once(module: Any, dtype: torch.dtype) -> bool:
    """True if FSDP2 reads the gradients of `module` right after their reduce-scatter, whose result has `dtype`."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

    for group in fsdp_groups(module):
        if isinstance(group.mesh_info, DDPMeshInfo) or group._all_reduce_hook is not None:
            return True
        for parameter in group.fsdp_params:
            p = parameter.sharded_param
            if p.grad is not None or p.dtype != dtype or getattr(p, "_post_accumulate_grad_hooks", None):
                return True
    return False


def at_end_of_backward(call: Callable[[], Any]) -> None:
    """Call `call` when the backward that runs in this thread ends. At once if there is none."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(call)
    except RuntimeError:  # torch's pipelines reduce gradients outside of a backward
        call()


# -------------------------------------------------------------------------------------------------- modes of a thread

_THREAD_LOCALS = (
    ("torch", "_GLOBAL_DEVICE_CONTEXT"),
    ("torch.serialization", "_serialization_tls"),
    ("torch.distributed.device_mesh", "_mesh_resources"),
    ("torch.distributed.tensor._utils", "ExplicitRedistributionContext._local"),
    ("torch._subclasses.fake_tensor", "fake_tensor_tls"),
    ("torch._guards", "_TLS"),
)
"""What torch keeps in Python for each thread: the module, if it is loaded, and the name."""

_STACK = ("_len_torch_{}_stack", "_get_{}_stack_at", "_push_on_torch_{}_stack", "_pop_torch_{}_stack")


def modes() -> Callable[[], AbstractContextManager[None]]:
    """What makes a context with the modes of this thread, for another thread.

    Raises StateError for a mode that torch keeps in one thread.
    """
    here, autograd = torch._C, torch._C._autograd
    of_one_thread = {
        "torch.func (vmap, grad, jvp)": here._functorch.peek_interpreter_stack() is not None,
        "torch.jit.trace": here._get_tracing_state() is not None,
        "torch.profiler, without _ExperimentalConfig(profile_all_threads=True),": autograd._profiler_enabled(),
    }
    for name in [name for name, is_on in of_one_thread.items() if is_on]:
        raise StateError(f"fompi.interleave runs functions in threads of their own, but {name} is for one thread only")
    is_inference, switches = torch.is_inference_mode_enabled(), [(read, write, read()) for read, write in _switches()]
    stacks = [[getattr(here, each.format(kind)) for each in _STACK] for kind in ("function", "dispatch")]
    stacks[1][3] = partial(stacks[1][3], None)
    held = [[read(i) for i in range(count())] for count, read, _, _ in stacks]
    hooks = autograd._top_saved_tensors_default_hooks(False)
    no_hooks = autograd._saved_tensors_hooks_get_disabled_error_message()
    keys = here._dispatch_tls_local_include_set(), here._dispatch_tls_local_exclude_set()
    loaded: list[tuple[Any, str]] = [(sys.modules[m], name) for m, name in _THREAD_LOCALS if m in sys.modules]
    found = [reduce(lambda of, part: getattr(of, part, None), name.split("."), module) for module, name in loaded]
    own = [(each, dict(vars(each))) for each in found if isinstance(each, threading.local)]

    @contextmanager
    def same() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(is_inference))
            for read, write, value in switches:
                if (outside := read()) != value:
                    stack.callback(write, outside)
                    write(value)
            for each, values in own:
                stack.callback(_set_all, each, dict(vars(each)))
                _set_all(each, values)
            for (count, _, push, pop), wanted in zip(stacks, held, strict=True):
                stack.callback(_fill, count, push, pop, [])
                _fill(count, push, pop, wanted)
            if hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            if no_hooks is not None:
                stack.callback(autograd._saved_tensors_hooks_enable)
                autograd._saved_tensors_hooks_disable(no_hooks, *[False] * (hooks is not None))
            stack.enter_context(here._ForceDispatchKeyGuard(*keys))
            yield

    return same


def _switches() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """What reads and what writes each value that a thread of torch has for itself."""
    here, found = torch._C, list[tuple[Callable[[], Any], Callable[[Any], Any]]]()
    found.append((torch.is_grad_enabled, here._set_grad_enabled))
    found.append((torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled))
    found.append((torch.get_num_threads, torch.set_num_threads))
    found.append((lambda: not sys.float_info.min / 2, torch.set_flush_denormal))  # a register of the core
    for verb, name in (
        *(
            ("is", f"{name}_enabled")
            for name in ("fwd_grad", "multithreading", "view_replay", "grad_layout_enforcement")
        ),
        *(("get", name) for name in ("torch_function_state", "dtensor_allow_implicit_replication")),
        ("get", "graph_executor_optimize"),
    ):
        if hasattr(here, f"_{verb}_{name}"):
            found.append((getattr(here, f"_{verb}_{name}"), getattr(here, f"_set_{name}")))
    for device in getattr(here, "_autocast_supported_devices", lambda: ("cpu", "cuda"))():
        found.append((partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device)))
        found.append((partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)))
    if torch.cuda.is_initialized():
        for number in range(torch.cuda.device_count()):
            found.append((partial(torch.cuda.current_stream, number), torch.cuda.set_stream))
        found.append((torch.cuda.current_device, torch.cuda.set_device))  # last: a stream chooses its device
    return found


def _fill(count: Callable[[], int], push: Callable[[Any], Any], pop: Callable[[], Any], wanted: list[Any]) -> None:
    while count():
        pop()
    for mode in wanted:
        push(mode)


def _set_all(own: Any, values: dict[str, Any]) -> None:
    """Give an object of `threading.local` the values of another thread. Lists grow and shrink in each thread alone."""
    vars(own).clear()
    vars(own).update({name: list(value) if type(value) is list else value for name, value in values.items()})
