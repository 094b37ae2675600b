"""The hottest prefixes of the prompts that all gateways of a cluster sent last, and the replicas
that hold them."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..request.cluster import Cluster
from ..router.recent_prompts import NUM_RECENT, RecentPrompt
from .gateway_prefixes import Block, GatewayPrefixes, unpacked
from .gateway_survey import GatewaySurvey
from .prefix_tree import prefix_tree

TREE_SECONDS = 2.0
MAX_ASKED = 1024
"""Number of blocks whose holders other gateways are asked for."""
PrefixSurvey = GatewaySurvey[list[Block], GatewayPrefixes]


class ClusterPrefixes:
    def __init__(self, cluster: Cluster, survey: PrefixSurvey) -> None:
        self._cluster = cluster
        self._survey = survey
        self._made_at = 0.0
        self._trees = list[dict[str, Any]]()
        self._shown: list[Block] = []
        """Last blocks of the prefixes in the trees."""

    async def trees(self) -> list[dict[str, Any]]:
        """A tree of each model, of the prompts that were sent last through any gateway; made anew
        every so many seconds for all watchers.

        A replica holds a prefix where the index of one gateway says so. The others are asked for
        the prefixes of the trees before, since an index may be behind.
        """
        now = time.monotonic()
        if now - self._made_at >= TREE_SECONDS:
            self._made_at = now
            reported = await self._survey.gather(self._shown[:MAX_ASKED])
            self._trees = self._grown(youngest(reported), reported_holders(reported))
        return self._trees

    def _grown(
        self, prompts: Sequence[RecentPrompt], reported: Mapping[Block, set[str]]
    ) -> list[dict[str, Any]]:
        self._shown = []
        trees = []
        for model, _ in sorted(
            self._cluster.stages.processors.models().values(), key=lambda each: each[0].name
        ):

            def holders(block: bytes, key: str = model.key) -> list[str]:
                self._shown.append((key, block))
                return sorted(
                    {*self._cluster.router.holders(key, block), *reported.get((key, block), ())}
                )

            own = [each.hashes for each in prompts if each.model_key == model.key]
            nodes = prefix_tree(own, holders)
            trees.append(
                {
                    "model": model.name,
                    "block_size": model.block_size,
                    "num_requests": len(own),
                    "nodes": nodes,
                }
            )
        return trees


def youngest(reported: Iterable[GatewayPrefixes]) -> list[RecentPrompt]:
    """The prompts that were sent last, of all gateways."""
    prompts = itertools.chain.from_iterable(unpacked(each.prompts) for each in reported)
    return heapq.nsmallest(NUM_RECENT, prompts, key=lambda each: each.age)


def reported_holders(reported: Iterable[GatewayPrefixes]) -> Mapping[Block, set[str]]:
    """Replicas that any gateway says to hold a block."""
    found: defaultdict[Block, set[str]] = defaultdict(set)
    for model_key, block, names in itertools.chain.from_iterable(each.held for each in reported):
        found[model_key, block].update(names)
    return found
