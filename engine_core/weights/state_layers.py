"""Layers that keep a state of a sequence in place of its keys and values, and its bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from ..config import require

UNIT_ALIGNMENT = 128
"""Bytes: units begin at multiples of it, which kernels ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayers:
    """The state layers of a model. Each divides its state into equal units, which are computed
    without one another. A unit has the state before the first token of a block, and a tail: what
    the tokens of the block bring, as far as they are computed."""

    is_state: tuple[bool, ...]
    """By layer of the model, whether it keeps a state; at least one layer has keys and values."""
    num_units: int
    """Units of a layer."""
    border_floats: int
    """Numbers of float32 of a unit's state."""
    border_values: int = 0
    """Numbers of the model's dtype beside them."""
    token_floats: int = 0
    """Numbers of float32 that each token of a block adds to a unit's tail."""
    token_values: int = 0
    """Numbers of the model's dtype that it adds."""

    def __post_init__(self) -> None:
        """Raises `ConfigError`."""
        allowed = "some state layers and some layers with keys and values"
        require(True in self.is_state and False in self.is_state, "layer_types", "", allowed)
        require(self.num_units >= 1, "units of a state layer", self.num_units, "at least 1")

    @property
    def first_units(self) -> tuple[int, ...]:
        """Number of each layer's first unit among those of all layers; of a layer without a state,
        that of the next one with a state."""
        return tuple(accumulate(self.is_state[:-1], self._behind, initial=0))

    @property
    def num_all_units(self) -> int:
        """Units of all layers."""
        return self.num_units * sum(self.is_state)

    def unit_bytes(self, block_size: int, value_bytes: int) -> int:
        """Bytes of a unit, a multiple of `UNIT_ALIGNMENT`; `value_bytes`: of a number of the
        model's dtype."""
        floats = self.border_floats + block_size * self.token_floats
        values = self.border_values + block_size * self.token_values
        return -(-(4 * floats + value_bytes * values) // UNIT_ALIGNMENT) * UNIT_ALIGNMENT

    def of_layers(self, first: int, stop: int) -> StateLayers | None:
        """State layers among layers first … stop − 1; None: there are none."""
        is_state = self.is_state[first:stop]
        return replace(self, is_state=is_state) if True in is_state else None

    def _behind(self, first_unit: int, is_state: bool) -> int:
        return first_unit + self.num_units * is_state
