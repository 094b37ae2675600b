"""Layers that keep a state of a sequence instead of its keys and values, and the bytes of these
states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Any, ClassVar

from headwater.kernels.delta.delta_unit import NUM_BEFORE, DeltaUnit
from headwater.kernels.mamba.mamba_unit import MambaUnit
from headwater.kernels.states.set_layout import ALIGNMENT, SetSizes

from ..config import require

HEAD_SIZES = (32, 64, 128, 256)
"""Sizes of the heads of gated delta nets."""
MAX_HEADS = 1024
MAX_CONV_WIDTH = 16
MAMBA_SIZES = (16, 32, 64, 128, 256)
"""Sizes of states of Mamba-2."""
MAMBA_HEAD_SIZES = (16, 32, 64, 80, 128, 256)
"""Head sizes that are served; Nemotron Nano 2 has 80."""
HEADS_OF_UNIT = 8
"""Heads of a unit, at most."""
LEAST_CHANNELS = 16
MOST_CHANNELS = 256
"""Channels of a unit of a short convolution: CPUs compute sixteen at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayers:
    """The state layers of a model. Each divides its state into equal units, which are computed
    without one another. A unit has the state before the first token of a block, in equal pieces,
    and a tail: what the tokens of the block bring, as far as they are computed."""

    is_state: tuple[bool, ...]
    """Whether each layer of the model keeps a state; at least one layer has keys and values."""
    num_units: int
    """Units of a layer."""
    num_pieces: int = 0
    """Pieces of a unit's state."""
    piece_floats: int = 0
    """Numbers of float32 of a piece."""
    border_values: int = 0
    """Numbers of the model's dtype before the border with which a tail begins."""
    token_floats: int = 0
    """Numbers of float32 that each token of a block adds to a unit's tail."""
    token_values: int = 0
    """Number of values of the model's dtype that each token adds."""
    pair_floats: int = 0
    """Numbers of float32 that each token of a block adds for each token of the block."""

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

    def set_sizes(self, block_size: int, value_bytes: int) -> SetSizes:
        """Sizes of a state set; `value_bytes`: of a number of the model's dtype."""
        floats = block_size * (self.token_floats + block_size * self.pair_floats)
        values = self.border_values + block_size * self.token_values
        num_units = self.num_all_units
        return SetSizes(
            num_tails=num_units,
            tail_bytes=-(-(4 * floats + value_bytes * values) // ALIGNMENT) * ALIGNMENT,
            num_pieces=num_units * self.num_pieces,
            piece_bytes=4 * self.piece_floats,
        )

    def of_layers(self, first: int, stop: int) -> StateLayers | None:
        """State layers among layers first … stop − 1; None: there are none."""
        is_state = self.is_state[first:stop]
        return replace(self, is_state=is_state) if True in is_state else None

    def _behind(self, first_unit: int, is_state: bool) -> int:
        return first_unit + self.num_units * is_state


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig:
    """Sizes of a layer. A key head with its value heads is a unit of its state."""

    field: ClassVar = "delta"
    """Name of the field of a model's config that has them."""
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Size of a query or a key."""
    value_dim: int
    """Size of a value."""
    is_by_head: bool = False
    """Whether projections lie by key head, else by kind: see `HeadPlaces`."""
    keeps_solved: bool = False
    """Whether tails keep solved rows; see `DeltaUnit`."""
    page_parts: int = 1
    """See `StateSizes`."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for sizes that are not served."""
        heads = {
            "linear_num_key_heads": self.num_key_heads,
            "linear_num_value_heads": self.num_value_heads,
        }
        for name, count in heads.items():
            is_count = type(count) is int and 1 <= count <= MAX_HEADS
            require(is_count, name, count, f"a whole number, 1…{MAX_HEADS}")
        allowed = f"multiples of linear_num_key_heads ({self.num_key_heads})"
        is_multiple = self.num_value_heads % self.num_key_heads == 0
        require(is_multiple, "linear_num_value_heads", self.num_value_heads, allowed)
        sizes = {"linear_key_head_dim": self.key_dim, "linear_value_head_dim": self.value_dim}
        for name, size in sizes.items():
            is_size = type(size) is int and size in HEAD_SIZES
            require(is_size, name, size, " or ".join(map(str, HEAD_SIZES)))

    @property
    def values_size(self) -> int:
        """Outputs of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def keys_size(self) -> int:
        """Numbers of all heads' keys."""
        return self.num_key_heads * self.key_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys_size + self.values_size

    @property
    def divided(self) -> dict[str, int]:
        """Numbers of what ranks divide, by name."""
        return {"key heads of states": self.num_key_heads}

    def solved(self) -> DeltaConfig:
        """The same with tails that keep solved rows."""
        return replace(self, keeps_solved=True)

    def part(self, size: int) -> DeltaConfig:
        """An equal share of the heads."""
        return replace(
            self,
            num_key_heads=self.num_key_heads // size,
            num_value_heads=self.num_value_heads // size,
            page_parts=self.page_parts * size,
        )

    def unit(self, block_size: int, element_size: int) -> DeltaUnit:
        """The layout of a unit for elements of so many bytes."""
        return DeltaUnit(
            num_values=self.num_value_heads // self.num_key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            block_size=block_size,
            element_size=element_size,
            keeps_solved=self.keeps_solved,
            has_small_pages=self.page_parts > 1,
        )

    def states(self, is_state: tuple[bool, ...]) -> StateLayers:
        """State layers of these sizes; is_state by layer of the model. Raises `ConfigError`."""
        unit = self.unit(1, 1)
        row = unit.key_dim + unit.num_values * unit.value_dim
        return StateLayers(
            is_state=is_state,
            num_units=self.num_key_heads,
            num_pieces=unit.num_pieces,
            piece_floats=unit.key_dim * unit.columns,
            border_values=NUM_BEFORE * unit.num_channels,
            token_floats=2 * unit.num_values + (row if self.keeps_solved else 0),
            token_values=unit.num_channels + (0 if self.keeps_solved else row),
            pair_floats=0 if self.keeps_solved else unit.num_values,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvConfig:
    """Sizes of a layer. Some of its channels are a unit of its state."""

    field: ClassVar = "conv"
    """See `DeltaConfig`."""
    width: int
    """Tokens that the convolution sees, its own included."""
    hidden_size: int
    """Channels of all units: the model's hidden size, or a rank's share of it."""
    page_parts: int = 1
    """See `StateSizes`."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for sizes that are not served."""
        is_width = type(self.width) is int and 2 <= self.width <= MAX_CONV_WIDTH
        require(is_width, "conv_L_cache", self.width, f"a whole number, 2…{MAX_CONV_WIDTH}")
        is_multiple = self.hidden_size % LEAST_CHANNELS == 0
        require(is_multiple, "hidden_size", self.hidden_size, f"multiples of {LEAST_CHANNELS}")

    @property
    def num_channels(self) -> int:
        """Channels of a unit: fewer in smaller pages."""
        most = max(LEAST_CHANNELS, MOST_CHANNELS // self.page_parts)
        return gcd(self.hidden_size, most)

    @property
    def divided(self) -> dict[str, int]:
        """Numbers of what ranks divide, by name."""
        return {f"groups of {LEAST_CHANNELS} channels": self.hidden_size // LEAST_CHANNELS}

    def solved(self) -> ShortConvConfig:
        """Returns itself: tails of convolutions are inputs, so there is nothing to solve."""
        return self

    def part(self, size: int) -> ShortConvConfig:
        """An equal share of the channels."""
        return replace(
            self, hidden_size=self.hidden_size // size, page_parts=self.page_parts * size
        )

    def states(self, is_state: tuple[bool, ...]) -> StateLayers:
        """State layers of these sizes; is_state by layer of the model. Raises `ConfigError`."""
        return StateLayers(
            is_state=is_state,
            num_units=self.hidden_size // self.num_channels,
            border_values=(self.width - 1) * self.num_channels,
            token_values=self.num_channels,
        )


def check_steps(config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for bounds of the steps of Mamba-2, which are not applied."""
    name = "time_step_limit"
    limits = config.get(name)
    if limits is None:
        return
    is_pair = isinstance(limits, (list, tuple)) and len(limits) == 2
    # transformers writes infinity as text.
    is_open = is_pair and limits[0] == 0 and "inf" in str(limits[1]).lower()
    require(is_open, name, limits, "[0, infinity]")


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig:
    """Sizes of a Mamba-2 layer. Heads of a group have the same keys and queries; some of them are a
    unit of its state."""

    field: ClassVar = "mamba"
    """See `DeltaConfig`."""
    num_heads: int
    head_dim: int
    state_dim: int
    """Size of a key or a query."""
    width: int
    """Tokens that the convolution sees, its own included."""
    num_groups: int = 1
    num_norm_groups: int = 1
    """Equal parts of a token's outputs on all ranks that have a norm each; 0: there is no norm."""
    num_ranks: int = 1
    """Ranks that have an equal share of the layer's heads."""
    keeps_wide: bool = False
    """Whether tails keep keys and values in float32; see `MambaUnit`."""
    page_parts: int = 1
    """See `StateSizes`."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for sizes that are not served."""
        is_count = type(self.num_heads) is int and 1 <= self.num_heads <= MAX_HEADS
        require(is_count, "mamba_n_heads", self.num_heads, f"a whole number, 1…{MAX_HEADS}")
        groups = self.num_groups
        divides = type(groups) is int and groups >= 1 and self.num_heads % groups == 0
        allowed = f"divisors of mamba_n_heads ({self.num_heads})"
        require(divides, "mamba_n_groups", groups, allowed)
        for name, size, sizes in (
            ("mamba_d_head", self.head_dim, MAMBA_HEAD_SIZES),
            ("mamba_d_state", self.state_dim, MAMBA_SIZES),
        ):
            is_size = type(size) is int and size in sizes
            require(is_size, name, size, " or ".join(map(str, sizes)))
        is_width = type(self.width) is int and 2 <= self.width <= MAX_CONV_WIDTH
        require(is_width, "mamba_d_conv", self.width, f"a whole number, 2…{MAX_CONV_WIDTH}")

    @property
    def values_size(self) -> int:
        """Numbers of all heads of a token."""
        return self.num_heads * self.head_dim

    @property
    def keys_size(self) -> int:
        """Numbers of the keys of all groups of a token."""
        return self.num_groups * self.state_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.values_size + 2 * self.keys_size

    @property
    def has_width_norm(self) -> bool:
        """Whether a norm is over the outputs of all heads."""
        return self.num_norm_groups == 1

    @property
    def divided(self) -> dict[str, int]:
        """Numbers of what ranks divide, by name."""
        heads = {"heads of Mamba-2": self.num_heads}
        return heads if self.num_groups == 1 else heads | {"groups of them": self.num_groups}

    def solved(self) -> MambaConfig:
        """The same with tails that keep keys and values in float32."""
        return replace(self, keeps_wide=True)

    def part(self, size: int) -> MambaConfig:
        """An equal share of the heads, with their groups. All ranks have the only group."""
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_groups=max(1, self.num_groups // size),
            num_ranks=size,
            page_parts=self.page_parts * size,
        )

    def unit(self, block_size: int, element_size: int) -> MambaUnit:
        """The layout of a unit for elements of so many bytes. Units in smaller pages have fewer
        heads, since a page has room for a tail."""
        most = max(1, HEADS_OF_UNIT // self.page_parts)
        return MambaUnit(
            num_heads=gcd(self.num_heads // self.num_groups, most),
            head_dim=self.head_dim,
            state_dim=self.state_dim,
            width=self.width,
            block_size=block_size,
            element_size=element_size,
            is_wide=self.keeps_wide,
            has_small_pages=self.page_parts > 1,
        )

    def states(self, is_state: tuple[bool, ...]) -> StateLayers:
        """State layers of these sizes; is_state by layer of the model. Raises `ConfigError`."""
        unit = self.unit(1, 1)
        row = unit.state_dim + unit.values_size
        return StateLayers(
            is_state=is_state,
            num_units=self.num_heads // unit.num_heads,
            num_pieces=unit.num_pieces,
            piece_floats=unit.state_dim * unit.columns,
            border_values=(self.width - 1) * unit.num_channels,
            token_floats=unit.num_heads + (row if self.keeps_wide else 0),
            token_values=unit.num_channels + (0 if self.keeps_wide else row),
        )


StateSizes = DeltaConfig | MambaConfig | ShortConvConfig
"""Sizes of a model's state layers, which are of one kind. `page_parts`: a page is one of so many
parts of one with all heads' keys and values in the model's dtype, as ranks divide heads and an fp8
cache halves bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Multipliers of the parts of a layer, as a model was trained with them. Source: TII,
    "Falcon-H1", 2025."""

    projections: tuple[float, ...]
    """Factors of Mamba-2's gates, values, keys, queries and steps."""
    mamba_in: float
    """Factor of Mamba-2's inputs."""
    mamba_out: float
    attention_out: float
    mlp: tuple[float, ...]
    """Factors of the MLP's gates, and of its outputs."""
