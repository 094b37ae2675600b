"""An engine that keeps its plans and what it said."""

from __future__ import annotations

from dataclasses import replace

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor, SimulatedTiming
from headwater.engine_core.executors.simulated.model import SimulatedModel
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from headwater.engine_core.step_output import Finished, StepOutput

MODEL = SimulatedModel(vocab_size=1000)
CONFIG = EngineConfig(
    num_blocks=65,
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    async_depth=1,
    block_size=16,
)
# Results come only when as many steps are in flight as may be.
LATE = SimulatedTiming(late_polls=1 << 30)


class RecordingExecutor(SimulatedExecutor):
    """Keeps the plans."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, MODEL, LATE, verify_every=1)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> int:
        self.plans.append(plan)
        return super().submit(plan)


class Bench:
    """An engine, its plans and what it said."""

    def __init__(self, config: EngineConfig) -> None:
        self.executor = RecordingExecutor(config)
        self.engine = Engine(config, self.executor)
        self.outputs: list[StepOutput] = []

    def add(self, key: int, prompt_ids: list[int], **sampling: object) -> None:
        self.engine.add(request(key, prompt_ids, **sampling))

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if (output := self.engine.step()) is not None:
                self.outputs.append(output)

    def run(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work():
                return
            self.steps(1)
        raise AssertionError("it does not end")

    def tokens(self, key: int) -> list[int]:
        return [
            token
            for output in self.outputs
            for each, token in zip(output.keys, output.token_ids, strict=True)
            if each == key
        ]

    def finish(self, key: int) -> Finished:
        (finished,) = (
            each for output in self.outputs for each in output.finishes if each.key == key
        )
        return finished

    def cached_tokens(self, key: int) -> int:
        (started,) = (each for output in self.outputs for each in output.starts if each.key == key)
        return started.cached_tokens


def request(key: int, prompt_ids: list[int], **sampling: object) -> NewRequest:
    params = replace(SamplingParams(max_tokens=8, seed=key), **sampling)
    return NewRequest(key=key, prompt_ids=prompt_ids, output_ids=[], sampling=params)


def prompt(num_tokens: int, *, first: int = 0) -> list[int]:
    return [(first + 7 * i) % 1000 for i in range(num_tokens)]
