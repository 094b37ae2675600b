"""An engine whose ranks are threads of this process, so that a test reaches into each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from headwater.engine_core.devices import cpu
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import DrawPlan, StepPlan, StepResult
from headwater.engine_core.executors.build.eager import build_eager
from headwater.engine_core.executors.build.request import checked
from headwater.engine_core.executors.ranks.rank import Rank, stages_of
from headwater.engine_core.executors.ranks.stage_link import StageLinks, links_in_host
from headwater.engine_core.executors.step_executor import StepExecutor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.parallel.memory_group import MemoryGroup, create_group
from headwater.engine_core.parallel.rank_waits import RankWaits
from headwater.engine_core.parallel.stage_rings import create_stage_rings
from headwater.engine_core.system.ring import anonymous_memory
from headwater.engine_core.weights.shards import ParallelLayout
from tests.engine_core.small_models import SmallEngine


class ThreadExecutor:
    """See `Executor`. All ranks of a stage have the same results and the same tokens in their
    tables, or a step raises. Stages compute a step one after another."""

    swapper = None
    copies_blocks = computes_at_once = True
    prefill_seconds = 0.0

    def __init__(self, options: ExecutorOptions) -> None:
        request = checked(options, "cpu", cpu.capabilities)
        layout = options.layout
        slots = anonymous_memory("slots", 0)
        stages = stages_of(request)
        ends = [end for _ in stages for end in create_group(layout.tensor)]
        self._groups = [MemoryGroup(rank % layout.tensor, end) for rank, end in enumerate(ends)]
        self._speaker = layout.speaker
        self._size = layout.tensor
        # A thread begins with as many threads of its own as there are cores, for which weights are
        # packed otherwise.
        own = {"initializer": torch.set_num_threads, "initargs": (1,)}
        self._threads = [ThreadPoolExecutor(1, **own) for _ in ends]
        ranks = [
            Rank(
                shard=layout.shard(rank),
                stage_index=layout.stage_index(rank),
                stage=stages[layout.stage_index(rank)],
                group=group,
                links=links,
                slots=slots,
                exchange=-1,
                adapters=-1,
                warn=print,
            )
            for rank, (group, links) in enumerate(zip(self._groups, links_of(layout), strict=True))
        ]
        built = self._each(
            lambda rank: build_eager(cpu, request, ranks[rank], lambda phase, done, total: None)
        )
        os.close(slots)
        [self.config] = {config for _, config in built}
        self.ranks: list[StepExecutor[Any, Any]] = [rank for rank, _ in built]
        self.can_draft = all(rank.can_draft for rank in self.ranks)
        self._done: list[StepResult] = []

    def submit(self, plan: StepPlan) -> int:
        self._note(self._each(lambda rank: _computed(self.ranks[rank], plan)))
        return plan.step

    def draw(self, plan: DrawPlan) -> int:
        self._note(self._each(lambda rank: _computed(self.ranks[rank], plan)))
        return plan.step

    def retire(self, handle: int) -> StepResult:
        return self._done.pop(0)

    def is_ready(self, handle: int) -> bool:
        return True

    def warm_up(self) -> float:
        return max(self._each(lambda rank: self.ranks[rank].warm_up()))

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        for thread, group in zip(self._threads, self._groups, strict=True):
            thread.shutdown()
            group.close()

    def _each(self, work: Callable[[int], Any]) -> list[Any]:
        waiting = [thread.submit(work, rank) for rank, thread in enumerate(self._threads)]
        return [each.result(60) for each in waiting]

    def _note(self, results: list[StepResult]) -> None:
        for rank, other in enumerate(results):
            first = rank // self._size * self._size
            assert other.token_ids.tolist() == results[first].token_ids.tolist(), rank
            assert other.num_tokens.tolist() == results[first].num_tokens.tolist(), rank
            assert torch.equal(_tokens(self.ranks[rank]), _tokens(self.ranks[first])), (
                "drafts differ"
            )
        self._done.append(results[self._speaker])


def _computed(rank: StepExecutor[Any, Any], plan: StepPlan | DrawPlan) -> StepResult:
    return rank.retire(rank.submit(plan) if isinstance(plan, StepPlan) else rank.draw(plan))


def _tokens(rank: StepExecutor[Any, Any]) -> torch.Tensor:
    """The token table of a rank."""
    token_ids: torch.Tensor = rank._entry._table.token_ids
    return token_ids


def links_of(layout: ParallelLayout) -> list[StageLinks]:
    """The links of each rank, as its process makes them."""
    return [
        links_in_host(rings, layout.stage_index(rank), layout.pipeline, RankWaits())
        for rank, rings in enumerate(create_stage_rings(layout))
    ]


class ThreadEngine(SmallEngine):
    """See `SmallEngine`."""

    def __init__(self, folder: Path, **options: Any) -> None:
        given = {
            "num_threads": 1,
            "num_blocks": 600,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 64,
        } | options
        self.ranks = ThreadExecutor(ExecutorOptions(model_folder=folder, **given))
        self.executor = self.ranks
        self.config = self.ranks.config
        self.engine = Engine(self.config, self.executor)
        self._link = None
        self._num_asked = 0
