"""Published routing policies as formulas, each with the source that it was checked against.

Each sees more than it would in production: the caches as they are, and counts without delay. Knows
nothing about time.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headwater.gateway.router import rendezvous
from tests.simulation.routing_traces import BLOCK_SIZE, Arrival


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A replica as a policy sees it."""

    replica_id: str
    num_matched: int
    """Number of the prompt's blocks that are cached there."""
    num_requests: int
    """Number of requests that were sent there and are not over."""
    num_waiting: int
    """Number of these whose prompts are not computed yet."""
    num_prefill_tokens: int
    """Number of tokens of their prompts that are not cached."""
    num_active_blocks: int
    """Number of blocks that its requests hold, shared ones counted once."""
    num_new_blocks: int
    """Number of blocks that the request would add to them."""
    num_blocks: int
    """Number of blocks in its cache."""


class Rule(Protocol):
    def __call__(self, arrival: Arrival, seen: Sequence[Sight]) -> int:
        """Index, among the replicas, of the one that gets the request."""


def round_robin(arrival: Arrival, seen: Sequence[Sight]) -> int:
    return arrival.number % len(seen)


def least_requests(arrival: Arrival, seen: Sequence[Sight]) -> int:
    return _best(arrival, [-each.num_requests for each in seen])


def consistent_hash(arrival: Arrival, seen: Sequence[Sight]) -> int:
    """Index by a consistent hash of the prompt's first blocks, whatever the load."""
    ids = [each.replica_id for each in seen]
    return ids.index(rendezvous.by_distance(rendezvous.prefix_of(arrival.hashes), ids)[0])


def linear_blocks(arrival: Arrival, seen: Sequence[Sight]) -> int:
    """Dynamo's KV router at its defaults (overlap credit and prefill scale 1, temperature 0: the
    lowest cost wins).

    The cost is the number of blocks to prefill there, this request's included and less those it
    finds, and of blocks to decode with it there. ai-dynamo/dynamo 07a6c9c,
    lib/kv-router/src/scheduling/selector/default.rs.
    """

    def cost(each: Sight) -> float:
        uncached = arrival.num_prompt_tokens - each.num_matched * BLOCK_SIZE
        to_prefill = (each.num_prefill_tokens + uncached) / BLOCK_SIZE
        return to_prefill + each.num_active_blocks + each.num_new_blocks

    return _best(arrival, [-cost(each) for each in seen])


def share_of_prompt(arrival: Arrival, seen: Sequence[Sight]) -> list[float]:
    """Share of the prompt's blocks that are cached there: `prefix-cache-scorer` (llm-d/llm-d-router
    b364753)."""
    return [each.num_matched / max(1, len(arrival.hashes)) for each in seen]


def among_holders(arrival: Arrival, seen: Sequence[Sight]) -> list[float]:
    """Score from 0 for the shortest match to 1 for the longest, among replicas with a match; 1
    where these are equal.

    `precise-prefix-cache-scorer` (llm-d/llm-d-inference-scheduler 2202f3c,
    pkg/plugins/scorer/utils.go).
    """
    found = [each.num_matched for each in seen if each.num_matched]
    low = min(found, default=0)
    high = max(found, default=0)
    if low == high:
        return [float(each.num_matched > 0) for each in seen]
    return [max(0.0, (each.num_matched - low) / (high - low)) for each in seen]


class WeightedScores:
    """llm-d's scheduler: scores of cached prefix, queue and free memory, each from 0 to 1, by
    weight; the most wins.

    Queue and memory: kubernetes-sigs/gateway-api-inference-extension 02308be,
    pkg/epp/scheduling/framework/plugins.
    """

    def __init__(
        self,
        prefix: Callable[[Arrival, Sequence[Sight]], list[float]],
        weights: tuple[int, int, int],
    ):
        """`weights` are those of prefix, queue and memory."""
        self._prefix = prefix
        self._weights = weights

    def __call__(self, arrival: Arrival, seen: Sequence[Sight]) -> int:
        waiting = [each.num_waiting for each in seen]
        shortest = min(waiting)
        longest = max(waiting)
        queue = [
            (longest - each) / (longest - shortest) if longest > shortest else 1.0
            for each in waiting
        ]
        free = [1 - min(1.0, each.num_active_blocks / each.num_blocks) for each in seen]
        rows = zip(self._prefix(arrival, seen), queue, free, strict=True)
        return _best(arrival, [sum(map(operator.mul, self._weights, row)) for row in rows])


