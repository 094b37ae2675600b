"""Models that divide a GPU: who starts first, and how much of the memory each finds taken then."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.services.stack.memory_shares import StartedModel, memory_shares, start_order
from headwater.services.stack.stack_error import StackError

GB = 1_000_000_000


def model(name: str, gigabytes: float, *, has_cache: bool) -> StartedModel:
    return StartedModel(
        folder=Path("/m"), name=name, weight_bytes=int(gigabytes * GB), has_cache=has_cache
    )


CHAT = model("chat", 16, has_cache=True)
JUDGE = model("judge", 1.2, has_cache=True)
EMBEDDER = model("embedder", 0.5, has_cache=False)
MODELS = [CHAT, EMBEDDER, JUDGE]


def test_encoders_start_first_and_the_largest_model_last() -> None:
    assert [each.name for each in start_order(MODELS)] == ["embedder", "judge", "chat"]


def test_each_model_finds_its_need_and_its_part_of_the_rest() -> None:
    total = 80 * GB
    shares = memory_shares(MODELS, total, 0.9)
    assert shares["chat"] == 0.9
    found = {name: share * total for name, share in shares.items()}
    rest = 0.9 * total - sum(each.needed_bytes for each in MODELS)
    assert found["embedder"] == pytest.approx(EMBEDDER.needed_bytes, rel=1e-2)
    assert found["judge"] - found["embedder"] == pytest.approx(
        JUDGE.needed_bytes + rest * 1.2 / 17.2, rel=1e-2
    )


def test_models_that_do_not_fit_are_named_with_what_they_need() -> None:
    with pytest.raises(
        StackError, match=r"do not fit on a GPU of 24\.0 GB.*chat 19\.7 GB, embedder"
    ):
        memory_shares(MODELS, 24 * GB, 0.9)
