"""Adapters beside ranks: each copies its part of them, and answers are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.executor import AdapterCopy, AdapterPlace, AdmittedRow
from headwater.engine_core.executors.ranks.multi import MultiExecutor
from headwater.engine_core.executors.ranks.rank_devices import SHARE
from headwater.engine_core.parallel.plan_messages import encode_step
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.parallel.parallel_models import EIGHT_AND_FOUR, QWEN3, engine_of, folder_of
from tests.engine_core.parallel.test_plan_messages import step, step_of
from tests.engine_core.small_adapters import answer, load_adapter, tensors_of, write_adapter
from tests.engine_core.small_models import (
    SHAPE,
    Answer,
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)
from tests.long_values import long_but

HEADS, KV_HEADS = (32 * EIGHT_AND_FOUR[f"num_{name}_heads"] for name in ("attention", "key_value"))
HIDDEN, INNER = EIGHT_AND_FOUR["hidden_size"], EIGHT_AND_FOUR["intermediate_size"]
SIZES = {
    "self_attn.q_proj": (HEADS, HIDDEN),
    "self_attn.k_proj": (KV_HEADS, HIDDEN),
    "self_attn.v_proj": (KV_HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
PROMPTS = [np.random.default_rng(n).integers(3, 512, n).tolist() for n in (40, 7, 90, 25)]
SCORED = greedy(8, num_logprobs=1)
LAYOUTS = {
    "two shards": {"tensor_parallel_size": 2},
    "two stages": {"pipeline_parallel_size": 2},
    "two shards of two stages": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
OPTIONS = {
    "cpu": {"adapter_memory": 4 << 20},
    "cuda": {"adapter_memory": 4 << 20, "device": "cuda", "block_size": 64, "num_blocks": 60},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOLERANCES = {"cpu": 1e-3, "cuda": 2e-2}
"""Of a log probability. A GPU's products read 10 bits of a float32, so that a difference in the
last bits of a sum may become one of a thousandth in the next product: without adapters, answers of
two ranks and of one differ by up to 0.004 (H200, 2026-11-29)."""
RANKS_OF_BOTH = 4


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and torch.cuda.device_count() < RANKS_OF_BOTH:
        pytest.MonkeyPatch().setenv(SHARE, "1")
    return str(request.param)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and adapters of ranks 4 and 12, the second of few layers."""
    base = tmp_path_factory.mktemp("ranks")
    folder_of(QWEN3, base)
    layers = EIGHT_AND_FOUR["num_hidden_layers"]
    write_adapter(base / "all", tensors_of(1, sizes=SIZES, num_layers=layers))
    few = ("self_attn.q_proj", "mlp.down_proj")
    tensors = tensors_of(2, 12, few, SIZES, num_layers=1)
    write_adapter(base / "few", tensors, r=12, lora_alpha=12)
    return base


@pytest.fixture(scope="module")
def alone(folders: Path, device: str) -> list[Answer]:
    """Answers of one process: with the first adapter, the second, none and the first."""
    with engine_of(folders / "ours", **OPTIONS[device]) as one:
        return answer(one, PROMPTS, digests_of(one, folders), SCORED)


def digests_of(engine: SmallEngine, folders: Path) -> list[bytes]:
    first, second = (load_adapter(engine, folders / name) for name in ("all", "few"))
    return [first, second, b"", first]


@pytest.fixture(scope="module", params=long_but(tuple(LAYOUTS), "two shards of two stages"))
def ranks(request: pytest.FixtureRequest, folders: Path, device: str) -> Iterator[SmallEngine]:
    with engine_of(folders / "ours", **OPTIONS[device], **LAYOUTS[request.param]) as engine:
        yield engine


def bits(answers: list[Answer]) -> list[Any]:
    return [(each.token_ids, [score.logprob for score in each.logprobs]) for each in answers]