class Thresholds:
    """SGLang's gateway, cache-aware, at its defaults: the replica with the longest match among
    earlier prompts, if it is long enough and load is balanced; else the one with the fewest
    requests. It sees no caches, only the prompts that it sent.

    sgl-project/sglang 053b63f, sgl-model-gateway/src/policies/cache_aware.rs and tree.rs (03744db);
    defaults as in its router_args.py. Until December 2025 a miss went to the smallest tree instead:
    `on_miss`.
    """

    CACHE = 0.3
    ABSOLUTE = 64
    RELATIVE = 1.5
    MAX_BLOCKS = (1 << 26) // 4 // BLOCK_SIZE
    """Largest number of a replica's blocks in the tree, which is limited to 2^26 characters, four a
    token."""

    def __init__(
        self, on_miss: Literal["fewest requests", "smallest tree"] = "fewest requests"
    ) -> None:
        self._on_miss = on_miss
        self._sent: dict[str, OrderedDict[bytes, None]] = {}
        """Blocks by replica, least recently used first."""
        self._owners: dict[bytes, dict[str, None]] = {}
        """Replicas by block, the first to get it first: the block's node belongs to that one while
        it has the block."""

    def __call__(self, arrival: Arrival, seen: Sequence[Sight]) -> int:
        ids = [each.replica_id for each in seen]
        loads = [each.num_requests for each in seen]
        length = next(
            (at for at, block in enumerate(arrival.hashes) if block not in self._owners),
            len(arrival.hashes),
        )
        if max(loads) - min(loads) > self.ABSOLUTE and max(loads) > self.RELATIVE * min(loads):
            place = loads.index(min(loads))
        elif length * BLOCK_SIZE > self.CACHE * arrival.num_prompt_tokens:
            place = ids.index(next(iter(self._owners[arrival.hashes[length - 1]])))
        else:
            sizes = (
                loads
                if self._on_miss == "fewest requests"
                else [len(self._sent.get(each, ())) for each in ids]
            )
            place = sizes.index(min(sizes))
        self._note(ids[place], arrival.hashes)
        return place

    def _note(self, replica_id: str, hashes: Sequence[bytes]) -> None:
        sent = self._sent.setdefault(replica_id, OrderedDict())
        for block in reversed(hashes):
            sent[block] = None
            sent.move_to_end(block)
            self._owners.setdefault(block, {})[replica_id] = None
        while len(sent) > self.MAX_BLOCKS:
            block, _ = sent.popitem(last=False)
            del self._owners[block][replica_id]
            if not self._owners[block]:
                del self._owners[block]


def _best(arrival: Arrival, scores: Sequence[float]) -> int:
    """Index of the highest score; each in turn between equals."""
    places = [place for place, score in enumerate(scores) if score == max(scores)]
    return places[arrival.number % len(places)]


RULES: dict[str, Callable[[], Rule]] = {
    "round robin": lambda: round_robin,
    "least requests": lambda: least_requests,
    "consistent hash": lambda: consistent_hash,
    "linear blocks (Dynamo)": lambda: linear_blocks,
    "weighted scores 2:1:1 (llm-d)": lambda: WeightedScores(share_of_prompt, (2, 1, 1)),
    "weighted scores 3:2:2 (llm-d)": lambda: WeightedScores(share_of_prompt, (3, 2, 2)),
    "among holders 3:2:2 (llm-d)": lambda: WeightedScores(among_holders, (3, 2, 2)),
    "thresholds (SGLang)": Thresholds,
    "thresholds, smallest tree (SGLang)": lambda: Thresholds(on_miss="smallest tree"),
}
"""Constructors of the policies, by name."""
