"""Arrays of a device with which NumPy's functions compute: each call is a kernel in the caller's current stream.

    y = np.exp(x) * 2 + z[index]      # x, z, index: arrays of one device. Nothing waits for the device.

So the strategies are written once, in NumPy: on the host NumPy computes, on a GPU CuPy, and on the software device this
module. It is as strict as CuPy should be for a step without host waits: it refuses arrays of the host as operands,
functions whose result has a shape that depends on the data, and everything by which the host reads an element.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Array = np.ndarray[Any, Any]

VIEWS = (
    *(np.split, np.array_split, np.moveaxis, np.swapaxes, np.transpose, np.broadcast_to, np.expand_dims, np.squeeze),
)
"""Functions that return other views of the same memory."""

WRITERS = (np.copyto, np.put_along_axis)
"""Functions that write their first argument."""

WAITING = (
    *(np.nonzero, np.flatnonzero, np.argwhere, np.unique, np.bincount, np.extract, np.compress),
    *(np.array_equal, np.allclose, np.trim_zeros),
)
"""Functions whose result, or its shape, the host must know: it would wait for the device."""

METHODS = ("all", "any", "argsort", "cumsum", "max", "mean", "min", "prod", "sum", "take", "argmax", "argmin")


class Computing(NDArrayOperatorsMixin):
    """What the arrays of a device need for it. `_at` has the address and the form; nobody may read its elements.

    `_on(at)` is another view, `_new(shape, dtype)` new memory. `_run(name, work, reads, writes)` enqueues a kernel:
    `work(reads, writes)` gets arrays whose elements it may use.
    """

    _at: Array
    shape: Any
    dtype: Any
    _on: Callable[[Array], Any]
    _new: Callable[[tuple[int, ...], Any], Any]
    _run: Callable[..., None]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        function = ufunc if method == "__call__" else getattr(ufunc, method)
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        if method == "at":
            return self._write(name, function, inputs, options, adds=True)
        if out is not None:
            return self._into(name, function, inputs, options, out[0])
        return self._evaluate(name, function, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: dict[str, Any]) -> Any:
        if function in WAITING:
            raise TypeError(f"np.{function.__name__} of an array of a device would let the host wait for the device")
        if function in VIEWS:
            return _mapped(lambda x: self._on(x) if isinstance(x, np.ndarray) else x, function(*_ats(args), **options))
        if function is np.reshape:
            return args[0].reshape(*args[1:], **options)
        if function in WRITERS:
            return self._write(function.__name__, function, args, options)
        if function in (np.empty, np.empty_like):
            made = function(*_stand_ins(args), **options)
            return self._new(made.shape, made.dtype)
        if (out := options.pop("out", None)) is not None:
            return self._into(function.__name__, function, args, options, out)
        return self._evaluate(function.__name__, function, args, options)

    # -- kernels
    def _evaluate(self, name: str, function: Callable[..., Any], args: Any, options: dict[str, Any]) -> Any:
        """The result of the function, in new memory."""
        with np.errstate(all="ignore"):
            form = function(*_stand_ins(args), **_stand_ins(options))
        forms = [*map(np.asarray, form if isinstance(form, (tuple, list)) else [form])]
        made = [self._new(each.shape, each.dtype) for each in forms]
        operands = _arrays_in((args, options))

        def work(reads: Sequence[Array], writes: Sequence[Array]) -> None:
            of, named = _with((args, options), reads)
            value = function(*of, **named)
            for to, each in zip(writes, value if isinstance(value, (tuple, list)) else [value], strict=True):
                np.copyto(to, each)

        self._run(name, work, operands, made)
        return type(form)(made) if isinstance(form, (tuple, list)) else made[0]

    def _into(self, name: str, function: Callable[..., Any], args: Any, options: dict[str, Any], out: Any) -> Any:
        """function(*args, out=out)"""
        with np.errstate(all="ignore"):
            function(*_stand_ins(args), **_stand_ins(options), out=np.zeros(out.shape, out.dtype))
        operands = _arrays_in((args, options))

        def work(reads: Sequence[Array], writes: Sequence[Array]) -> None:
            of, named = _with((args, options), reads)
            function(*of, **named, out=writes[0])

        self._run(name, work, operands, [out])
        return out

    def _write(
        self, name: str, function: Callable[..., Any], args: Any, options: dict[str, Any], adds: bool = False
    ) -> None:
        """function(*args), which writes the first argument, all of it or some; it `adds` to what is there."""
        first, *rest = args
        if not isinstance(first, Computing):
            raise TypeError(f"{name} cannot write what is on a device to {type(first).__name__}")
        with np.errstate(all="ignore"):
            function(np.zeros(first.shape, first.dtype), *_stand_ins(rest), **_stand_ins(options))
        operands = _arrays_in((rest, options))

        def work(reads: Sequence[Array], writes: Sequence[Array]) -> None:
            of, named = _with((rest, options), reads)
            function(writes[0], *of, **named)

        self._run(name, work, [*operands, *[first] * adds], [first])

    # -- elements
    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(each, (list, np.ndarray, Computing)) for each in keys):
            if any(np.dtype(bool) == getattr(each, "dtype", None) for each in keys):
                raise TypeError("x[mask] has a shape that depends on the data: the host would wait. Use np.where")
            return self._evaluate("gather", operator.getitem, (self, key), {})
        return self._on(self._at[keys if Ellipsis in keys else (*keys, ...)])  # never an element

    def __setitem__(self, key: Any, value: Any) -> None:
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(each, (list, np.ndarray, Computing)) for each in keys):
            self._write("scatter", operator.setitem, (self, key, value), {})
        elif not (isinstance(value, Computing) and value._at.__array_interface__ == self[key]._at.__array_interface__):
            np.copyto(self[key], value)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self._at)))

    def __bool__(self) -> bool:
        raise TypeError("the host cannot read an element of a device: call get() for a copy")

    __int__ = __float__ = __index__ = __complex__ = item = tolist = __bool__

    # -- forms
    @property
    def T(self) -> Any:
        return self._on(self._at.T)

    def swapaxes(self, a: int, b: int) -> Any:
        return self._on(self._at.swapaxes(a, b))

    def transpose(self, *axes: Any) -> Any:
        return self._on(self._at.transpose(*axes))

    def reshape(self, *shape: Any) -> Any:
        """The elements in another shape: a view if the array is contiguous, else a copy."""
        source = self if self._at.flags.c_contiguous or not self._at.size else self.copy()
        return self._on(source._at.reshape(*shape)) if source is self else source.reshape(*shape)

    def view(self, dtype: Any) -> Any:
        return self._on(self._at.view(dtype))

    def copy(self) -> Any:
        return self._evaluate("copy", np.array, (self,), {})

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        if not copy and self._at.dtype == dtype:
            return self
        return self._evaluate("cast", np.ndarray.astype, (self, dtype), {})

    def fill(self, value: Any) -> None:
        self._write("fill", np.copyto, (self, value), {})


def _method(name: str) -> Any:
    function = getattr(np.ndarray, name)

    def call(self: Computing, *args: Any, **options: Any) -> Any:
        return self._evaluate(name, function, (self, *args), options)

    return call


for _name in METHODS:
    setattr(Computing, _name, _method(_name))


def _arrays_in(nested: Any) -> list[Any]:
    """The arrays of a device in nested arguments, in their order. Raises TypeError if there are some of the host."""
    arrays = []

    def note(x: Any) -> None:
        if isinstance(x, Computing):
            arrays.append(x)
        elif isinstance(x, np.ndarray) and x.ndim:
            raise TypeError("an array of the host is no operand of a kernel: copy it to the device before the step")

    _mapped(note, nested)
    return arrays


def _with(nested: Any, arrays: Sequence[Array]) -> Any:
    """The nested arguments with these arrays in the place of those of a device."""
    given = iter(arrays)
    return _mapped(lambda x: next(given) if isinstance(x, Computing) else x, nested)


def _mapped(f: Callable[[Any], Any], x: Any) -> Any:
    """f of each leaf of nested lists, tuples and dicts."""
    if isinstance(x, dict):
        return {key: _mapped(f, each) for key, each in x.items()}
    if isinstance(x, (list, tuple)):
        return type(x)(_mapped(f, each) for each in x)
    return f(x)


def _ats(x: Any) -> Any:
    return _mapped(lambda each: each._at if isinstance(each, Computing) else each, x)


def _stand_ins(x: Any) -> Any:
    """The arguments with arrays of zeros: they give the shapes and dtypes of results, and the errors."""
    return _mapped(
        lambda each: np.broadcast_to(np.zeros((), each.dtype), each.shape) if isinstance(each, Computing) else each, x
    )
