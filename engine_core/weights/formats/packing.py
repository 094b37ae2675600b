"""How the layers of a checkpoint are packed, from its `config.json`, in one form for all methods.
Knows nothing about tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import ConfigError

KEY = "quantization_config"
GROUP_SIZES = (32, 64, 128, -1)
"""Inputs that share a scale; -1: all inputs of an output."""
TOKEN_GROUP = 128
BLOCK_OUTPUTS = 64
"""Number of inputs of a token that share a scale, for weights in blocks of 64; the outputs of such
a block are a multiple of it."""
FLOATS = ("fp8", "mxfp4")
"""Formats of floating-point numbers."""
EVERY_LAYER = "Linear"
"""A target that all linear layers match."""
PATTERN = "re:"
"""Beginning of a target that is a pattern."""
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How the weights of a layer are packed."""

    format: str
    """A file of this folder: gptq, awq, pack_quantized, int_quantized, fp8 or mxfp4."""
    bits: int
    group_size: int = -1
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, in place of `group_size`."""
    scale: str = "weight_scale"
    """Last part of the name of the scales, where formats differ in it."""
    has_one_scale: bool = True
    """Whether all of a matrix may share one scale, where `group_size` is -1."""
    zero_offset: int = 0
    """Added to stored zero points."""
    is_symmetric: bool = False
    """Whether the stored zero points must be half of the range, each of them."""
    has_zeros: bool = False
    """Whether zero points are stored, where formats leave it open."""
    has_order: bool = False
    """Whether inputs name their groups, where formats leave it open."""
    activations: str = ""
    """Number format that the checkpoint's tool rounds activations to: `int8` or `fp8`; empty:
    none."""

    @property
    def rounds_whole_tokens(self) -> bool:
        """Whether products round a token to integers with one scale."""
        return self.format == "int_quantized" and self.activations == "int8"

    @property
    def inputs_by_scale(self) -> int:
        """Number of inputs that share a scale; -1: all inputs of an output."""
        return self.group_size if self.block is None else self.block[1]

    @property
    def rounds_groups(self) -> bool:
        """Whether activations have a scale for every `TOKEN_GROUP` inputs, and products that round
        them exist."""
        if self.activations != "fp8" or self.block is None:
            return False
        return self.block[0] % BLOCK_OUTPUTS == 0 and self.block[1] == TOKEN_GROUP


@dataclass(frozen=True, slots=True)
class Rule:
    """The packing of all layers that a target names."""

    target: str
    """A layer's name, `re:` and a pattern that matches from its beginning, or `EVERY_LAYER`."""
    packing: Packing

    def matches(self, layer: str) -> bool:
        if self.target.startswith(PATTERN):
            return re.match(self.target.removeprefix(PATTERN), layer) is not None
        return self.target in (EVERY_LAYER, layer)

    @property
    def specificity(self) -> int:
        """Rank of a match: a layer's own name is above a pattern, and a pattern above what all
        layers match."""
        return 2 if self.target == EVERY_LAYER else int(self.target.startswith(PATTERN))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The packing of a checkpoint's layers. A layer whose tensors are not packed stays as it is,
    whatever is said."""

    method: str
    """The checkpoint's name for it."""
    rules: tuple[Rule, ...]
    """Rules in the order in which they are asked."""

    @classmethod
    def uniform(cls, method: str, packing: Packing) -> Quantization:
        return cls(method=method, rules=(Rule(EVERY_LAYER, packing),))

    @property
    def rounded_activations(self) -> set[str]:
        """Number formats that the checkpoint's tool rounds activations to."""
        return {rule.packing.activations for rule in self.rules} - {""}

    @property
    def unrounded_activations(self) -> set[str]:
        """Like `rounded_activations`, of layers whose tokens no platform rounds: they have several
        scales, and not one for every `TOKEN_GROUP` inputs."""
        packings = [rule.packing for rule in self.rules]
        return {
            each.activations
            for each in packings
            if each.inputs_by_scale != -1 and not each.rounds_groups
        } - {""}

    @property
    def has_integers(self) -> bool:
        """Whether some layers are packed integers."""
        return any(rule.packing.format not in FLOATS for rule in self.rules)

    @property
    def is_of_integers(self) -> bool:
        """Whether all layers are packed integers."""
        return all(rule.packing.format not in FLOATS for rule in self.rules)

    @property
    def rounds_whole_tokens(self) -> bool:
        """Whether some layers round a token to integers with one scale, which depends on all of its
        inputs."""
        return any(each.packing.rounds_whole_tokens for each in self.rules)

    def packing_of(self, layer: str) -> Packing | None:
        return next((rule.packing for rule in self.rules if rule.matches(layer)), None)


def check(
    given: Config, name: str, allowed: object, *, default: object = None, key: str = KEY
) -> None:
    """Raises `ConfigError` for a field of another value."""
    if (value := given.get(name, default)) != allowed:
        raise ConfigError(f"{key}.{name}", value, str(allowed))


def one_of(
    given: Config, name: str, allowed: tuple[Any, ...], *, default: Any = None, key: str = KEY
) -> Any:
    """The field's value. Raises `ConfigError`."""
    value = given.get(name, default)
    # True is no number of bits.
    if isinstance(value, bool) or value not in allowed:
        raise ConfigError(f"{key}.{name}", value, " or ".join(map(str, allowed)))
    return value


def group_size_of(given: Config, name: str = "group_size", *, key: str = KEY) -> int:
    """Raises `ConfigError`."""
    value = given.get(name)
    if not (isinstance(value, int) and value in GROUP_SIZES):
        raise ConfigError(f"{key}.{name}", value, ", ".join(map(str, GROUP_SIZES)))
    return value
