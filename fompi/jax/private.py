"""Names of JAX that no document promises, and that a compiled call needs. No other file uses such names.

They were checked on the versions in CHECKED. `missing()` says in one line which of them this version lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import jax
import jax.extend.core
import numpy as np
from jax.interpreters import ad, batching, mlir

from fompi.base.errors import StateError, TensorError

CHECKED = ("0.5.0", "0.6.2", "0.10.2")
"""The versions of jax on which these names were checked."""

NAMES = {
    "jax.interpreters.ad": "JVPTracer Zero is_undefined_primal primitive_jvps primitive_transposes",
    "jax.interpreters.batching": "primitive_batchers",
    "jax.interpreters.mlir": "TokenSet lower_fun register_lowering",
    "jax._src.effects": "Effect lowerable_effects ordered_effects shardable_ordered_effects "
    "control_flow_allowed_effects custom_derivatives_allowed_effects remat_allowed_effects",
    "jax._src.core": "abstract_token trace_state_clean",
    "jax._src.config": "config_ext",
    "jax._src.mesh": "thread_resources",
    "jax._src.source_info_util": "_source_info_context",
    "jax._src.interpreters.mlir": "create_token",
    "jax._src.interpreters.mlir.ModuleContext": "add_keepalive replace",
    "jax._src.interpreters.mlir.LoweringRuleContext": "replace set_tokens_out",
    "jax.core": "ShapedArray eval_jaxpr",
    "jax.core.Tracer": "to_concrete_value",
}
"""What is used, by the module or class that has it."""


def missing() -> list[str]:
    """The names that this version of jax does not have."""
    absent = []
    for place, names in NAMES.items():
        for name in names.split():
            if not hasattr(_resolve(place), name):
                absent.append(f"{place}.{name}")
    return absent


def _resolve(place: str) -> Any:
    """The module or class of this name. None: there is none."""
    found: Any = jax
    for part in place.split(".")[1:]:
        found = getattr(found, part, None)
    return found


def is_abstract(x: Any) -> bool:
    """True for a tracer that has no value: under jax.jit or jax.vmap, but not in a plain jax.grad.

    False in versions of JAX that do not say so. There the call refuses the tracer.
    """
    value = getattr(x, "to_concrete_value", None) if isinstance(x, jax.core.Tracer) else None
    return value is not None and value() is None


def is_staged(tensors: Any) -> bool:
    """True if a call on these tensors belongs to a program that JAX traces.

    So does a call on arrays alone there, such as constants of the program.
    """
    if any(map(is_abstract, tensors)):
        return True
    return not outside_of_traces()() and is_abstract(jax.lax.neg(np.float32(0)))


def is_zero(tangent: Any) -> bool:
    """True for a tangent or cotangent that JAX knows to be zero."""
    return type(tangent) is ad.Zero


def variation(avals: Any) -> dict[str, Any]:
    """Over which axes of a mesh the tensors of a call vary inside jax.shard_map, as keywords of ShapedArray.

    All must vary over the same ones, and the results then do too. Raises TensorError otherwise: JAX would not sum the
    gradient of a tensor that varies less than the others.
    """
    slots = jax.core.ShapedArray.__slots__
    name = next((name for name in ("manual_axis_type", "vma") if name in slots), None)
    if name is None:  # before 0.6
        return {}
    kinds = [getattr(aval, name) for aval in avals]
    if any(kind != kinds[0] for kind in kinds):
        axes = ", ".join(str(sorted(getattr(kind, "varying", kind))) for kind in kinds)
        raise TensorError(
            f"fompi under jax.shard_map: the tensors of a call vary over different axes of the mesh: {axes}. Make them "
            f'alike by jax.lax.pcast(w, axis, to="varying"), or pass check_vma=False to jax.shard_map'
        )
    if name == "vma" or not kinds:
        return dict(zip([name], kinds, strict=False))
    sharding = jax.sharding.NamedSharding(avals[0].sharding.mesh, jax.sharding.PartitionSpec())
    return {name: kinds[0], "sharding": sharding}


def is_undefined(x: Any) -> bool:
    """True for an input of a transposition whose cotangent is wanted."""
    return bool(ad.is_undefined_primal(x))


def zeros(avals: Any) -> list[Any]:
    """Tangents that are known to be zero."""
    return [ad.Zero(aval.to_tangent_aval()) for aval in avals]


def register(primitive: Any, *, jvp: Any, transpose: Any = None, batch: Any, lower: Any) -> None:
    """Give a primitive its rules."""
    ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, lower, platform=platform)


@functools.cache
def ordered_effect(name: str) -> Any:
    """The effect of this name. Calls that have it run in the order of the program, also in loops."""
    from jax._src import effects

    class Ordered(effects.Effect):
        __str__ = __repr__ = lambda self: name

    for allowed in (
        effects.lowerable_effects,
        effects.ordered_effects,
        effects.shardable_ordered_effects,  # also in a program of several processes
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    ):
        allowed.add_type(Ordered)
    return Ordered()


def register_copy(primitive: Any, transpose: Any) -> None:
    """Give a primitive the rules of y = x with this transposition."""

    def jvp(primals: Any, tangents: Any, **parameters: Any) -> Any:
        (x,), (dx,) = primals, tangents
        return primitive.bind(x, **parameters), dx if is_zero(dx) else primitive.bind(dx, **parameters)

    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = lambda xs, dims, **parameters: (primitive.bind(*xs, **parameters), *dims)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])


def lowered(function: Any) -> Any:
    """The lowering of a primitive that is a composition of others. It hands on the token of an effect."""
    return mlir.lower_fun(function)


def is_forward(x: Any) -> bool:
    """True for a tracer of jax.jvp whose tangent has a value, so that no jax.grad asks for it."""
    if not isinstance(x, ad.JVPTracer):
        return False
    tangent: Any = x.tangent
    while hasattr(tangent, "val") and isinstance(tangent, jax.core.Tracer):
        tangent = tangent.val  # of a batch
    return not is_zero(tangent) and not _is_unknown(tangent)


def _is_unknown(tangent: Any) -> bool:
    """True for the tangent of a jax.grad: its values come later."""
    if isinstance(tangent, ad.JVPTracer):
        return _is_unknown(tangent.primal)
    return isinstance(tangent, jax.core.Tracer)


def check_devices(module_context: Any) -> None:
    """Raise TensorError for a program on several devices of one process. A process is one rank."""
    where = module_context.axis_context
    devices = where.mesh.size if hasattr(where, "mesh") else getattr(where, "num_devices", 1)
    if devices > jax.process_count():
        raise TensorError(
            f"fompi under jax.jit: this program runs on {devices} devices of {jax.process_count()} processes, but each "
            f"process is one rank: use one device in each"
        )


def lower_ordered(ctx: Any, operands: Any, target: str, effect: Any, keep: Any, **attributes: Any) -> Any:
    """The call of `target` in a compiled program, with the token of `effect`. The program keeps `keep` alive."""
    from jax._src.core import abstract_token

    check_devices(ctx.module_context)
    ctx.module_context.add_keepalive(keep)
    inner = ctx.replace(avals_in=[abstract_token, *ctx.avals_in], avals_out=[abstract_token, *ctx.avals_out])
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True)
    token, *results = rule(inner, ctx.tokens_in.get(effect), *operands, **attributes)
    ctx.set_tokens_out(mlir.TokenSet({effect: token}))
    return results


def lower_with_own_token(primitive: Any, effect: Any) -> None:
    """Lower a primitive with a `body`. Its calls have a token of `effect` that begins and ends in the primitive."""

    def lower(ctx: Any, *operands: Any, body: Any, results: Any) -> Any:
        from jax._src.interpreters.mlir import create_token

        inner = ctx.replace(tokens_in=mlir.TokenSet({effect: create_token()}), tokens_out=None)
        return mlir.lower_fun(body)(inner, *operands)

    for platform in ("cpu", "cuda"):
        mlir.register_lowering(primitive, lower, platform=platform)


def outside_of_traces() -> Any:
    """A function that is True if JAX traces nothing in this thread."""
    from jax._src.core import trace_state_clean

    return trace_state_clean


def modes() -> Callable[[], AbstractContextManager[None]]:
    """What makes a context with the settings of JAX that this thread has (`jax.default_device`), for another thread.

    Raises StateError in a function that JAX traces: it does that in one thread.
    """
    from jax._src import config, mesh, source_info_util

    if not outside_of_traces()():
        raise StateError(
            "fompi.interleave runs functions in threads of their own, but JAX traces this one in one thread"
        )
    unset = config.config_ext.unset
    settings = [each for each in vars(config).values() if hasattr(each, "swap_local") and not isinstance(each, type)]
    values = [(each, each.get_local()) for each in settings if each.get_local() is not unset]
    own = [(each, dict(vars(each))) for each in (mesh.thread_resources, source_info_util._source_info_context)]

    def swap(setting: Any, value: Any) -> Any:
        outside, hook = setting.swap_local(value), getattr(setting, "_update_thread_local_hook", None)
        if hook is not None and outside is not value:
            hook(None if value is unset else value)
        return outside

    @contextmanager
    def same() -> Iterator[None]:
        with ExitStack() as stack:
            for setting, value in values:
                stack.callback(swap, setting, swap(setting, value))
            for each, held in own:
                stack.callback(vars(each).update, dict(vars(each)))
                vars(each).update({name: list(v) if isinstance(v, list) else v for name, v in held.items()})
            yield

    return same
