"""Pipeline stages on GPUs of which the first drafts by a model: what they launch is compiled before they launch
anything, and each message of guesses that is sent is received. Kernels are noted, not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from headwater.engine_core.executor import DrawPlan, StepPlan, StepResult
from headwater.engine_core.executors import gpu_stage
from headwater.engine_core.executors.build_cuda import build_cuda_executor
from headwater.engine_core.executors.build_cuda_rank import LoadedRank
from headwater.engine_core.executors.cuda import CudaExecutor
from headwater.engine_core.executors.cuda_drafting import LoadedModel
from headwater.engine_core.executors.cuda_stage import CudaStageExecutor
from headwater.engine_core.executors.gpu_stage import sizes_of
from headwater.engine_core.executors.rank_place import RankPlace
from headwater.engine_core.executors.stage_link import StageLinks
from headwater.engine_core.layers.group import Alone
from headwater.engine_core.layers.staged import stage_weights
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.shards import WHOLE, Stage
from headwater.kernels.stage_memory import StageMemory
from tests.engine_core.parallel import test_rank_compiled_ahead as ranks
from tests.engine_core.parallel.test_rank_compiled_ahead import CPU, DTYPE, REQUEST, SERVED, zeros
from tests.engine_core.test_compiled_ahead import CONFIG, MODEL, Launches, launches, serve_at_random

__all__ = ["launches"]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="puts things in the place of a GPU")

_no_gpu = ranks._no_gpu
LIMITS = replace(CONFIG, num_blocks=200, num_groups=3, async_depth=3)
STAGES = [Stage(0, 2, 4), Stage(2, 3, 4), Stage(3, 4, 4)]


class Stages:
    """See `Executor`: all stages, one after another. The last one's results are those of all."""

    swapper = None
    copies_blocks = can_draft = True
    prefill_seconds = 0.0

    def __init__(self, stages: list[CudaExecutor | CudaStageExecutor]) -> None:
        self._stages = stages

    def _each(self, do: Callable[[CudaExecutor | CudaStageExecutor], Any]) -> Any:
        return [do(stage) for stage in self._stages][-1]

    def submit(self, plan: StepPlan) -> int:
        handle: int = self._each(lambda stage: stage.submit(plan))
        return handle

    def draw(self, plan: DrawPlan) -> int:
        handle: int = self._each(lambda stage: stage.draw(plan))
        return handle

    def retire(self, handle: int) -> StepResult:
        result: StepResult = self._each(lambda stage: stage.retire(handle))
        return result

    def is_ready(self, handle: int) -> bool:
        return True

    def warm_up(self) -> float:
        return 0.0

    def prepare(self) -> bool:
        return bool(self._each(lambda stage: stage.prepare()))


class NotedRelay:
    """See `StageRelay`: notes what it is to move to other hosts, and moves nothing."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.tokens, self.guesses = list[tuple[int, int]](), list[tuple[int, int]]()

    def start(self) -> None:
        assert not self.num_streams, "what is launched before is lost"

    def note_streams(self) -> None:
        self.num_streams += 1

    def note_tokens(self, number: int, num_words: int) -> None:
        self.tokens.append((number, num_words))

    def note_guesses(self, number: int, num_words: int) -> None:
        self.guesses.append((number, num_words))


def stage_of(index: int, relay: Any) -> tuple[CudaExecutor | CudaStageExecutor, StageMemory]:
    layout, last = Decoder.layout(SERVED), len(STAGES) - 1
    memory = StageMemory(
        own=4096 * (index + 1),
        before=4096 * index,
        behind=0 if index == last else 4096 * (index + 2),
        others=torch.zeros(last if index in (0, last) else 0, dtype=torch.int64),
        sizes=sizes_of(LIMITS, SERVED.hidden_size, DTYPE),
    )
    place = RankPlace(
        shard=WHOLE, stage_index=index, stage=STAGES[index], group=Alone(), links=StageLinks(), slots=-1, exchange=-1,
        warn=print,
    )  # fmt: skip
    options = ExecutorOptions(model_folder=None, pipeline_parallel_size=len(STAGES))
    request, weights = (
        replace(REQUEST, options=options),
        stage_weights(zeros(layout, WHOLE), layout, place.stage, DTYPE),
    )
    config = place.local_config(SERVED)
    served = LoadedRank(config, weights, DTYPE, False, request, place, None, Alone(), memory, relay)
    draft = LoadedModel(MODEL, zeros(Decoder.layout(MODEL), WHOLE), DTYPE, False)
    built, _ = build_cuda_executor(
        served,
        LIMITS,
        CPU,
        draft=None if index else draft,
        heads=None,
        stages=memory if index else None,
        kv_cache_memory=0,
        gpu_memory_utilization=0.9,
        is_sized=True,
    )
    return built, memory


@pytest.mark.usefixtures("_no_gpu")
def test_stages_compile_nothing_late_and_receive_and_relay_each_message_of_guesses(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    relays = [NotedRelay() for _ in STAGES]
    built = [stage_of(index, relay) for index, relay in enumerate(relays)]
    ahead, told = set(launches.seen), list[tuple[int, int, int]]()
    for name in ("send_guesses", "receive_guesses"):
        launch = getattr(gpu_stage, name)

        def noted(memory: StageMemory, number: int, steps: torch.Tensor, *more: Any, to: Any = launch) -> None:
            told.append((memory.before // 4096, number, steps.shape[1]))
            to(memory, number, steps, *more)

        monkeypatch.setattr(gpu_stage, name, noted)
    serve_at_random(Stages([stage for stage, _ in built]), LIMITS)  # type: ignore[arg-type]
    late = launches.seen - ahead
    assert not late, "\n".join(sorted(str(each)[:400] for each in late))
    sent = [(number, count) for stage, number, count in told if stage == 0]
    assert [number for number, _ in sent] == list(range(1, len(sent) + 1))
    assert len(sent) > 20
    for later in (1, 2):
        assert [(number, count) for stage, number, count in told if stage == later] == sent
    # Where stages are on other hosts, each stream, each message of tokens and each one of guesses is relayed.
    assert relays[0].num_streams == relays[1].num_streams == relays[2].num_streams > 100
    assert [number for number, _ in relays[2].tokens] == list(range(1, len(relays[2].tokens) + 1))
    assert len(relays[2].tokens) > 100
    assert [relay.guesses for relay in relays[:2]] == [relays[0].guesses] * 2
    assert [number for number, _ in relays[0].guesses] == [number for number, _ in sent]
    sizes = built[0][1].sizes
    assert all(1 < num_words <= sizes.message_len for _, num_words in relays[2].tokens)
    assert all(1 < num_words <= sizes.guesses_len for _, num_words in relays[0].guesses)
