"""Prompts as vectors, against the hidden states of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.executor import AdmittedRow, StepPlan
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.sampling.pooling import POOLINGS, Pools
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.small_models import SmallEngine, convert, random_checkpoint

LENGTHS = [1, 5, 16, 33, 100, 100]


def embed(engine: SmallEngine, prompts: Sequence[Sequence[int]], pooling: str) -> list[np.ndarray]:
    vectors: dict[int, np.ndarray] = {}
    sampling = SamplingParams(max_tokens=0, pooling=pooling)
    for key, prompt in enumerate(prompts):
        engine.engine.add(
            NewRequest(key=key, prompt_ids=list(prompt), output_ids=[], sampling=sampling)
        )
    while engine.engine.has_work():
        if (output := engine.engine.step()) is not None:
            vectors |= {
                key: np.frombuffer(values, np.float32) for key, values in output.embeddings.items()
            }
            assert {finish.key for finish in output.finishes} == output.embeddings.keys()
            assert all(finish.reason is FinishReason.LENGTH for finish in output.finishes)
            assert not output.token_ids
    return [vectors[key] for key in range(len(prompts))]


def chunk(start: int, count: int) -> StepPlan:
    """Plan of a step that computes `count` tokens of the pooled prompt of row 0."""
    none = np.empty(0, np.int32)
    return StepPlan(
        step=1,
        released=[],
        admitted=[],
        block_rows=none,
        block_indices=none,
        block_ids=none,
        rows=np.zeros(1, np.int32),
        starts=np.array([start], np.int32),
        counts=np.array([count], np.int32),
        samples=np.zeros(1, np.bool_),
        output_indices=np.zeros(1, np.int32),
        holds=np.zeros(1, np.bool_),
        pooled_rows=[0],
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_becomes_what_its_pooling_says(pooling: str, device: str, tmp_path: Path) -> None:
    model = random_checkpoint("qwen3", tmp_path / "source")
    on_device: dict[str, Any] = {"device": "cuda", "block_size": 64} if device == "cuda" else {}
    dtype, tolerance = ("bfloat16", 0.1) if device == "cuda" else ("float32", 1e-4)
    folder = convert(tmp_path / "source", tmp_path / "model", dtype)
    engine = SmallEngine(folder, max_num_batched_tokens=64, **on_device)
    model = model.to(getattr(torch, dtype)).float()
    prompts = [[(7 * i + j) % 500 for j in range(length)] for i, length in enumerate(LENGTHS)]
    with torch.no_grad():
        states = [model.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    chosen: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "last": lambda s: s[-1],
        "mean": lambda s: s.mean(0),
        "cls": lambda s: s[0],
    }
    # The second time the prefix is cached: what is pooled of it is computed all the same.
    for _ in range(2):
        for vector, state in zip(embed(engine, prompts, pooling), states, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(vector.copy()),
                chosen[pooling](state),
                rtol=tolerance,
                atol=tolerance,
            )
    engine.close()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_step_may_overwrite_the_states_of_an_earlier_step(pooling: str) -> None:
    """A CUDA graph writes the states of every step to the same memory."""
    pools = Pools()
    hidden = torch.empty(2, 3)
    params = SamplingParams(max_tokens=0, pooling=pooling)
    ids = np.zeros(4, np.int32)
    pools.admit(
        AdmittedRow(row=0, token_ids=ids, num_prompt_tokens=4, sampling=params, choice_index=0)
    )
    vectors: dict[int, torch.Tensor] = {}
    for value, start in ((1.0, 0), (3.0, 2)):
        vectors = pools.take(chunk(start, 2), hidden.fill_(value))
    hidden.fill_(7.0)
    assert vectors[0].tolist() == [{"cls": 1.0, "mean": 2.0, "last": 3.0}[pooling]] * 3


def test_a_mean_has_the_same_bits_alone_and_in_company(tmp_path: Path) -> None:
    random_checkpoint("qwen3", tmp_path / "source")
    engine = SmallEngine(
        convert(tmp_path / "source", tmp_path / "model"), max_num_batched_tokens=64
    )
    prompts = [[(7 * i + j) % 500 for j in range(length)] for i, length in enumerate(LENGTHS)]
    together = embed(engine, prompts, "mean")
    alone = [embed(engine, [prompt], "mean")[0] for prompt in prompts]
    engine.close()
    assert [vector.tobytes() for vector in together] == [vector.tobytes() for vector in alone]
