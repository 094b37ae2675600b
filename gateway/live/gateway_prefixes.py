"""The prompts that one gateway sent last, packed to travel to another, and the replicas that hold some blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ..request.cluster import Cluster
from ..router.recent_prompts import RecentPrompt
from ..router.router import HASH_LEN

MAX_HASHES = 16_384
"""Hashes of one gateway's answer. Prompts beyond that are left out, the oldest first: where so many blocks differ, none
is hot."""
Block = tuple[str, bytes]
"""Key of a model, and the hash of a block of its cache."""


class PackedPrompt(msgspec.Struct, array_like=True):
    model_key: str
    age: float
    """Seconds since it was sent."""
    parent: int
    """Number of the hash that `hashes` follow, counted over all prompts before; -1: none."""
    hashes: bytes
    """Hashes that no prompt before has, one after another."""


class GatewayPrefixes(msgspec.Struct):
    prompts: list[PackedPrompt]
    """Youngest first."""
    held: list[tuple[str, bytes, list[str]]]
    """The blocks that were asked for, with the ids of the replicas that hold them by this gateway's index."""


def read_prefixes(cluster: Cluster, blocks: Sequence[Block]) -> GatewayPrefixes:
    """What this gateway has sent, and who holds `blocks` by what engines have told it."""
    router = cluster.router
    held = [(*block, router.holders(*block)) for block in blocks]
    return GatewayPrefixes(list(packed(router.recent_prompts())), held)


def packed(prompts: Iterable[RecentPrompt]) -> Iterator[PackedPrompt]:
    """NOTE: a hash names all blocks before it, so that a prompt is one hash that came before and what follows it."""
    numbers: defaultdict[str, dict[bytes, int]] = defaultdict(dict)
    count = 0
    for prompt in prompts:
        known, hashes = numbers[prompt.model_key], prompt.hashes
        num_known = bisect_left(range(len(hashes)), True, key=lambda place: hashes[place] not in known)
        new = hashes[num_known:]
        if count + len(new) > MAX_HASHES:
            return
        parent = known[hashes[num_known - 1]] if num_known else -1
        known |= {block: count + i for i, block in enumerate(new)}
        count += len(new)
        yield PackedPrompt(prompt.model_key, prompt.age, parent, b"".join(new))


def unpacked(prompts: Iterable[PackedPrompt]) -> Iterator[RecentPrompt]:
    """The reverse of `packed`. Stops at a prompt whose parent did not come before."""
    places: list[tuple[tuple[bytes, ...], int]] = []
    """Of each hash a prompt that has it, and its place there."""
    for prompt in prompts:
        if prompt.parent >= len(places):
            return
        chain, place = places[prompt.parent] if prompt.parent >= 0 else ((), -1)
        new = [prompt.hashes[start : start + HASH_LEN] for start in range(0, len(prompt.hashes), HASH_LEN)]
        hashes = (*chain[: place + 1], *new)
        places += [(hashes, each) for each in range(place + 1, len(hashes))]
        yield RecentPrompt(prompt.model_key, hashes, prompt.age)
