"""Ranks of engines that are killed while a cluster answers: every answer ends as if nothing had
happened, token for token, at another replica or when the engine is back."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chatting_model import make_chatting_model
from tests.forked_cluster import ForkedCluster
from tests.gateway.processes import UNDRAFTED
from tests.line.conftest import Line
from tests.line.survivors import CompletionReader, Reading

pytestmark = pytest.mark.slow

NAME = "small"
WORDS = ("river", "mill", "son", "stone", "bread", "well")
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0} | UNDRAFTED,
    {"temperature": 1, "seed": 7, "top_p": 0.95} | UNDRAFTED,
    {"temperature": 1, "seed": 5, "logprobs": 2} | UNDRAFTED,
    {"temperature": 0.8, "seed": 3, "presence_penalty": 0.7},
)
"""The last request may be drafted, and end before any process dies, because a small model repeats
itself."""
FLAGS = ("--tensor-parallel-size=2", f"--served-model-name={NAME}", "--max-model-len=1024")
# Prompts take many steps, and a cache has room for all of them.
ENV = {
    "HEADWATER_MAX_NUM_BATCHED_TOKENS": "64",
    "HEADWATER_MAX_NUM_SEQS": "16",
    "HEADWATER_NUM_BLOCKS": "1200",
}


@pytest.fixture(scope="module", params=[2, 1], ids=["another replica", "no other replica"])
def ranked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Line, int]]:
    """A line, and its number of engines of two ranks each."""
    folder = make_chatting_model(tmp_path_factory.mktemp("small"))
    state = tmp_path_factory.mktemp("ranked")
    flags = (f"--model={folder}", f"--replicas={request.param}", *FLAGS)
    with Line(state, *flags, env=ENV, start=ForkedCluster) as line:
        yield line, request.param
        assert line.stop() == 0, line.log.read_text()


@pytest.fixture(scope="module")
def pauses(ranked: tuple[Line, int]) -> Iterator[list[float]]:
    """Extra seconds of answers that moved; figures for docs/parallel.md."""
    seconds: list[float] = []
    yield seconds
    print_pauses(seconds, ranked[1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("rank", "moment"),
    [(1, "decode"), (0, "prefill"), (0, "decode"), (1, "prefill")],
)
@pytest.mark.long
def test_answers_go_on_token_for_token_when_a_rank_is_killed(
    ranked: tuple[Line, int], pauses: list[float], rank: int, moment: str
) -> None:
    pauses += kill_a_rank(*ranked, rank, moment)


def kill_a_rank(
    line: Line,
    num_replicas: int,
    rank: int,
    moment: str,
    *,
    num_words: int = 150,
    max_tokens: int = 240,
) -> list[float]:
    """Kills one of engine-0 while all engines answer. Returns the extra seconds of the answers that
    moved."""
    bodies = [
        body_of(f"{moment} {rank} {i}", sampled, num_words, max_tokens)
        for i, sampled in enumerate(SAMPLED)
    ]
    core = line.pids_of("engine-0")[1]
    before = line.loads()["engine-0"]["address"]

    def kill() -> None:
        os.kill(ranks_of(core)[rank], signal.SIGKILL)
        tell_the_truth(line, num_replicas, before)

    return pauses_of_a_death(line, num_replicas, bodies, moment, kill)


def pauses_of_a_death(
    line: Line,
    num_replicas: int,
    bodies: list[dict[str, Any]],
    moment: str,
    kill: Callable[[], None],
) -> list[float]:
    """Asks for answers, has `kill` called at the moment, and compares every token with an
    undisturbed answer. Returns the extra seconds of the answers that moved."""
    with contextlib.ExitStack() as stack:
        readers = [
            stack.enter_context(CompletionReader(line.record, body).running()) for body in bodies
        ]
        if moment == "decode":
            # Where one engine gets more of the cores, its answers may have ended by now.
            are_answered = [reader.wait_events(8) for reader in readers]
            assert any(are_answered)
        else:
            line.wait_for(
                lambda: any(each["load"]["num_running"] for each in line.loads().values()),
                60,
                "nothing is computed",
            )
        died_at = time.monotonic()
        kill()
    disturbed = [reader.reading for reader in readers]
    line.wait_for(lambda: len(line.loads()) == num_replicas, 120, "the engine is not back")
    assert line.client.get("/ready").json()["ready"]
    assert "awaited" not in line.client.get("/ready").json()
    expected = [undisturbed(line, body) for body in bodies]
    assert [reading.error for reading in disturbed] == [""] * len(bodies)
    assert [reading.answer for reading in disturbed] == [reading.answer for reading in expected]
    moved = [reading for reading in disturbed if num_attempts(line, reading) > 1]
    assert moved
    return [reading.pause_after(died_at) for reading in moved]


def print_pauses(seconds: list[float], num_replicas: int) -> None:
    if seconds:
        p50, p99 = np.percentile(seconds, (50, 99))
        print(
            f"{num_replicas} replicas: {len(seconds)} answers moved, p50 {p50:.2f} s, p99 "
            f"{p99:.2f} s"
        )


def body_of(name: str, sampled: dict[str, Any], num_words: int, max_tokens: int) -> dict[str, Any]:
    """A prompt that no cache knows, and an answer of fixed length."""
    rng = np.random.default_rng(list(name.encode()))
    prompt = f"{name} " + " ".join(rng.choice(WORDS, num_words))
    return {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True} | sampled


def ranks_of(core: int) -> list[int]:
    """Process ids, in the order of the ranks."""
    return [int(pid) for pid in Path(f"/proc/{core}/task/{core}/children").read_text().split()]


def tell_the_truth(line: Line, num_replicas: int, address: str) -> None:
    """Waits until the engine that has lost a rank is known to be gone, or has come back already
    with another address; meanwhile its model is served."""
    gone_before = time.monotonic() + 30
    while len(loads := line.loads()) == num_replicas and loads["engine-0"]["address"] == address:
        assert time.monotonic() < gone_before, "the engine without a rank still counts"
        assert NAME in [model["id"] for model in line.client.get("/v1/models").json()["data"]]
    ready = line.client.get("/ready").json()
    if num_replicas > 1:
        assert ready["ready"]
    else:
        assert (
            "engine" in [*ready["missing"], *ready.get("awaited", [])]
            or len(line.loads()) == num_replicas
        )


def undisturbed(line: Line, body: dict[str, Any]) -> Reading:
    with CompletionReader(line.record, body).running() as reader:
        pass
    return reader.reading


def num_attempts(line: Line, reading: Reading) -> int:
    reported = line.client.get(f"/v1/requests/{reading.request_id}/explain").json()
    return len(reported["prompts"][0]["attempts"])
