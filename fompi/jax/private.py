"""Names of JAX that no document promises, and that a compiled call needs. No other file uses such names.

They were checked on the versions in CHECKED. `missing()` says in one line which of them this version lacks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.extend.core
from jax.interpreters import ad, batching, mlir

CHECKED = ("0.5.0", "0.6.2", "0.10.2")
"""The versions of jax on which these names were checked."""

NAMES = {
    "jax.interpreters.ad": "Zero primitive_jvps primitive_transposes",
    "jax.interpreters.batching": "primitive_batchers",
    "jax.interpreters.mlir": "TokenSet register_lowering",
    "jax._src.effects": "Effect lowerable_effects ordered_effects control_flow_allowed_effects "
    "custom_derivatives_allowed_effects remat_allowed_effects",
    "jax._src.core": "abstract_token",
    "jax._src.interpreters.mlir.ModuleContext": "add_keepalive",
    "jax._src.interpreters.mlir.LoweringRuleContext": "replace set_tokens_out",
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


def is_zero(tangent: Any) -> bool:
    """True for a tangent or cotangent that JAX knows to be zero."""
    return type(tangent) is ad.Zero


def zeros(avals: Any) -> list[Any]:
    """Tangents that are known to be zero."""
    return [ad.Zero(aval.to_tangent_aval()) for aval in avals]


def register(primitive: Any, *, jvp: Any, transpose: Any = None, batch: Any, lower: Any) -> None:
    """Give a primitive its rules."""
    ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, lower, platform="cpu")


def ordered_effect(name: str) -> Any:
    """An effect. Calls that have it run in the order of the program, also in loops and in functions under jax.jit."""
    from jax._src import effects

    class Ordered(effects.Effect):
        __str__ = __repr__ = lambda self: name

    for allowed in (
        effects.lowerable_effects,
        effects.ordered_effects,
        effects.control_flow_allowed_effects,
        effects.custom_derivatives_allowed_effects,
        effects.remat_allowed_effects,
    ):
        allowed.add_type(Ordered)
    return Ordered()


def lower_ordered(ctx: Any, operands: Any, target: str, effect: Any, keep: Any, **attributes: Any) -> Any:
    """The call of `target` in a compiled program, with the token of `effect`. The program keeps `keep` alive."""
    from jax._src.core import abstract_token

    ctx.module_context.add_keepalive(keep)
    inner = ctx.replace(avals_in=[abstract_token, *ctx.avals_in], avals_out=[abstract_token, *ctx.avals_out])
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True)
    token, *results = rule(inner, ctx.tokens_in.get(effect), *operands, **attributes)
    ctx.set_tokens_out(mlir.TokenSet({effect: token}))
    return results
