"""Torch functions between a module's linear layers, in forms whose bits do not depend on what else
is in the batch.

On a CPU torch computes the last numbers of a thread's share by other code than the rest, so that
the bits of an exponential depend on the size of the batch; on a GPU the order of a sum depends on
how many sums there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from headwater.kernels.norm.row_sum import row_sum

from ...config import ConfigError, require

TRANSCENDENTAL = frozenset(
    {"exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sigmoid", "erf", "softplus", "cos"}
    | {"sin", "silu", "gelu", "elu", "celu", "mish", "logsigmoid", "rms_norm"}
)
"""Functions that a CPU computes row by row."""
SUMS = frozenset({"sum", "mean"})
ELEMENTWISE = frozenset(
    {"__add__", "__radd__", "__iadd__", "add", "add_", "__sub__", "__rsub__", "sub", "rsub"}
    | {"__mul__", "__rmul__", "__imul__", "mul", "mul_", "__truediv__", "__rtruediv__", "div"}
    | {"__neg__", "neg", "__pow__", "pow", "square", "sqrt", "rsqrt", "reciprocal", "abs"}
    | {"relu", "relu_", "leaky_relu", "clamp", "clamp_min", "clamp_max", "clamp_", "clip"}
    | {"maximum", "minimum", "where", "hardtanh", "relu6", "dropout", "masked_fill", "sign"}
    | {"__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__", "gt", "ge", "lt", "le"}
    | {"__and__", "__or__", "__invert__", "logical_not", "addcmul", "softplus"}
    | {"layer_norm", "embedding"}
)
"""Functions whose bits are a number's, or a row's, alone."""
SHAPES = frozenset(
    {"view", "reshape", "transpose", "permute", "contiguous", "unsqueeze", "squeeze", "expand"}
    | {"expand_as", "flatten", "unflatten", "split", "chunk", "cat", "concat", "stack", "unbind"}
    | {"tensor_split", "narrow", "repeat", "repeat_interleave", "__getitem__", "index_select"}
    | {"swapaxes", "movedim", "clone", "detach", "alias", "view_as", "type_as", "to", "float"}
    | {"half", "bfloat16", "double", "type", "long", "int", "bool", "size", "dim", "numel"}
    | {"stride", "is_contiguous", "__get__", "__len__", "element_size", "get_device"}
    | {"is_floating_point", "requires_grad_", "new_empty", "zeros_like", "ones_like"}
    | {"empty_like", "full_like", "new_zeros", "new_ones", "new_full", "nelement", "mT", "T"}
    | {
        "__setitem__",
        "is_complex",
        "ndimension",
        "copy_",
        "_set_grad_enabled",
        "ones",
        "zeros",
        "arange",
    }
    | {"full", "empty", "__format__", "__repr__", "is_autocast_enabled", "broadcast_to"}
)
"""Functions that only change shapes."""
PAIRWISE = frozenset({"min", "max"})
"""Functions that are elementwise of two tensors."""
ALLOWED = TRANSCENDENTAL | SUMS | ELEMENTWISE | SHAPES | PAIRWISE


class RowWise(TorchFunctionMode):
    """Scope of a module's forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self._is_aside = False
        self.is_dry = False
        """Whether products are left out: their outputs are zeros."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Scope of operations of a platform, which keep a row's bits themselves."""
        was_aside = self._is_aside
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = was_aside

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_aside:
            return func(*args, **kwargs)
        return self._apply(func, args, kwargs)

    def _apply(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if name not in TRANSCENDENTAL and name not in SUMS:
            return func(*args, **kwargs)
        x = args[0]
        if x.device.type == "cpu":
            return func(*args, **kwargs) if name in SUMS else _by_row(func, args, kwargs)
        if x.is_cuda and name in SUMS:
            return _sum(x, *args[1:], is_mean=name == "mean", **kwargs)
        return func(*args, **kwargs)


class Judging(RowWise):
    """Like `RowWise`, and refuses what has no such form. Raises `ConfigError`."""

    def _apply(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if name not in ALLOWED:
            allowed = "sums over a row, and functions of single numbers, between linear layers"
            raise ConfigError("modelling code", f"one that calls {name}", allowed)
        if name in SUMS:
            _check_sum(name, args[0], *args[1:], **kwargs)
        if name in PAIRWISE:
            is_pair = len(args) == 2 and isinstance(args[1], torch.Tensor)
            require(is_pair, "modelling code", f"one that takes a {name} of many", "that of pairs")
        return func(*args, **kwargs)


def _by_row(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function of [1, T, …] computed for one token at a time."""
    x = args[0]
    if x.dim() < 3 or x.shape[1] == 1:
        return func(*args, **kwargs)
    rows = [func(row.contiguous(), *args[1:], **kwargs) for row in x.split(1, dim=1)]
    return torch.cat(rows, dim=1)


def _sum(
    x: torch.Tensor,
    dim: Any = None,
    keepdim: bool = False,  # torch's signature
    *,
    is_mean: bool,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    total = row_sum(rows if dtype is None else rows.to(dtype))
    found = total / x.shape[-1] if is_mean else total
    return found.view(*x.shape[:-1], 1) if keepdim else found.view(x.shape[:-1])


def _check_sum(
    name: str,
    x: torch.Tensor,
    dim: Any = None,
    keepdim: bool = False,  # torch's signature
    **_: Any,
) -> None:
    """Raises `ConfigError`."""
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    is_row = len(dims) == 1 and dims[0] in (-1, x.dim() - 1) and x.is_floating_point()
    if not is_row:
        raise ConfigError("modelling code", f"one that takes a {name} over {dim}", "sums over rows")
