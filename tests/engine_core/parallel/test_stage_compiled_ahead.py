"""Pipeline stages on GPUs: what each launches is compiled before any launches anything, and each
message that is sent is relayed. Kernels are noted, not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import DrawPlan, StepPlan, StepResult
from headwater.engine_core.executors.build.cuda import build_cuda_executor
from headwater.engine_core.executors.build.cuda_rank import LoadedRank
from headwater.engine_core.executors.device.step_shapes import StepShape
from headwater.engine_core.executors.exit import cuda_send
from headwater.engine_core.executors.exit.stage_messages import NO_STAGE
from headwater.engine_core.executors.exit.token_messages import MessageNumbers
from headwater.engine_core.executors.model.device_model import DeviceModel
from headwater.engine_core.executors.ranks.gpu_stage import sizes_of
from headwater.engine_core.executors.ranks.host_stages import HostStages
from headwater.engine_core.executors.ranks.rank import Rank
from headwater.engine_core.executors.ranks.stage_link import StageLinks
from headwater.engine_core.executors.step_executor import StepExecutor
from headwater.engine_core.layers.process_group import Alone
from headwater.engine_core.layers.staged import stage_weights
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.weights.page_plan import one_group
from headwater.engine_core.weights.shards import WHOLE, Stage
from headwater.kernels.stage.stage_memory import StageMemory
from tests.engine_core.parallel import test_rank_compiled_ahead as ranks
from tests.engine_core.parallel.test_rank_compiled_ahead import CPU, DTYPE, REQUEST, SERVED, zeros
from tests.engine_core.test_compiled_ahead import CONFIG, Launches, launches, serve_at_random

__all__ = ["launches"]
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="puts things in the place of a GPU"
)

_no_gpu = ranks._no_gpu
LIMITS = replace(CONFIG, num_blocks=200, num_groups=3, async_depth=3)
STAGES = [Stage(0, 2, 4), Stage(2, 3, 4), Stage(3, 4, 4)]


class Stages:
    """See `Executor`: all stages, one after another. The last one's results are those of all. What
    each launches is noted apart: in their own processes a stage finds nothing that another has
    compiled."""

    swapper = None
    copies_blocks = can_draft = True
    computes_at_once = False
    prefill_seconds = 0.0

    def __init__(self, stages: list[StepExecutor[Any, Any]], launches: Launches) -> None:
        self._stages = stages
        self._launches = launches
        self.launched: list[set[tuple[object, ...]]] = [set() for _ in stages]

    def _each(self, do: Callable[[StepExecutor[Any, Any]], Any]) -> Any:
        found = None
        for stage, launched in zip(self._stages, self.launched, strict=True):
            self._launches.seen = launched
            found = do(stage)
        return found

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


class NotedLink:
    """See `Sender` and `Receiver`: notes shapes of tensors, and moves nothing."""

    def __init__(self) -> None:
        self.shapes = list[tuple[int, ...]]()

    def send(self, tensor: torch.Tensor) -> None:
        assert tensor.is_contiguous()
        self.shapes.append(tuple(tensor.shape))

    def post(self, tensor: torch.Tensor) -> Callable[[], None]:
        return partial(self.send, tensor)


class NotedLinks:
    """Links of one stage with stages on other hosts, each of which notes what it moves."""

    def __init__(self, index: int) -> None:
        last = len(STAGES) - 1
        self.stream_in, self.stream_out, self.tokens_in, self.tokens_out = (
            NotedLink() for _ in range(4)
        )
        links = StageLinks(
            stage=index,
            num_stages=len(STAGES),
            stream_in=self.stream_in if index else NO_STAGE,
            stream_out=self.stream_out if index < last else NO_STAGE,
            tokens_in=self.tokens_in if index < last else NO_STAGE,
            tokens_out=[self.tokens_out] if index == last else (),
        )
        sizes = sizes_of(LIMITS, SERVED.hidden_size, DTYPE)
        most_tokens = sizes.stream_bytes // (SERVED.hidden_size * DTYPE.itemsize)
        self.hosts = HostStages(
            links,
            replace(sizes, stream_bytes=0, num_messages=1),
            torch.zeros(most_tokens, SERVED.hidden_size, dtype=DTYPE),
        )


def stage_of(index: int, hosts: HostStages | None = None) -> StepExecutor[Any, Any]:
    layout = Decoder.layout(SERVED)
    last = len(STAGES) - 1
    memory = StageMemory(
        own=4096 * (index + 1),
        before=4096 * index,
        behind=0 if index == last else 4096 * (index + 2),
        others=torch.zeros(last if index in (0, last) else 0, dtype=torch.int64),
        sizes=sizes_of(LIMITS, SERVED.hidden_size, DTYPE),
    )
    rank = Rank(
        shard=WHOLE, stage_index=index, stage=STAGES[index], group=Alone(), links=StageLinks(), slots=-1, exchange=-1,
        adapters=-1, warn=print,
    )  # fmt: skip
    options = ExecutorOptions(model_folder=None, pipeline_parallel_size=len(STAGES))
    weights = stage_weights(zeros(layout, WHOLE), layout, rank.stage, DTYPE)
    config = rank.local_config(SERVED)
    request = replace(REQUEST, options=options)
    memory = memory if hosts is None else hosts.memory
    served = LoadedRank(config, weights, DTYPE, False, request, rank, None, Alone(), memory, hosts)
    built, _ = build_cuda_executor(
        served,
        LIMITS,
        one_group(SERVED),
        CPU,
        draft=None,
        heads=None,
        kv_cache_memory=0,
        gpu_memory_utilization=0.9,
        is_sized=True,
    )
    return built


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.long
@pytest.mark.parametrize("are_on_hosts", [False, True], ids=["one host", "several hosts"])
def test_stages_compile_nothing_late_and_send_each_message(
    are_on_hosts: bool, launches: Launches
) -> None:
    """Where stages are on other hosts, each stream and each message of tokens is sent and
    received, of equal sizes on both sides."""
    built = []
    ahead = []
    noted = []
    for index in range(len(STAGES)):
        launches.seen = set()
        noted.append(NotedLinks(index))
        built.append(stage_of(index, noted[-1].hosts if are_on_hosts else None))
        ahead.append(launches.seen)
    stages = Stages(built, launches)
    serve_at_random(stages, LIMITS)  # type: ignore[arg-type]
    for launched, compiled in zip(stages.launched, ahead, strict=True):
        late = launched - compiled
        assert not late, "\n".join(sorted(str(each)[:400] for each in late))
    if not are_on_hosts:
        return
    for before, behind in pairwise(noted):
        assert before.stream_out.shapes == behind.stream_in.shapes
        assert len(before.stream_out.shapes) > 100
    sent = noted[-1].tokens_out.shapes
    assert len(sent) > 100
    for stage in noted[:-1]:
        received = stage.tokens_in.shapes
        assert received == sent[: len(received)]
        # Tokens of the last plans are received before a later one.
        assert len(sent) - len(received) <= LIMITS.most_in_flight


@pytest.mark.usefixtures("_no_gpu", "launches")
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_stages_of_few_requests_send_messages_of_as_few_rows(
    num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LIMITS", replace(LIMITS, max_num_seqs=num_seqs))
    stage_of(len(STAGES) - 1)


@pytest.mark.long
@pytest.mark.usefixtures("_no_gpu", "launches")
def test_a_stage_prepares_a_shape_over_padding_whatever_step_its_buffers_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = stage_of(0)
    tried = list[torch.Tensor]()
    layers = stage._layers
    layers.buffers._words.fill_(1)
    try_out = DeviceModel.try_out

    def noted(model: DeviceModel, shape: StepShape) -> None:
        if model is layers:
            tried.append(model.buffers.words(shape).rows.clone())
        try_out(model, shape)

    monkeypatch.setattr(DeviceModel, "try_out", noted)
    while stage.prepare():
        layers.buffers._words.fill_(1)
    assert len(tried) > 5
    assert all((rows == -1).all() for rows in tried)


@pytest.mark.usefixtures("_no_gpu", "launches")
def test_draws_without_a_step_between_them_receive_what_earlier_ones_drew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = stage_of(0)
    received = list[int]()
    receive = cuda_send.receive_tokens

    def noted(memory: StageMemory, number: int, *more: Any) -> None:
        received.append(number)
        receive(memory, number, *more)

    monkeypatch.setattr(cuda_send, "receive_tokens", noted)
    row = np.zeros(1, np.int32)
    masks = np.zeros((1, LIMITS.num_rows, 1), np.int32)
    for number in range(1, 50):
        stage.draw(DrawPlan(step=number, rows=row, positions=row, output_indices=row, masks=masks))
        # Those of plans that may be in flight before this one are left, and its own.
        assert received == list(range(1, number - LIMITS.most_in_flight))


def test_messages_that_may_not_be_received_yet_have_slots_of_their_own() -> None:
    num_slots = sizes_of(LIMITS, SERVED.hidden_size, DTYPE).num_messages
    # Plans in flight have one each; behind the last step, that step's is left, and those of draws
    # of each row alone.
    most_left = LIMITS.most_in_flight + 1 + LIMITS.num_rows
    numbers = MessageNumbers(num_slots)
    numbers._number = numbers._most - 2 * most_left
    last = [numbers.next() for _ in range(4 * most_left)]
    assert 1 in last
    assert 0 not in last
    for i in range(len(last) - most_left + 1):
        assert len({number % num_slots for number in last[i : i + most_left]}) == most_left
