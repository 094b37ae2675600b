"""The hottest prefixes of the prompts that were sent last, as a tree of block hashes. Knows no
text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Chain = tuple[bytes, ...]
"""Hashes of a prompt's blocks, each of all blocks up to it."""
Holders = Callable[[bytes], list[str]]
MAX_CHILDREN = 6
MAX_LEVELS = 5
SHOWN_BYTES = 6
"""Leading bytes of a hash, which has sixteen: enough to tell blocks apart on a page."""


def prefix_tree(chains: Iterable[Chain], holders: Holders) -> list[dict[str, Any]]:
    """Prefixes that at least two prompts share, those of most prompts first.

    A node holds the blocks that all its prompts share beyond its parent's; its children are how
    they go on."""
    return _children([chain for chain in chains if chain], 0, MAX_LEVELS, holders)


def _children(
    chains: Sequence[Chain], depth: int, levels: int, holders: Holders
) -> list[dict[str, Any]]:
    if not levels:
        return []
    groups: defaultdict[bytes, list[Chain]] = defaultdict(list)
    for chain in chains:
        if len(chain) > depth:
            groups[chain[depth]].append(chain)
    hottest = sorted(groups.values(), key=len, reverse=True)[:MAX_CHILDREN]
    return [_node(group, depth, levels, holders) for group in hottest if len(group) > 1]


def _node(group: Sequence[Chain], depth: int, levels: int, holders: Holders) -> dict[str, Any]:
    end = min(_shared(group[0], chain, depth) for chain in group)
    last = group[0][end - 1]
    return {
        "hash": last[:SHOWN_BYTES].hex(),
        "num_blocks": end - depth,
        "depth": end,
        "num_requests": len(group),
        "holders": holders(last),
        "children": _children(group, end, levels - 1, holders),
    }


def _shared(one: Chain, other: Chain, depth: int) -> int:
    """Number of blocks that two chains share, which share the one at `depth`.

    NOTE: a block's hash names all blocks before it, so that the place where two chains part is
    found by halving.
    """
    low = depth + 1
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
