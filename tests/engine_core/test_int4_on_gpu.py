"""Packed weights on a GPU: the bits of the same model expanded, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_core.packed_checkpoint import FORMS, write_packed
from tests.engine_core.small_models import SHAPE, SmallEngine, convert, greedy, random_checkpoint

pytestmark = pytest.mark.gpu

SETTINGS = greedy(16, num_logprobs=5, num_prompt_logprobs=5)


def answers(folder: Path, asked: list[list[int]], **options: Any) -> list[Any]:
    """Tokens and log probabilities, of all prompts at once."""
    engine = SmallEngine(
        folder,
        device="cuda",
        block_size=64,
        num_blocks=400,
        **{"max_num_batched_tokens": 1024} | options,
    )
    found = engine.answer(asked, SETTINGS)
    engine.close()
    return [(each.token_ids, each.logprobs, each.prompt_logprobs) for each in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_packed_checkpoint_answers_as_the_same_file_expanded_to_the_bit(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    random_checkpoint("qwen3", tmp_path / "hf")
    write_packed(tmp_path / "hf", tmp_path / "packed", tmp_path / "expanded", FORMS[form], dtype)
    name = str(dtype).removeprefix("torch.")
    packed, expanded = (
        convert(tmp_path / each, tmp_path / f"our {each}", name) for each in ("packed", "expanded")
    )
    torch.manual_seed(1)
    # Alone, in batches on both sides of the number of rows from which on a matrix is expanded, and
    # in chunks.
    asked = [
        torch.randint(3, SHAPE["vocab_size"], (count,)).tolist() for count in (1, 7, 40, 300, 500)
    ]
    together = answers(packed, asked)
    assert together == answers(expanded, asked)
    assert together == answers(packed, asked, max_num_batched_tokens=64)
    assert together[:3] == [answers(packed, [prompt])[0] for prompt in asked[:3]]
