"""Layout of a model's file: a name, a shape and a use for each weight, as the model declares
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum


class Split(Enum):
    """How tensor-parallel ranks divide a weight."""

    NONE = "every rank has all of it"
    OUTPUTS = "each rank has an equal share of the outputs of every part"
    INPUTS = "each rank has an equal share of the inputs, and the ranks' products are added"
    VOCABULARY = "each rank has the rows of some tokens"
    EXPERTS = "each rank has an equal share of the experts, each of them whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    shape: tuple[int, ...]
    """Shape; that of a linear layer is (outputs, inputs), whatever its tensors look like."""
    is_linear: bool = False
    is_norm: bool = False
    is_bias: bool = False
    tied_to: str = ""
    """Name of the weight whose tensors it shares; it then has no tensors of its own."""
    split: Split = Split.NONE
    parts: tuple[int, ...] = ()
    """Outputs of each of the projections that are joined in it, where `split` is OUTPUTS."""
    divided: tuple[int, ...] = ()
    """Numbers of outputs of the pieces that ranks divide separately, where these are not
    `parts`."""
    copied: frozenset[int] = frozenset()
    """Indices of the pieces of which every rank has all."""
    heads: tuple[int, ...] = ()
    """Heads of each piece that no rank has a share of: several ranks have the same one where there
    are more ranks than heads. Empty: any rows are divided."""
    num_experts: int = 0
    """Number of experts whose outputs are concatenated in it; 0: not a weight of experts."""
    is_routing: bool = False
    """Whether it decides on experts: such a weight is never rounded to fewer bits."""
    follows_layers: bool = False
    """Whether a table is read behind the layers, as a head is."""
    is_wide: bool = False
    """Whether it is in float32, whatever the model computes in."""

    @property
    def pieces(self) -> tuple[int, ...]:
        """Outputs of each piece that ranks divide on its own, where `split` is OUTPUTS."""
        return self.divided or self.parts


Layout = Mapping[str, WeightSpec]
"""Keyed by name, in the order in which random weights are drawn."""


def linear(
    out_features: int, in_features: int, *, tied_to: str = "", split: Split = Split.NONE
) -> WeightSpec:
    return WeightSpec(
        shape=(out_features, in_features), is_linear=True, tied_to=tied_to, split=split
    )


def joined_linear(
    parts: tuple[int, ...], in_features: int, heads: tuple[int, ...] = ()
) -> WeightSpec:
    """Projections of one input, of which each rank has a share of each; `heads` as in
    `WeightSpec`."""
    shape = sum(parts), in_features
    return WeightSpec(shape=shape, is_linear=True, split=Split.OUTPUTS, parts=parts, heads=heads)


def divided(
    spec: WeightSpec, pieces: tuple[int, ...], copied: frozenset[int] = frozenset()
) -> WeightSpec:
    """A weight, or a table of rows, of which each rank has a share of each piece, or all of it."""
    parts = spec.parts or (spec.shape[0],)
    return replace(spec, split=Split.OUTPUTS, parts=parts, divided=pieces, copied=copied)


def joined_experts(num_experts: int, parts: tuple[int, ...], in_features: int) -> WeightSpec:
    """A `joined_linear` of every expert, one behind the other."""
    joined = joined_linear(parts * num_experts, in_features)
    return replace(joined, num_experts=num_experts)


def experts(num_experts: int, out_features: int, in_features: int) -> WeightSpec:
    """A linear layer of all experts, concatenated, whose inputs ranks divide."""
    whole = linear(num_experts * out_features, in_features, split=Split.INPUTS)
    return replace(whole, num_experts=num_experts)


def whole_experts(spec: WeightSpec) -> WeightSpec:
    """A weight or bias of all experts, of which each rank holds whole experts."""
    return replace(spec, split=Split.EXPERTS, parts=())


def norm(size: int) -> WeightSpec:
    return WeightSpec(shape=(size,), is_norm=True)


def table(*shape: int, split: Split = Split.NONE) -> WeightSpec:
    """Anything else: an embedding, for instance."""
    return WeightSpec(shape=shape, split=split)


def joined_bias(parts: tuple[int, ...], heads: tuple[int, ...] = ()) -> WeightSpec:
    """The bias of a `joined_linear`."""
    return WeightSpec(shape=(sum(parts),), split=Split.OUTPUTS, parts=parts, heads=heads)


def bias(size: int) -> WeightSpec:
    """The bias of a norm, or of a linear layer whose outputs ranks do not divide."""
    return WeightSpec(shape=(size,), is_bias=True)


def joined_expert_biases(num_experts: int, parts: tuple[int, ...]) -> WeightSpec:
    """The biases of a `joined_experts`, one behind the other."""
    return joined_bias(parts * num_experts)


def expert_biases(num_experts: int, size: int) -> WeightSpec:
    """The biases of an `experts`, one behind the other."""
    return bias(num_experts * size)


def width_norm(size: int) -> WeightSpec:
    """A norm over all heads of a token; each rank has the factors of its heads."""
    return WeightSpec(shape=(size,), is_norm=True, split=Split.OUTPUTS, parts=(size,))
