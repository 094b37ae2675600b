"""Which layers of a model share pages of the KV cache, and where in a page each layer lies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from .model_config import ModelConfig

MOST_PADDING = Fraction(4, 100)
"""Largest share of a cache's bytes that may stay unused because groups have fewer layers than a
page has room for."""


STATES = -1
"""Stands for a page group at state layers, which have no pages of their own."""


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Page groups of a model; see `page_groups`."""

    windows: tuple[int, ...]
    """Window of each page group; 0: its layers see all keys."""
    num_layers: int
    """Layers that a page has room for, of the size of a place."""
    places: tuple[tuple[int, int], ...]
    """Page group of each layer, and the first of its places in the page. Of a state layer:
    `STATES`, and its first unit among those of all state layers."""
    place_width: int = 0
    """Values of a token's keys in one unit of a page, where layers have keys of several shapes; 0:
    all keys have one shape, and each layer takes one unit."""

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def filled_places(self, model: ModelConfig) -> list[int]:
        """Places of a page of each page group that layers of the model have."""
        sizes = _places_of(model)[1]
        taken = dict(zip(self.places, sizes, strict=True))
        filled = [0] * self.num_groups
        for (group, _), size in taken.items():
            if group != STATES:
                filled[group] += size
        return filled

    @property
    def described(self) -> str:
        """Numbers of pages by window, for a log; empty with a single group that keeps all
        blocks."""
        if self.windows == (0,):
            return ""
        parts = [
            f"{count} of {window} tokens" if window else f"{count} of all tokens"
            for window, count in sorted(Counter(self.windows).items())
        ]
        held = f"{self.num_layers} layers"
        if self.place_width:
            held = f"{self.num_layers * self.place_width} numbers of a token's keys"
        return f", page groups: {', '.join(parts)}, {held} each"

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Page group of each layer, of a state layer any; empty: there is one."""
        return tuple(max(group, 0) for group, _ in self.places) if self.num_groups > 1 else ()


def plan_pages(model: ModelConfig, max_model_len: int) -> PagePlan:
    """Page groups by the windows and sizes of a model's layers, as few as leave little of a page
    unused."""
    # A window of one position needs no cache, and is not worth a special case. A window of at least
    # `max_model_len` has no effect.
    hides = 1 < model.sliding_window < max_model_len
    layers = model.caching_layers
    windows = {i: model.window_of(i) if hides else 0 for i in layers}
    if len({*windows.values()}) == 1:
        return replace(one_group(model), windows=(windows[layers[0]],))
    width, sizes = _places_of(model)
    kinds = {i: (windows[i], sizes[i]) for i in layers}
    counts = Counter(kinds.values())
    num_places = _places_of_page(counts)
    first_groups: dict[_Kind, int] = {}
    of_groups: list[int] = []
    for kind in sorted(counts):
        window, size = kind
        first_groups[kind] = len(of_groups)
        of_groups += [window] * -(-counts[kind] // (num_places // size))
    seen = Counter[_Kind]()
    places: dict[int, tuple[int, int]] = {}
    for i in model.caching_layers:
        kind = kinds[i]
        group, place = divmod(seen[kind], num_places // kind[1])
        places[i] = first_groups[kind] + group, place * kind[1]
        seen[kind] += 1
    return PagePlan(tuple(of_groups), num_places, _with_states(model, places), width)


def one_group(model: ModelConfig) -> PagePlan:
    """Plan with one group: a page holds keys and values of all layers, and every block is kept."""
    width, sizes = _places_of(model)
    places: dict[int, tuple[int, int]] = {}
    num_places = 0
    for i in model.caching_layers:
        places[i] = 0, num_places
        num_places += sizes[i]
    return PagePlan((0,), num_places, _with_states(model, places), width)


_Kind = tuple[int, int]
"""Window and places of a layer."""


def _with_states(
    model: ModelConfig, places: Mapping[int, tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Units of all layers, from those of the layers with keys and values of their own. Layers that
    share those of another layer have its units."""
    first_units = (0,) * model.num_layers if model.states is None else model.states.first_units
    return tuple(
        places.get(model.kv_layer(i), (STATES, first_unit))
        for i, first_unit in enumerate(first_units)
    )


def _places_of(model: ModelConfig) -> tuple[int, list[int]]:
    """Size of the unit in which pages are divided among layers, and the number of units of each
    layer; 0 and one each where keys of all layers have one shape."""
    shaped = [model.at(i) for i in range(model.num_layers)]
    if len({(each.num_kv_heads, each.head_dim) for each in shaped}) == 1:
        return 0, [1] * model.num_layers
    widths = [each.kv_width for each in shaped]
    width = math.gcd(*widths)
    return width, [each // width for each in widths]


def _places_of_page(counts: Counter[_Kind]) -> int:
    """The largest number of units in a page that leaves little unused, by numbers of layers of each
    kind; the one that leaves least where all leave more."""
    total = sum(count * size for (_, size), count in counts.items())
    largest = max(size for _, size in counts)

    def taken(num_places: int) -> int:
        return num_places * sum(
            -(-count // (num_places // size)) for (_, size), count in counts.items()
        )

    sizes = range(max(count * size for (_, size), count in counts.items()), largest - 1, -1)
    fitting = (size for size in sizes if taken(size) <= total * (1 + MOST_PADDING))
    return next(fitting, min(sizes, key=taken))
