"""Adapters of the simulated executor, under schedules of many requests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import StepPlan
from headwater.engine_core.executors.simulated.executor import SimulatedExecutor
from headwater.engine_core.executors.simulated.model import SimulatedModel, expected_tokens
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.small_adapters import tensors_of, write_adapter

MODEL = SimulatedModel(vocab_size=1000)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=9)


def engine_of(
    num_adapter_ranks: int, clock: Callable[[], float] = time.monotonic, **limits: int
) -> tuple[Engine, SimulatedExecutor]:
    given = {"num_blocks": 60, "max_model_len": 128, "max_num_seqs": 8} | limits
    config = EngineConfig(num_adapter_ranks=num_adapter_ranks, max_num_batched_tokens=64, **given)
    executor = SimulatedExecutor(config, MODEL)
    return Engine(config, executor, clock=clock), executor


@pytest.mark.parametrize(
    ("max_tokens", "num_tokens"),
    [
        (9, 1_800),
        pytest.param(60, 1_000_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_no_answer_has_a_token_of_another_adapter_while_adapters_come_and_go(
    tmp_path: Path, max_tokens: int, num_tokens: int
) -> None:
    """Twelve adapters of ranks 4 to 20 take turns in memory for 32 ranks. Adapters are removed and
    read again while requests wait, run and are preempted."""
    engine, executor = engine_of(32, num_blocks=30)
    chosen = random.Random(5)
    folders = [
        write_adapter(tmp_path / str(i), tensors_of(i, 4, num_layers=1), r=4 + 8 * (i % 3))
        for i in range(12)
    ]
    digests: list[bytes] = []
    for folder in folders:
        facts = executor.host_adapters.read(folder)
        engine.add_adapter(facts.digest, facts.num_ranks)
        digests.append(facts.digest)
    expected: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    num_removed = 0
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for key in range(num_tokens // max_tokens):
        which = chosen.randrange(13)
        digest = b"" if which == 12 else digests[which]
        prompt = [chosen.randrange(1000) for _ in range(chosen.randrange(1, 60))]
        expected[key] = expected_tokens(MODEL, prompt, sampling, adapter=digest)
        found[key] = []
        engine.add(
            NewRequest(
                key=key,
                prompt_ids=prompt,
                output_ids=[],
                sampling=sampling,
                adapter=digest,
                namespace=digest or b"\0" * 16,
                tenant=str(chosen.randrange(3)),
            )
        )
        for _ in range(chosen.randrange(max_tokens)):
            _step(engine, found)
        other = chosen.randrange(12)
        if engine.remove_adapter(digests[other]):
            num_removed += 1
            executor.host_adapters.drop(digests[other])
            facts = executor.host_adapters.read(folders[other])
            engine.add_adapter(facts.digest, facts.num_ranks)
    while engine.has_work():
        _step(engine, found)
    assert found == expected
    assert num_removed > 20


def _step(engine: Engine, found: dict[int, list[int]]) -> None:
    output = engine.step()
    if output is None:
        return
    at = 0
    for key, count in zip(output.keys, output.num_tokens, strict=True):
        found[key] += output.token_ids[at : at + count]
        at += count


class Crowded:
    """An engine with few slots for its adapters, and a virtual clock."""

    def __init__(self, folder: Path, num_slots: int = 1, num_adapters: int = 2) -> None:
        self.now = 0.0
        self.engine, executor = engine_of(8 * num_slots, lambda: self.now)
        self.digests = []
        for i in range(num_adapters):
            one = write_adapter(folder / str(i), tensors_of(i, 4, num_layers=1), r=4)
            facts = executor.host_adapters.read(one)
            self.engine.add_adapter(facts.digest, facts.num_ranks)
            self.digests.append(facts.digest)
        self.found: dict[int, list[int]] = {}

    def ask(self, key: int, adapter: bytes, tenant: str, max_tokens: int = 9) -> None:
        self.found[key] = []
        self.engine.add(
            NewRequest(
                key=key,
                prompt_ids=[key + 1],
                output_ids=[],
                sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
                adapter=adapter,
                namespace=adapter or b"\0" * 16,
                tenant=tenant,
            )
        )

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now += 0.1
            _step(self.engine, self.found)


def test_a_request_without_an_adapter_passes_one_that_finds_no_slot(tmp_path: Path) -> None:
    crowded = Crowded(tmp_path)
    one, other = crowded.digests
    crowded.ask(0, one, "first", max_tokens=60)
    crowded.step(2)
    crowded.ask(1, other, "first")
    crowded.ask(2, b"", "second")
    crowded.step(30)
    assert len(crowded.found[2]) == 9
    assert not crowded.found[1]
    crowded.step(60)
    assert len(crowded.found[1]) == 9


def test_a_request_gets_a_slot_though_others_use_it_without_a_pause(tmp_path: Path) -> None:
    crowded = Crowded(tmp_path)
    one, other = crowded.digests
    crowded.ask(0, one, "first")
    crowded.step(2)
    crowded.ask(1, other, "second")
    for key in range(2, 40):
        crowded.ask(key, one, "first")
        crowded.step(3)
    assert len(crowded.found[1]) == 9


def test_the_next_slot_is_for_the_tenant_with_the_fewest(tmp_path: Path) -> None:
    """The second tenant runs more requests, so that its turn comes later; of slots it has none."""
    crowded = Crowded(tmp_path, num_slots=2, num_adapters=4)
    a, b, c, other = crowded.digests
    for key in range(4):
        crowded.ask(key, b"", "second", max_tokens=60)
    crowded.ask(4, a, "first", max_tokens=60)
    crowded.ask(5, b, "first", max_tokens=9)
    crowded.step(2)
    crowded.ask(6, c, "first", max_tokens=20)
    crowded.ask(7, other, "second")
    while len(crowded.found[7]) < 5:
        crowded.step()
        assert not crowded.found[6]
    crowded.step(60)
    assert [len(crowded.found[key]) for key in (6, 7)] == [20, 9]


def test_no_slot_is_kept_for_a_request_that_has_left(tmp_path: Path) -> None:
    crowded = Crowded(tmp_path)
    one, other = crowded.digests
    crowded.ask(0, one, "first", max_tokens=100)
    crowded.step(2)
    crowded.ask(1, other, "second")
    for key in range(2, 20):
        crowded.ask(key, b"", "third", max_tokens=1)
        crowded.step(2)
    crowded.ask(20, one, "first", max_tokens=3)
    crowded.step(4)
    assert not crowded.found[20]
    crowded.engine.cancel(1)
    crowded.step(6)
    assert len(crowded.found[20]) == 3


def test_a_request_with_an_adapter_that_is_not_there_ends_with_an_error() -> None:
    engine, _ = engine_of(8)
    engine.add(
        NewRequest(key=1, prompt_ids=[1], output_ids=[], sampling=SAMPLING, adapter=b"x" * 16)
    )
    output = engine.step()
    assert output is not None
    [finished] = output.finishes
    assert finished.reason is FinishReason.ERROR
    assert finished.error == "the adapter was unloaded before the request came"


def test_an_adapter_that_a_request_has_is_not_removed(tmp_path: Path) -> None:
    engine, executor = engine_of(8)
    facts = executor.host_adapters.read(write_adapter(tmp_path / "one", tensors_of(1)))
    engine.add_adapter(facts.digest, facts.num_ranks)
    engine.add(
        NewRequest(key=1, prompt_ids=[1], output_ids=[], sampling=SAMPLING, adapter=facts.digest)
    )
    assert not engine.remove_adapter(facts.digest)
    while engine.has_work():
        engine.step()
    assert engine.remove_adapter(facts.digest)


def test_an_adapter_is_copied_while_its_request_waits(tmp_path: Path) -> None:
    engine, executor = engine_of(32, max_num_seqs=1)
    plans: list[StepPlan] = []
    submit = executor.submit
    executor.submit = lambda plan: plans.append(plan) or submit(plan)  # type: ignore[method-assign]
    for key in range(2):
        folder = write_adapter(tmp_path / str(key), tensors_of(key, 4, num_layers=1), r=4)
        facts = executor.host_adapters.read(folder)
        engine.add_adapter(facts.digest, facts.num_ranks)
        namespace = facts.digest[:16]
        request = NewRequest(
            key=key,
            prompt_ids=[1, 2],
            output_ids=[],
            sampling=SAMPLING,
            adapter=facts.digest,
            namespace=namespace,
        )
        engine.add(request)
    while engine.has_work():
        engine.step()
    engine.close()
    copied = [i for i, plan in enumerate(plans) for _ in plan.copied_adapters]
    seated = [i for i, plan in enumerate(plans) for _ in plan.admitted]
    # The second one has no seat before the first has ended.
    assert copied == [0, 1]
    assert seated[0] == 0
    assert seated[1] > 5
