"""gpt-oss on a GPU: the kernels for packed experts, windows and sinks, whatever the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.mxfp4_checkpoint import write_mxfp4
from tests.engine_core.small_models import SmallEngine, convert, random_checkpoint

pytestmark = pytest.mark.gpu

SIZES = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 1, "sliding_window": 128}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A converted model in MXFP4, and the same one expanded, both in bfloat16."""
    base = tmp_path_factory.mktemp("gpt-oss")
    random_checkpoint("gpt-oss", base / "source", **SIZES)
    write_mxfp4(base / "source", base / "packed", base / "expanded")
    return (
        convert(base / "packed", base / "a", "bfloat16"),
        convert(base / "expanded", base / "b", "bfloat16"),
    )


def engine(folder: Path, **options: Any) -> SmallEngine:
    roomy = {"device": "cuda", "block_size": 64, "num_blocks": 900, "max_num_batched_tokens": 1024}
    return SmallEngine(folder, **roomy | options)


def prompts(count: int) -> list[list[int]]:
    torch.manual_seed(2)
    lens = [(1, 127, 128, 129, 511, 513, 700)[i % 7] + i // 7 for i in range(count)]
    return [torch.randint(3, 500, (n,)).tolist() for n in lens]


def test_packed_experts_answer_as_expanded_ones_and_as_alone_to_the_bit(
    folders: tuple[Path, Path],
) -> None:
    asked = prompts(40)
    seeded = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=24, num_logprobs=1)
        for i in range(len(asked))
    ]
    answers = []
    for folder, options in (
        (folders[0], {}),
        (folders[1], {}),
        (folders[0], {"max_num_batched_tokens": 200, "async_depth": 4}),
        (folders[0], {"num_blocks": 60}),
    ):
        one = engine(folder, **options)
        found = one.answer(asked, *seeded)
        answers.append([(each.token_ids, each.logprobs) for each in found])
        one.close()
    assert answers[0] == answers[1]
    assert answers[0] == answers[2]
    assert answers[0] == answers[3]
    one = engine(folders[0])
    for prompt, sampling, expected in list(zip(asked, seeded, answers[0], strict=True))[::6]:
        [alone] = one.answer([prompt], sampling)
        assert (alone.token_ids, alone.logprobs) == expected
    one.close()
