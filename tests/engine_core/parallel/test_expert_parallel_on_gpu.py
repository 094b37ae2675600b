"""Engines whose ranks have whole experts, on two GPUs or by turns on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine_core.mxfp4_checkpoint import write_mxfp4
from tests.engine_core.parallel.parallel_models import folder_of
from tests.engine_core.parallel.test_expert_parallel import TWO, WIDE
from tests.engine_core.parallel.test_leaves import SCORED, bits_of
from tests.engine_core.parallel.test_ranks_on_gpu import engine
from tests.engine_core.parallel.test_stages_on_gpu import share_unless
from tests.engine_core.parallel.test_tensor_parallel import PROMPTS
from tests.engine_core.small_models import convert, greedy, random_checkpoint
from tests.engine_core.test_cuda_engine import behind_the_likeliest

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    share_unless(2, monkeypatch)


def test_an_answer_is_likely_and_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    model, folder = folder_of(WIDE, tmp_path, "bfloat16")
    model = model.bfloat16().float().cuda()
    with engine(folder, **TWO) as two:
        together = bits_of(two.answer(PROMPTS, *SCORED))
        assert bits_of(two.answer(PROMPTS, *SCORED)) == together
        alone = [
            two.answer([prompt], asked)[0] for prompt, asked in zip(PROMPTS, SCORED, strict=True)
        ]
        assert bits_of(alone) == together
        answers = two.tokens(PROMPTS, greedy(12))
    gaps = [behind_the_likeliest(model, *each) for each in zip(PROMPTS, answers, strict=True)]
    # Another expert may be chosen where two are nearly equal.
    assert torch.cat(gaps).median() < 0.3


def test_tree_numerics_give_one_and_two_ranks_the_same_bits(tmp_path: Path) -> None:
    _, folder = folder_of(WIDE, tmp_path, "bfloat16")
    with engine(folder, numerics="tree") as one:
        expected = bits_of(one.answer(PROMPTS, *SCORED))
    with engine(folder, numerics="tree", **TWO) as two:
        assert bits_of(two.answer(PROMPTS, *SCORED)) == expected


def test_experts_in_mxfp4_answer_as_expanded_ones(tmp_path: Path) -> None:
    sizes = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    random_checkpoint("gpt-oss", tmp_path / "source", **sizes)
    write_mxfp4(tmp_path / "source", tmp_path / "packed", tmp_path / "expanded")
    found = []
    for kind in ("packed", "expanded"):
        folder = convert(tmp_path / kind, tmp_path / f"{kind}-ours", "bfloat16")
        with engine(folder, **TWO) as two:
            found.append(bits_of(two.answer(PROMPTS, *SCORED)))
    assert found[0] == found[1]
