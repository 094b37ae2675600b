"""MiMo V2 Flash on a GPU: heads of 192 and 128, windows with sinks and layers without, whatever the
batch, and on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.parallel.test_stages_on_gpu import share_unless
from tests.engine_core.small_models import (
    SmallEngine,
    convert,
    greedy,
    random_checkpoint,
)
from tests.engine_core.test_cuda_engine import behind_the_likeliest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not hasattr(transformers, "MiMoV2FlashConfig"),
        reason="this release of transformers has no MiMo V2 Flash",
    ),
]

SIZES = {"head_dim": 192, "v_head_dim": 128, "sliding_window": 129}


def engine(folder: Path, **options: Any) -> SmallEngine:
    roomy = {"device": "cuda", "block_size": 64, "num_blocks": 900, "max_num_batched_tokens": 1024}
    return SmallEngine(folder, **roomy | options)


def prompts(count: int) -> list[list[int]]:
    torch.manual_seed(2)
    lens = [(1, 127, 128, 129, 511, 513, 700)[i % 7] + i // 7 for i in range(count)]
    return [torch.randint(3, 500, (n,)).tolist() for n in lens]


def test_an_answer_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    random_checkpoint("mimo-v2-flash", tmp_path / "hf", **SIZES)
    folder = convert(tmp_path / "hf", tmp_path / "ours", "bfloat16")
    asked = prompts(28)
    seeded = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=16, num_logprobs=1)
        for i in range(len(asked))
    ]
    answers = []
    for options in (
        {},
        {"max_num_batched_tokens": 200, "async_depth": 4},
        {"num_blocks": 60},
    ):
        one = engine(folder, **options)
        found = one.answer(asked, *seeded)
        answers.append([(each.token_ids, each.logprobs) for each in found])
        one.close()
    assert answers[0] == answers[1]
    assert answers[0] == answers[2]
    one = engine(folder)
    for prompt, sampling, expected in list(zip(asked, seeded, answers[0], strict=True))[::6]:
        [alone] = one.answer([prompt], sampling)
        assert (alone.token_ids, alone.logprobs) == expected
    one.close()


def test_two_ranks_answer_as_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_unless(2, monkeypatch)
    model = random_checkpoint("mimo-v2-flash", tmp_path / "hf", **SIZES)
    folder = convert(tmp_path / "hf", tmp_path / "ours", "float32")
    asked = prompts(7)
    with_ranks = engine(folder, tensor_parallel_size=2)
    answers = with_ranks.tokens(asked, greedy(8))
    with_ranks.close()
    model.cuda()
    gaps = [behind_the_likeliest(model, *each) for each in zip(asked, answers, strict=True)]
    # Another expert may be chosen where two are nearly equal.
    assert torch.cat(gaps).median() < 0.3
