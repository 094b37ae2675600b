"""The prompts that one gateway sent last, packed to travel to another, and the replicas that hold
some blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ..request.cluster import Cluster
from ..router.recent_prompts import RecentPrompt
from ..router.router import HASH_LEN

MAX_HASHES = 16_384
"""Hashes of one gateway's answer. Prompts beyond that are left out, the oldest first: where so many
blocks differ, none is hot."""
Block = tuple[str, bytes]
"""Key of a model, and the hash of a block of its cache."""


class PackedPrompt(msgspec.Struct, array_like=True):
    model_key: str
    age: float
    """Seconds since it was sent."""
    parent: int
    """Index of the earlier prompt in the reply that begins with the same blocks."""
    num_shared: int
    """Number of blocks that it shares with that prompt; 0: no earlier prompt shares any."""
    hashes: bytes
    """Hashes of the blocks behind the shared ones, concatenated."""


class GatewayPrefixes(msgspec.Struct):
    prompts: list[PackedPrompt]
    """Youngest first."""
    held: list[tuple[str, bytes, list[str]]]
    """The blocks that were asked for, with the ids of the replicas that hold them by this gateway's
    index."""


def read_prefixes(cluster: Cluster, blocks: Sequence[Block]) -> GatewayPrefixes:
    """Prompts that this gateway has sent, and the replicas that hold `blocks` by its index."""
    router = cluster.router
    held = [(*block, router.holders(*block)) for block in blocks]
    return GatewayPrefixes(list(packed(router.dispatches.recent_prompts())), held)


def packed(prompts: Iterable[RecentPrompt]) -> Iterator[PackedPrompt]:
    """Each prompt as the beginning of an earlier one and what follows it.

    NOTE: a hash names all blocks before it, so that two prompts with one hash in common are equal
    up to there.
    """
    owners: defaultdict[str, dict[bytes, int]] = defaultdict(dict)
    num_hashes = 0
    for number, prompt in enumerate(prompts):
        known = owners[prompt.model_key]
        hashes = prompt.hashes
        num_shared = bisect_left(
            range(len(hashes)), True, key=lambda place: hashes[place] not in known
        )
        new = hashes[num_shared:]
        num_hashes += len(new)
        if num_hashes > MAX_HASHES:
            return
        parent = known[hashes[num_shared - 1]] if num_shared else 0
        known |= dict.fromkeys(new, number)
        yield PackedPrompt(prompt.model_key, prompt.age, parent, num_shared, b"".join(new))


def unpacked(prompts: Iterable[PackedPrompt]) -> Iterator[RecentPrompt]:
    """The reverse of `packed`. Stops at a prompt that shares blocks with none that came before."""
    chains: list[tuple[bytes, ...]] = []
    for prompt in prompts:
        if prompt.num_shared and not 0 <= prompt.parent < len(chains):
            return
        shared = chains[prompt.parent][: prompt.num_shared] if prompt.num_shared else ()
        new = [
            prompt.hashes[start : start + HASH_LEN]
            for start in range(0, len(prompt.hashes), HASH_LEN)
        ]
        chains.append((*shared, *new))
        yield RecentPrompt(prompt.model_key, chains[-1], prompt.age)
