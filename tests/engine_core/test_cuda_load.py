"""An engine on a GPU under load that changes: what it answers, and what it keeps, at the size of a
served model."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from headwater.bench.workloads import MODELS
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Executor
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

NUM_ROWS = 384
NUM_COPIES = 1000
COPY_LEN = 1000
NUM_PASSING = 10_000
SPECIAL = SamplingParams(
    temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.1, num_logprobs=2, max_tokens=6
)


@pytest.fixture(scope="module")
def executor_and_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Executor, Engine]]:
    folder: Path = tmp_path_factory.mktemp("qwen3-0.6b")
    (folder / "config.json").write_text(json.dumps(MODELS["qwen3-0.6b"]))
    options = ExecutorOptions(
        model_folder=folder,
        device="cuda",
        load_format="dummy",
        block_size=64,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        # Not a share of the memory: other tests of a suite hold some, this engine's own in a second
        # process among them.
        num_blocks=4000,
    )
    executor, config, _ = build_executor(options, lambda phase, done, total: None)
    yield executor, Engine(config, executor)
    executor.close()


def request(
    key: int, rng: np.random.Generator, prompt_len: int, sampling: SamplingParams
) -> NewRequest:
    prompt_ids = rng.integers(10, 100_000, prompt_len).tolist()
    return NewRequest(key=key, prompt_ids=prompt_ids, output_ids=[], sampling=sampling)


def test_a_thousand_copies_in_changing_batches_get_one_answer(
    executor_and_engine: tuple[Executor, Engine],
) -> None:
    engine = executor_and_engine[1]
    rng = np.random.default_rng()
    others = count(NUM_COPIES)
    prompt_ids = rng.integers(10, 100_000, 700).tolist()
    sampling = SamplingParams(temperature=0.8, seed=7, max_tokens=COPY_LEN)
    answers = np.zeros((NUM_COPIES, COPY_LEN), np.int32)
    num_added = num_finished = 0
    while num_finished < NUM_COPIES:
        # Copies come a few at a time, and among them others of every length, so that no batch is
        # like the last.
        for _ in range(int(rng.integers(0, 3)) if num_added < NUM_COPIES else 0):
            if num_added < NUM_COPIES:
                engine.add(
                    NewRequest(
                        key=num_added, prompt_ids=prompt_ids, output_ids=[], sampling=sampling
                    )
                )
                num_added += 1
        if rng.random() < 0.2:
            max_tokens = int(rng.integers(1, 300))
            other = SamplingParams(
                temperature=1.0, seed=int(rng.integers(1 << 40)), max_tokens=max_tokens
            )
            engine.add(request(next(others), rng, int(rng.integers(1, 1500)), other))
        if (output := engine.step()) is not None:
            at = 0
            for key, first, num_tokens in zip(
                output.keys, output.first_index, output.num_tokens, strict=True
            ):
                if key < NUM_COPIES:
                    answers[key, first : first + num_tokens] = output.token_ids[
                        at : at + num_tokens
                    ]
                at += num_tokens
            num_finished += sum(finished.key < NUM_COPIES for finished in output.finishes)
    while engine.has_work():
        engine.step()
    assert answers[0].any()
    assert (answers == answers[0]).all()


def test_memory_returns_to_where_it_was_after_ten_thousand_requests(
    executor_and_engine: tuple[Executor, Engine],
) -> None:
    executor, engine = executor_and_engine
    rng = np.random.default_rng()
    keys = count(1 << 20)

    def serve(num_requests: int) -> None:
        for i in range(num_requests):
            plain = SamplingParams(seed=i, max_tokens=int(rng.integers(1, 12)))
            engine.add(
                request(
                    next(keys), rng, int(rng.integers(1, 200)), SPECIAL if i % 50 == 0 else plain
                )
            )
            if i % 40 == 0:
                engine.cancel((1 << 20) + int(rng.integers(i + 1)))
            if i % 16 == 0:
                engine.step()
        while engine.has_work():
            engine.step()
        # A row keeps what its last request edits of logits, 19 KB, until the next one comes: plain
        # requests, all in one step, take every row.
        for _ in range(NUM_ROWS):
            engine.add(request(next(keys), rng, 5, SamplingParams(seed=0, max_tokens=10)))
        while engine.has_work():
            engine.step()

    while executor.prepare():
        pass
    serve(1000)
    # The step that takes every row has a shape of its own, captured the second time: a graph holds
    # what it computes.
    serve(0)
    # Engines of earlier tests in this process lie in cycles: their tensors go now, not while this
    # one serves.
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    load = engine.load()
    serve(NUM_PASSING)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    after = engine.load()
    assert after.num_used_blocks == load.num_used_blocks == 0
    assert after.num_running == after.num_waiting == 0
