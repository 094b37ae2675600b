"""Which layers of a model share pages of the KV cache, and where in a page each layer lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from .model_config import ModelConfig

MOST_PADDING = Fraction(4, 100)
"""Share of a cache's bytes that pages of short groups leave unused, at most."""


STATES = -1
"""Stands for a page group at state layers, which have no pages of their own."""


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Page groups of a model; see `page_groups`."""

    windows: tuple[int, ...]
    """Window of each page group; 0: its layers see all keys."""
    num_layers: int
    """Layers that a page has room for."""
    places: tuple[tuple[int, int], ...]
    """Page group of each layer, and its place in the page. Of a state layer: `STATES`, and its
    first unit among those of all state layers."""

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def described(self) -> str:
        """Pages by window, for a log; empty where there is one group that keeps all."""
        if self.windows == (0,):
            return ""
        parts = [
            f"{count} of {window} tokens" if window else f"{count} of all tokens"
            for window, count in sorted(Counter(self.windows).items())
        ]
        return f", page groups: {', '.join(parts)}, {self.num_layers} layers each"

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Page group of each layer, of a state layer any; empty: there is one."""
        return tuple(max(group, 0) for group, _ in self.places) if self.num_groups > 1 else ()


def plan_pages(model: ModelConfig, max_model_len: int) -> PagePlan:
    """Page groups by the windows of a model's layers, as few as leave little of a page unused."""
    # A window of one position needs no cache, and is not worth a case of its own. One that no
    # sequence exceeds hides nothing.
    hides = 1 < model.sliding_window < max_model_len
    layers = range(model.num_layers)
    windows = {i: model.window_of(i) if hides else 0 for i in layers if not model.has_state(i)}
    counts = Counter(windows.values())
    num_layers = _layers_of_page(counts)
    first_groups: dict[int, int] = {}
    of_groups: list[int] = []
    for window in sorted(counts):
        first_groups[window] = len(of_groups)
        of_groups += [window] * -(-counts[window] // num_layers)
    seen = Counter[int]()
    places = {}
    for i, window in windows.items():
        group, place = divmod(seen[window], num_layers)
        places[i] = first_groups[window] + group, place
        seen[window] += 1
    return PagePlan(tuple(of_groups), num_layers, _with_states(model, places))


def one_group(model: ModelConfig) -> PagePlan:
    """All layers of a model with keys and values in one page, which keeps every block."""
    layers = (i for i in range(model.num_layers) if not model.has_state(i))
    places = {layer: (0, place) for place, layer in enumerate(layers)}
    return PagePlan((0,), model.num_kv_layers, _with_states(model, places))


def _with_states(
    model: ModelConfig, places: Mapping[int, tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Places of all layers, from those of the layers with keys and values."""
    first_units = (0,) * model.num_layers if model.states is None else model.states.first_units
    return tuple(places.get(i, (STATES, first_unit)) for i, first_unit in enumerate(first_units))


def _layers_of_page(counts: Counter[int]) -> int:
    """The largest number of layers whose pages leave little unused, by numbers of layers of a
    kind."""
    total = counts.total()
    return next(
        size
        for size in range(max(counts.values()), 0, -1)
        if size * sum(-(-count // size) for count in counts.values()) <= total * (1 + MOST_PADDING)
    )
