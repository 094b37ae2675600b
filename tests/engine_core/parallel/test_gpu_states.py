"""Hidden states of several steps on their way to heads of the first stage on a GPU, here all in one
process. Without a GPU kernels are interpreted."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.gpu_states import (
    FINAL,
    FirstStates,
    LateStates,
    ShownStates,
    shown_elsewhere,
    state_sizes_of,
)
from headwater.engine_core.executors.step_buffers import StepBuffers
from headwater.engine_core.executors.step_shapes import StepShape
from headwater.engine_core.shards import Stage
from headwater.engine_core.stage_drafts import ALL, StageDrafts
from headwater.kernels.stage_states import StateMemory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN = 16
DTYPE = torch.bfloat16
CONFIG = EngineConfig(
    num_blocks=20,
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_draft_tokens=3,
    async_depth=3,
)
STAGES = [Stage(0, 2, 4), Stage(2, 3, 4), Stage(3, 4, 4)]
DRAFTS = {
    "of the last layer": StageDrafts(final=ALL),
    "of three layers": StageDrafts(layers=(1, 2, 3)),
}
SHAPES = [StepShape(num_tokens=n, num_decodes=n) for n in (3, 1, 5, 2, 4, 1)]


class Heads:
    """See `CudaGuesser`. Notes what it is shown, and the step that the buffers hold then."""

    def __init__(self, buffers: StepBuffers) -> None:
        self.shown = self
        self._buffers = buffers
        self.seen: list[dict[str, Any]] = []

    def show(self, final: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> None:
        self.seen.append(
            {
                "final": final.clone(),
                "inputs": {layer: each.clone() for layer, each in inputs.items()},
            }
        )

    def see(self, shape: StepShape, steps: torch.Tensor) -> None:
        words = self._buffers.words(shape)
        self.seen[-1] |= {"shape": shape, "steps": steps.clone(), "rows": words.rows.clone()}


class Stages:
    def __init__(self, drafts: StageDrafts) -> None:
        self.drafts = drafts
        self.elsewhere = shown_elsewhere(drafts, STAGES[0])
        sizes = state_sizes_of(
            CONFIG, len(self.elsewhere), CONFIG.max_positions * HIDDEN * DTYPE.itemsize
        )
        piece = torch.zeros(sizes.num_bytes, dtype=torch.uint8, device=DEVICE)
        memory = StateMemory(address=piece.data_ptr(), sizes=sizes, owner=piece)
        self.buffers = StepBuffers(CONFIG, 4, DEVICE, 2)
        self.heads = Heads(self.buffers)
        first, *later = (
            ShownStates(
                drafts=drafts,
                stage=stage,
                elsewhere=self.elsewhere,
                memory=memory,
                hidden_size=HIDDEN,
                dtype=DTYPE,
            )
            for stage in STAGES
        )
        served: Any = SimpleNamespace(
            buffers=self.buffers,
            platform=SimpleNamespace(device=DEVICE),
            graphs=SimpleNamespace(run_once=lambda key, launch: launch()),
            shapes=SimpleNamespace(recurs=lambda shape: shape.num_tokens > 2),
        )
        self.late = LateStates(FirstStates(first, DEVICE), self.heads, served)  # type: ignore[arg-type]
        self.tellers = [self.late.shown, *(each.teller(DEVICE) for each in later)]

    def launch(self, number: int, shape: StepShape) -> dict[int, torch.Tensor]:
        """Has all stages compute a step. Returns the inputs of all layers, and the states behind
        the last."""
        self.buffers._words.fill_(number)
        self.late.note(shape, 2)
        states = {
            each: torch.randn(shape.num_tokens, HIDDEN, device=DEVICE).to(DTYPE)
            for each in (*range(4), FINAL)
        }
        for stage, teller in zip(STAGES, self.tellers, strict=True):
            own = {layer - stage.first: states[layer] for layer in range(stage.first, stage.stop)}
            assert set(teller.layers) <= set(own)
            teller.show(states[FINAL], own)
        return states


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_heads_read_each_step_as_it_was_when_others_have_had_the_buffers(
    drafts: StageDrafts,
) -> None:
    stages = Stages(drafts)
    launched = list[dict[int, torch.Tensor]]()
    assert stages.late.most == 4
    for number, shape in enumerate(SHAPES):
        launched.append(stages.launch(number, shape))
        if number >= 3:
            stages.late.see()
    for _ in range(3):
        stages.late.see()
    assert [each["shape"] for each in stages.heads.seen] == SHAPES
    for number, (seen, states) in enumerate(zip(stages.heads.seen, launched, strict=True)):
        assert (seen["rows"] == number).all()
        assert seen["steps"].shape == (5, 2)
        assert (seen["steps"] == number).all()
        for layer in drafts.layers:
            assert torch.equal(seen["inputs"][layer], states[layer])
        if drafts.final:
            assert torch.equal(seen["final"], states[FINAL])


@pytest.mark.parametrize(
    ("layers", "stop", "expected"),
    [((0, 1, 2), 3, ()), ((0, 2, 5), 2, (2, 5)), ((2, 3, 5), 1, (2, 3, 5))],
)
def test_layers_of_the_first_stage_have_no_channel(
    layers: tuple[int, ...], stop: int, expected: tuple[int, ...]
) -> None:
    assert shown_elsewhere(StageDrafts(layers=layers), Stage(0, stop, 6)) == expected