def test_answers_are_those_of_one_process(
    ranks: SmallEngine, folders: Path, alone: list[Answer], device: str
) -> None:
    found = answer(ranks, PROMPTS, digests_of(ranks, folders), SCORED)
    for own, other in zip(found, alone, strict=True):
        assert own.token_ids == other.token_ids
        expected = [each.logprob for each in other.logprobs]
        assert [each.logprob for each in own.logprobs] == pytest.approx(
            expected, abs=TOLERANCES[device]
        )
    assert bits(found)[0] != bits(found)[3]


def test_mixed_batches_keep_the_bits_of_each_row(ranks: SmallEngine, folders: Path) -> None:
    digests = digests_of(ranks, folders)
    together = answer(ranks, PROMPTS, digests, SCORED)
    for prompt, digest, expected in zip(PROMPTS, digests, bits(together), strict=True):
        assert bits(answer(ranks, [prompt], [digest], SCORED)) == [expected]


def test_room_of_an_adapter_that_is_dropped_is_used_again(
    ranks: SmallEngine, folders: Path, tmp_path: Path, alone: list[Answer]
) -> None:
    assert isinstance(ranks.executor, MultiExecutor)
    host = ranks.executor.host_adapters
    assert host is not None
    first, second, *_ = digests_of(ranks, folders)
    places = [each.begin for each in _places(host, first, second)]
    assert places[0] < places[1]
    assert ranks.engine.remove_adapter(first)
    host.drop(first)
    other = write_adapter(tmp_path / "other", tensors_of(5, sizes=SIZES, num_layers=4))
    [place] = _places(host, load_adapter(ranks, other))
    assert place.begin == places[0]
    found = answer(ranks, [PROMPTS[1]], [second], SCORED)
    assert found[0].token_ids == alone[1].token_ids
    host.drop(second)


def _places(host: Any, *digests: bytes) -> list[AdapterPlace]:
    return [each.place for each in host.placed([AdapterCopy(0, digest) for digest in digests])]


@pytest.mark.long
def test_ranks_with_experts_answer_as_one_process(tmp_path: Path) -> None:
    random_checkpoint("qwen3-moe", tmp_path / "hf")
    folder = convert(tmp_path / "hf", tmp_path / "ours")
    hidden = SHAPE["hidden_size"]
    kv_size = hidden * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    sizes = {"self_attn.o_proj": (hidden, hidden), "self_attn.k_proj": (kv_size, hidden)}
    tensors = tensors_of(6, 4, tuple(sizes), sizes, SHAPE["num_hidden_layers"])
    write_adapter(tmp_path / "adapter", tensors)
    found = []
    for options in ({}, {"tensor_parallel_size": 2}):
        with engine_of(folder, adapter_memory=4 << 20, **options) as engine:
            digest = load_adapter(engine, tmp_path / "adapter")
            answers = answer(engine, PROMPTS[:2], [digest, b""], greedy(8))
            found.append([each.token_ids for each in answers])
    assert found[0] == found[1]


def test_memory_for_less_than_one_adapter_is_refused(folders: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"adapter_memory is 100; allowed: 0, or \d+ bytes"),
        engine_of(folders / "ours", adapter_memory=100, tensor_parallel_size=2),
    ):
        pass


def test_a_plan_says_where_ranks_find_an_adapter() -> None:
    place = AdapterPlace(8192, 4096, 2048, 16)
    row = AdmittedRow(
        row=3,
        token_ids=np.array([5], np.int32),
        num_prompt_tokens=1,
        sampling=SamplingParams(),
        choice_index=0,
        adapter=2,
    )
    copied = [AdapterCopy(2, b"digest", place), AdapterCopy(0, b"other", place)]
    found = step_of(encode_step(step(admitted=[row], copied_adapters=copied)))
    assert found.admitted[0].adapter == 2
    assert [(each.slot, each.place) for each in found.copied_adapters] == [(2, place), (0, place)]
