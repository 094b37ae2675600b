"""Published routing policies as formulas, to be measured beside our own; see docs/routing.md for their sources.

Each sees more than it would in the field: the caches as they are, and counts without delay. Knows nothing of time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headwater.bench.routing_traces import BLOCK_SIZE, Arrival
from headwater.gateway.router import home


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """A replica as a policy sees it."""

    replica_id: str
    num_matched: int
    """Blocks of the prompt that are cached there."""
    num_requests: int
    """Sent there and not over."""
    num_waiting: int
    """Of these, whose prompts are not computed yet."""
    num_prefill_tokens: int
    """Of their prompts, not cached."""
    num_active_blocks: int
    """That its requests hold, shared ones counted once."""
    num_new_blocks: int
    """That the request would add to them."""
    num_blocks: int
    """Its cache."""


class Rule(Protocol):
    def __call__(self, arrival: Arrival, seen: Sequence[Sight]) -> int:
        """The place, among those seen, of the replica that gets the request."""


def round_robin(arrival: Arrival, seen: Sequence[Sight]) -> int:
    return arrival.number % len(seen)


def least_requests(arrival: Arrival, seen: Sequence[Sight]) -> int:
    return _best(arrival, [-each.num_requests for each in seen])


def consistent_hash(arrival: Arrival, seen: Sequence[Sight]) -> int:
    """Of the prompt's first blocks, whatever the load."""
    ids = [each.replica_id for each in seen]
    return ids.index(home.by_distance(home.prefix_of(arrival.hashes), ids)[0])


def linear_blocks(arrival: Arrival, seen: Sequence[Sight]) -> int:
    """Dynamo's KV router at its defaults: blocks to prefill there, this request's included, and blocks to decode."""

    def cost(each: Sight) -> float:
        uncached = arrival.num_prompt_tokens - each.num_matched * BLOCK_SIZE
        to_prefill = (each.num_prefill_tokens + uncached) / BLOCK_SIZE
        return to_prefill + each.num_active_blocks + each.num_new_blocks

    return _best(arrival, [-cost(each) for each in seen])


def weighted_scores(arrival: Arrival, seen: Sequence[Sight]) -> int:
    """llm-d's scheduler with its usual weights: cached share twice, queue and free memory once each."""
    waiting = [each.num_waiting for each in seen]
    shortest, longest = min(waiting), max(waiting)

    def score(each: Sight) -> float:
        prefix = each.num_matched / max(1, len(arrival.hashes))
        queue = (longest - each.num_waiting) / (longest - shortest) if longest > shortest else 1.0
        free = 1 - min(1.0, each.num_active_blocks / each.num_blocks)
        return 2 * prefix + queue + free

    return _best(arrival, [score(each) for each in seen])


class Thresholds:
    """The cache-aware policy of SGLang's router at its defaults: the longest match in trees of what was sent, if it is
    long enough and load is balanced; else the smallest tree, or the fewest requests."""

    CACHE, ABSOLUTE, RELATIVE = 0.3, 64, 1.5
    MAX_BLOCKS = (1 << 26) // 4 // BLOCK_SIZE
    """Of a tree, which is limited to 2^26 characters, four a token."""

    def __init__(self) -> None:
        self._trees: dict[str, OrderedDict[bytes, None]] = {}

    def __call__(self, arrival: Arrival, seen: Sequence[Sight]) -> int:
        loads = [each.num_requests for each in seen]
        trees = [self._trees.setdefault(each.replica_id, OrderedDict()) for each in seen]
        matches = [_matched(arrival.hashes, tree) for tree in trees]
        if max(loads) - min(loads) > self.ABSOLUTE and max(loads) > self.RELATIVE * min(loads):
            place = loads.index(min(loads))
        elif max(matches) > self.CACHE * len(arrival.hashes):
            place = matches.index(max(matches))
        else:
            sizes = [len(tree) for tree in trees]
            place = sizes.index(min(sizes))
        self._note(trees[place], arrival.hashes)
        return place

    def _note(self, tree: OrderedDict[bytes, None], hashes: Sequence[bytes]) -> None:
        for block in reversed(hashes):
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) > self.MAX_BLOCKS:
            tree.popitem(last=False)


def _matched(hashes: Sequence[bytes], tree: OrderedDict[bytes, None]) -> int:
    return next((length for length, block in enumerate(hashes) if block not in tree), len(hashes))


def _best(arrival: Arrival, scores: Sequence[float]) -> int:
    """The highest; between equals each in turn."""
    places = [place for place, score in enumerate(scores) if score == max(scores)]
    return places[arrival.number % len(places)]


RULES: dict[str, Callable[[], Rule]] = {
    "round robin": lambda: round_robin,
    "least requests": lambda: least_requests,
    "consistent hash": lambda: consistent_hash,
    "linear blocks (Dynamo)": lambda: linear_blocks,
    "weighted scores (llm-d)": lambda: weighted_scores,
    "thresholds (SGLang)": Thresholds,
}
"""How each is made."""
