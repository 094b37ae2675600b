"""Pipeline stages on GPUs of which the first drafts: what each launches is compiled before any
launches anything, and each message of guesses and each hidden state that is sent is received.
Kernels are noted, not run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import DrawPlan, StepPlan, StepResult
from headwater.engine_core.executors import cuda_stage, gpu_stage
from headwater.engine_core.executors.build_cuda import build_cuda_executor
from headwater.engine_core.executors.build_cuda_rank import LoadedRank
from headwater.engine_core.executors.cuda import CudaExecutor
from headwater.engine_core.executors.cuda_drafting import LoadedModel, TakenDrafts
from headwater.engine_core.executors.cuda_stage import CudaStageExecutor
from headwater.engine_core.executors.device_model import DeviceModel
from headwater.engine_core.executors.gpu_stage import MessageNumbers, parts_of, sizes_of
from headwater.engine_core.executors.gpu_states import (
    FirstStates,
    LateStates,
    ShownStates,
    StateTeller,
    shown_elsewhere,
    state_sizes_of,
)
from headwater.engine_core.executors.rank_place import RankPlace
from headwater.engine_core.executors.stage_link import StageLinks
from headwater.engine_core.executors.step_shapes import StepShape
from headwater.engine_core.layers.group import Alone
from headwater.engine_core.layers.staged import stage_weights
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.shards import WHOLE, Stage
from headwater.engine_core.stage_drafts import StageDrafts
from headwater.kernels.stage_memory import StageMemory
from headwater.kernels.stage_states import StateMemory
from tests.engine_core.parallel import test_rank_compiled_ahead as ranks
from tests.engine_core.parallel.test_rank_compiled_ahead import CPU, DTYPE, REQUEST, SERVED, zeros
from tests.engine_core.test_compiled_ahead import CONFIG, MODEL, Launches, launches, serve_at_random
from tests.long_values import long_but

__all__ = ["launches"]
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="puts things in the place of a GPU"
)

_no_gpu = ranks._no_gpu
LIMITS = replace(CONFIG, num_blocks=200, num_groups=3, async_depth=3)
Channel = tuple[int, int, int]
"""Address of the memory, number, and rows of one message."""
STATES_ADDRESS = 1 << 20
"""Where stages that are not the first show what they have."""
STAGES = [Stage(0, 2, 4), Stage(2, 3, 4), Stage(3, 4, 4)]


class Stages:
    """See `Executor`: all stages, one after another. The last one's results are those of all. What
    each launches is
    noted apart: in their own processes a stage finds nothing that another has compiled."""

    swapper = None
    copies_blocks = can_draft = True
    computes_at_once = False
    prefill_seconds = 0.0

    def __init__(self, stages: list[CudaExecutor | CudaStageExecutor], launches: Launches) -> None:
        self._stages = stages
        self._launches = launches
        self.launched: list[set[tuple[object, ...]]] = [set() for _ in stages]

    def _each(self, do: Callable[[CudaExecutor | CudaStageExecutor], Any]) -> Any:
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


class NotedRelay:
    """See `StageRelay`: notes what it is to move to other hosts, and moves nothing."""

    def __init__(self) -> None:
        self.shown: list[int] = []
        """Tokens that each launch of layers has shown the first stage."""
        self.tokens = list[tuple[int, int]]()
        self.guesses = list[tuple[int, int]]()

    def start(self) -> None:
        assert not self.shown, "what is launched before is lost"

    def note_layers(self, num_shown: int) -> None:
        self.shown.append(num_shown)

    def note_tokens(self, number: int, num_words: int) -> None:
        self.tokens.append((number, num_words))

    def note_guesses(self, number: int, num_words: int) -> None:
        self.guesses.append((number, num_words))


def stage_of(
    index: int, kind: str, path: Path, relay: Any = None
) -> CudaExecutor | CudaStageExecutor:
    layout = Decoder.layout(SERVED)
    last = len(STAGES) - 1
    memory = StageMemory(
        own=4096 * (index + 1),
        before=4096 * index,
        behind=0 if index == last else 4096 * (index + 2),
        first=4096,
        others=torch.zeros(last if index in (0, last) else 0, dtype=torch.int64),
        sizes=sizes_of(LIMITS, SERVED.hidden_size, DTYPE),
    )
    place = RankPlace(
        shard=WHOLE, stage_index=index, stage=STAGES[index], group=Alone(), links=StageLinks(), slots=-1, exchange=-1,
        warn=print,
    )  # fmt: skip
    options = ExecutorOptions(model_folder=None, pipeline_parallel_size=len(STAGES))
    weights = stage_weights(zeros(layout, WHOLE), layout, place.stage, DTYPE)
    config = place.local_config(SERVED)
    by_model = kind == "draft model"
    heads = None if by_model else ranks.heads(kind, WHOLE, path)
    shown = None if heads is None else shown_by(place.stage, StageDrafts.of(heads.config))
    served = LoadedRank(
        config, weights, DTYPE, False, replace(REQUEST, options=options), place, None, Alone(), memory, relay,
        FirstStates(shown, CPU) if shown is not None and not index else None,
        replace(zeros(layout, WHOLE), tensors={}) if kind == "eagle" and not index else None,
    )  # fmt: skip
    built, _ = build_cuda_executor(
        served,
        LIMITS,
        CPU,
        draft=LoadedModel(MODEL, zeros(Decoder.layout(MODEL), WHOLE), DTYPE, False)
        if by_model and not index
        else None,
        heads=None if index else heads,
        taken=TakenDrafts(memory, shown) if index else None,
        kv_cache_memory=0,
        gpu_memory_utilization=0.9,
        is_sized=True,
    )
    return built


def shown_by(stage: Stage, drafts: StageDrafts) -> ShownStates:
    elsewhere = shown_elsewhere(drafts, STAGES[0])
    sizes = state_sizes_of(
        LIMITS, len(elsewhere), sizes_of(LIMITS, SERVED.hidden_size, DTYPE).stream_bytes
    )
    return ShownStates(
        drafts=drafts,
        stage=stage,
        elsewhere=elsewhere,
        memory=StateMemory(address=STATES_ADDRESS, sizes=sizes),
        hidden_size=SERVED.hidden_size,
        dtype=DTYPE,
    )


class Messages:
    """What stages send and receive, of hidden states as steps are launched, since graphs launch
    nothing here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.guesses: list[tuple[int, int, int]] = []
        """Stage, number, rows."""
        self.sent: list[Channel] = []
        self.received: list[Channel] = []
        for name in ("send_guesses", "receive_guesses"):
            monkeypatch.setattr(gpu_stage, name, partial(self._guess, getattr(gpu_stage, name)))
        hidden = DeviceModel.hidden
        see = LateStates.see

        def sent(model: DeviceModel, shape: StepShape) -> torch.Tensor:
            if isinstance(shown := model.shown, StateTeller):
                address = shown._memory.address
                self.sent += [
                    (address, channel, shape.num_tokens) for channel in shown._channels.values()
                ]
            return hidden(model, shape)

        def received(late: LateStates) -> None:
            num_tokens = late._noted[0][0].num_tokens
            sources = late._states._sources
            self.received += [
                (memory.address, channel, num_tokens) for _, memory, channel in sources
            ]
            see(late)

        monkeypatch.setattr(DeviceModel, "hidden", sent)
        monkeypatch.setattr(LateStates, "see", received)

    def _guess(
        self, launch: Any, memory: StageMemory, number: int, steps: torch.Tensor, *more: Any
    ) -> None:
        self.guesses.append((memory.before // 4096, number, steps.shape[1]))
        launch(memory, number, steps, *more)

    def check_states(self, num_channels: int) -> None:
        """Each channel's are received in their order, but for steps that were in flight last."""
        channels = {each[:2] for each in self.sent}
        assert len(channels) == num_channels
        for channel in channels:
            sent, received = (
                [each[2] for each in ends if each[:2] == channel]
                for ends in (self.sent, self.received)
            )
            assert len(sent) > 100
            assert sent[: len(received)] == received
            assert 0 < len(sent) - len(received) <= LIMITS.async_depth


@pytest.mark.usefixtures("_no_gpu")
@pytest.mark.parametrize("kind", long_but(("draft model", *ranks.HEADS), "draft model", "eagle3"))
def test_stages_compile_nothing_late_and_receive_each_message(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    built = []
    ahead = []
    relays = [NotedRelay() for _ in STAGES]
    for index, relay in enumerate(relays):
        launches.seen = set()
        built.append(stage_of(index, kind, tmp_path / str(index), relay))
        ahead.append(launches.seen)
    stages = Stages(built, launches)
    messages = Messages(monkeypatch)
    serve_at_random(stages, LIMITS)  # type: ignore[arg-type]
    for launched, compiled in zip(stages.launched, ahead, strict=True):
        late = launched - compiled
        assert not late, "\n".join(sorted(str(each)[:400] for each in late))
    sent = [(number, count) for stage, number, count in messages.guesses if stage == 0]
    assert [number for number, _ in sent] == list(range(1, len(sent) + 1))
    assert len(sent) > 20
    for later in (1, 2):
        assert [
            (number, count) for stage, number, count in messages.guesses if stage == later
        ] == sent
    messages.check_states({"draft model": 0, "eagle3": 3}.get(kind, 1))
    check_relayed(relays, [number for number, _ in sent])
    by_channel: dict[int, list[int]] = {}
    for address, channel, num_tokens in messages.sent:
        if address == STATES_ADDRESS:
            by_channel.setdefault(channel, []).append(num_tokens)
    for lengths in by_channel.values():
        assert [each for each in relays[2].shown if each] == lengths
    assert any(relays[2].shown) == (kind != "draft model")


def check_relayed(relays: list[NotedRelay], guesses: list[int]) -> None:
    """Where stages are on other hosts, each stream, each message of tokens and each one of guesses
    is relayed."""
    sizes = sizes_of(LIMITS, SERVED.hidden_size, DTYPE)
    assert len(relays[0].shown) == len(relays[1].shown) == len(relays[2].shown) > 100
    assert [number for number, _ in relays[2].tokens] == list(range(1, len(relays[2].tokens) + 1))
    assert len(relays[2].tokens) > 100
    assert [relay.guesses for relay in relays[:2]] == [relays[0].guesses] * 2
    assert [number for number, _ in relays[0].guesses] == guesses
    assert all(1 < num_words <= sizes.message_len for _, num_words in relays[2].tokens)
    assert all(1 < num_words <= sizes.guesses_len for _, num_words in relays[0].guesses)


@pytest.mark.usefixtures("_no_gpu", "launches")
@pytest.mark.parametrize("num_seqs", [1, 3])
def test_stages_of_few_requests_tell_their_tokens_in_messages_of_as_few_rows(
    num_seqs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LIMITS", replace(LIMITS, max_num_seqs=num_seqs))
    stage_of(len(STAGES) - 1, "draft model", tmp_path)


@pytest.mark.usefixtures("_no_gpu", "launches")
def test_a_stage_prepares_a_shape_over_padding_whatever_step_its_buffers_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage = stage_of(0, "draft model", tmp_path)
    tried = list[torch.Tensor]()
    stage._buffers._words.fill_(1)
    try_out = DeviceModel.try_out

    def noted(model: DeviceModel, shape: StepShape) -> None:
        if model is stage._model:
            tried.append(model.buffers.words(shape).rows.clone())
        try_out(model, shape)

    monkeypatch.setattr(DeviceModel, "try_out", noted)
    while stage.prepare():
        stage._buffers._words.fill_(1)
    assert len(tried) > 5
    assert all((rows == -1).all() for rows in tried)


@pytest.mark.usefixtures("_no_gpu", "launches")
@pytest.mark.parametrize("kind", ["draft model", "eagle3"])
def test_draws_without_a_step_between_them_receive_what_earlier_ones_drew(
    monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    stage = stage_of(0, kind, tmp_path)
    received = list[int]()
    receive = cuda_stage.receive_tokens

    def noted(memory: StageMemory, number: int, *more: Any) -> None:
        received.append(number)
        receive(memory, number, *more)

    monkeypatch.setattr(cuda_stage, "receive_tokens", noted)
    row = np.zeros(1, np.int32)
    masks = np.zeros((1, LIMITS.num_rows, 1), np.int32)
    for number in range(1, 50):
        stage.draw(DrawPlan(step=number, rows=row, positions=row, output_indices=row, masks=masks))
        # Those of plans that may be in flight before this one are left, and its own.
        assert received == list(range(1, number - parts_of(LIMITS)))


@pytest.mark.parametrize("guesses", [False, True])
def test_messages_that_may_not_be_received_yet_have_slots_of_their_own(guesses: bool) -> None:
    sizes = sizes_of(LIMITS, SERVED.hidden_size, DTYPE)
    num_slots = sizes.num_guesses if guesses else sizes.num_messages
    # Plans in flight have one each; behind the last step, that step's is left, and those of draws
    # of each row alone.
    most_left = parts_of(LIMITS) + (0 if guesses else 1 + LIMITS.num_rows)
    numbers = MessageNumbers(num_slots)
    numbers._number = numbers._most - 2 * most_left
    last = [numbers.next() for _ in range(4 * most_left)]
    assert 1 in last
    assert 0 not in last
    for i in range(len(last) - most_left + 1):
        assert len({number % num_slots for number in last[i : i + most_left]}) == most_left
