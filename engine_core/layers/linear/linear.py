"""A weight that multiplies, whatever its bits look like: x · Wᵀ.

A kind is a file beside this one: the tensors that it is made of, how it is loaded, and its product
in plain torch, which is its specification. A platform may have a faster product for a kind; see
`Platform.linear`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from headwater.kernels.quant.token_rounding import Rounding

from ...config import ConfigError

Tokens = Any
"""Input [T, K] of a product: a tensor or, for a layer with `rounds_to`, a tensor that the platform
rounded."""
Product = Callable[[Tokens], torch.Tensor]
"""The product with one weight: x [T, K] → [T, N]."""
ProductPair = Callable[[Tokens], tuple[torch.Tensor, torch.Tensor]]
"""The products with two weights, as one `Product` each."""


class Linear(ABC):
    """x [T, K] → [T, N]. Kernels read the attributes that a kind adds."""

    kind: ClassVar[str]
    """Platforms choose a product by it."""
    out_features: int
    """N"""
    in_features: int
    """K"""
    rounds_to: Rounding | None = None
    """How the product rounds tokens to 8 bits: a `RoundingPlatform` made such a layer."""

    @abstractmethod
    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] → [T, N] in x's dtype, in plain torch."""

    def outputs(self, rows: range) -> Linear:
        """The layer of some outputs alone, in the same memory. Raises `ConfigError` where these
        share memory with others, or the kind has no such parts."""
        raise ConfigError("kind of weights of experts", self.kind, "one that can be cut by expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A tensor that a stored linear layer is made of."""

    suffix: str
    """Follows the layer's name in a model's file; may be empty."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    out_axis: int | None
    """Axis along which devices divide the outputs; None: each device has the whole tensor."""
    in_axis: int | None
    """Like `out_axis`, for the inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part of a linear layer [N, K] that one rank holds."""

    outputs: tuple[range, ...]
    """Ranges of its N outputs, in their order."""
    inputs: range
    """Range of its K inputs."""


class StoredLinear(Linear):
    """A kind that a model's file can hold."""

    suffixes: ClassVar[tuple[str, ...]]
    """Names of its tensors, after the layer's name; the suffixes of a layer's tensors decide its
    kind."""
    optional_suffixes: ClassVar[tuple[str, ...]] = ()
    """Names of tensors that some layers of the kind have beside these."""

    @classmethod
    @abstractmethod
    def parameters(
        cls,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        stored: Mapping[str, torch.Tensor],
    ) -> tuple[Parameter, ...]:
        """Tensors of a layer of this kind. `dtype`: the model's. `stored`: the layer's tensors by
        suffix, which say what the kind leaves open, such as the group size. Raises
        `ConfigError`."""

    @classmethod
    def cut(
        cls,
        tensors: Mapping[str, torch.Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype,
        cut: Cut,
    ) -> dict[str, torch.Tensor]:
        """The tensors of a part of a layer [N, K], by suffix. Reads nothing of mapped tensors but
        that part. Raises `ConfigError` where the layer cannot be cut there."""
        found = {}
        axes = {}
        for part in cls.parameters(*shape, dtype, tensors):
            tensor = tensors[part.suffix]
            axes[part.suffix] = part.in_axis
            if part.out_axis is not None:
                pieces = [
                    narrowed(tensor, part.out_axis, outputs, shape[0]) for outputs in cut.outputs
                ]
                tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, part.out_axis)
            found[part.suffix] = tensor
        if len(cut.inputs) < shape[1]:
            found |= cls.cut_inputs(found, axes, cut.inputs, shape[1])
        return {suffix: tensor.contiguous() for suffix, tensor in found.items()}

    @classmethod
    def cut_inputs(
        cls,
        tensors: Mapping[str, torch.Tensor],
        axes: Mapping[str, int | None],
        inputs: range,
        num_inputs: int,
    ) -> dict[str, torch.Tensor]:
        """The tensors that some inputs change, by suffix, as these inputs need them. `axes` are the
        tensors' axes of inputs. Raises `ConfigError`."""
        return {
            suffix: narrowed(tensors[suffix], axis, inputs, num_inputs)
            for suffix, axis in axes.items()
            if axis is not None
        }

    @classmethod
    @abstractmethod
    def load(cls, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Self:
        """The layer made of tensors by suffix. dtype is the one that the model computes in."""


class ExpandableLinear(StoredLinear):
    """A kind of few bits whose weights are expanded to the model's dtype: results equal those of a
    dense layer with these weights, to the bit."""

    dtype: torch.dtype
    """The model's dtype."""

    @abstractmethod
    def expanded(self) -> torch.Tensor:
        """The weights [N, K] in the model's dtype."""

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.expanded())


def narrowed(tensor: torch.Tensor, axis: int, features: range, num_features: int) -> torch.Tensor:
    """The view of a tensor that belongs to some features, where its axis has an element for every
    few of them. Raises `ConfigError` where an element belongs to two parts."""
    size = tensor.shape[axis]
    if (features.start * size) % num_features or (features.stop * size) % num_features:
        allowed = f"multiples of {num_features // size}, as the weights are stored"
        raise ConfigError("features of a rank", len(features), allowed)
    start = features.start * size // num_features
    stop = features.stop * size // num_features
    return tensor.narrow(axis, start, stop - start)
