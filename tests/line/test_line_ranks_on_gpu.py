"""Ranks on GPUs that are killed while a cluster answers. Where there are too few GPUs, ranks take
turns on them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headwater.engine_core.executors.ranks.rank_devices import SHARE
from tests.chatting_model import make_chatting_model
from tests.line.conftest import Line
from tests.line.test_line_ranks import FLAGS, NAME, kill_a_rank, print_pauses

pytestmark = pytest.mark.gpu

ENV = {
    "HEADWATER_MAX_NUM_BATCHED_TOKENS": "256",
    "HEADWATER_MAX_NUM_SEQS": "16",
    "HEADWATER_NUM_BLOCKS": "200",
    "HEADWATER_BLOCK_SIZE": "64",
}
SIZES = {"tensor": "--tensor-parallel-size=2", "pipeline": "--pipeline-parallel-size=2"}


@pytest.fixture(
    scope="module",
    params=[(2, "tensor"), (1, "tensor"), (1, "pipeline")],
    ids=["another replica", "no other replica", "stages, no other replica"],
)
def ranked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Line, int]]:
    """A line, and its number of engines of two ranks each."""
    num_replicas, kind = request.param
    folder = make_chatting_model(tmp_path_factory.mktemp("small"), dtype="bfloat16")
    shares = {SHARE: "1"} if torch.cuda.device_count() < 2 * num_replicas else {}
    flags = [SIZES[kind], *(flag for flag in FLAGS if "parallel" not in flag)]
    flags += [f"--model={folder}", f"--replicas={num_replicas}", "--device=cuda"]
    with Line(tmp_path_factory.mktemp("ranked"), *flags, env=ENV | shares) as line:
        yield line, num_replicas
        assert line.stop() == 0, line.log.read_text()


@pytest.fixture(scope="module")
def pauses(ranked: tuple[Line, int]) -> Iterator[list[float]]:
    """Extra seconds of answers that moved; figures for docs/parallel.md."""
    seconds: list[float] = []
    yield seconds
    print_pauses(seconds, ranked[1])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_answers_go_on_token_for_token_when_a_rank_is_killed(
    ranked: tuple[Line, int], pauses: list[float], rank: int
) -> None:
    assert NAME in [model["id"] for model in ranked[0].client.get("/v1/models").json()["data"]]
    pauses += kill_a_rank(*ranked, rank, "decode", num_words=20, max_tokens=850)
