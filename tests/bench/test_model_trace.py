"""The Zipf trace of models, and deployments that are started for the models that it asks for."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from headwater.bench.model_trace import main, row_of, zipf_trace
from headwater.bench.separate_starts import SeparateStarts
from headwater.bench.sse_client import Outcome

MODELS = [f"model-{i}" for i in range(10)]


def test_the_model_of_rank_k_is_asked_for_one_kth_as_often_as_the_first() -> None:
    asked = zipf_trace(MODELS, 20_000.0, 1.0, 0, np.random.default_rng(0))
    counts = [count for _, count in Counter(each.model for each in asked).most_common()]
    assert sum(counts) == pytest.approx(20_000, rel=0.05)
    shares = [count / counts[0] for count in counts]
    assert shares == pytest.approx([1 / rank for rank in range(1, 11)], abs=0.03)
    assert [each.at for each in asked] == sorted(each.at for each in asked)


def test_a_first_token_counts_that_comes_within_the_objective() -> None:
    outcomes = [Outcome(10.0, first_at=at) for at in (11.0, 15.0, 15.1)]
    row = row_of("in turns", 6, [*outcomes, Outcome(10.0, error="HTTP 503")], 20.0, 5.0)
    assert (row.in_time, row.goodput_per_s, row.failed, row.not_begun) == (2, 0.1, 1, 2)
    assert row.ttft_p50 == 5.0


def test_an_answer_without_a_text_is_not_in_time() -> None:
    row = row_of("in turns", 1, [Outcome(10.0)], 20.0, 5.0)
    assert (row.in_time, row.failed, row.ttft_p50) == (0, 1, None)


@pytest.mark.parametrize(
    "flags", ["--big=-1", "--rate=0", "--seconds=-20", "--prompt-len=0", "--big=0 --small=0"]
)
def test_what_makes_no_trace_is_refused_by_name(flags: str) -> None:
    app = typer.Typer()
    app.command()(main)
    found = CliRunner().invoke(app, ["--device=cpu", *flags.split()])
    assert found.exit_code == 2
    assert flags.partition("=")[0] in found.output


class Deployments:
    """Notes which deployments start and end."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def start(self, model: str, stack: ExitStack) -> str:
        self.log.append(f"+{model}")
        stack.callback(self.log.append, f"-{model}")
        return f"http://{model}"


async def test_the_least_recently_used_deployment_ends_where_another_needs_its_memory() -> None:
    seen = Deployments()
    starts = SeparateStarts(seen.start, {"a": 2, "b": 1, "c": 1, "d": 2}, 4)
    for model in ("a", "b", "c", "a", "b"):
        async with starts.use(model) as address:
            assert address == f"http://{model}"
    assert seen.log == ["+a", "+b", "+c"]
    async with starts.use("d"):
        pass
    assert seen.log[3:] == ["-c", "-a", "+d"]
    await starts.close()
    assert sorted(seen.log[6:]) == ["-b", "-d"]


async def test_deployments_start_ahead_as_long_as_memory_holds_them() -> None:
    seen = Deployments()
    starts = SeparateStarts(seen.start, {"a": 2, "b": 1, "c": 2}, 4)
    await starts.fill(["a", "b", "c"])
    assert seen.log == ["+a", "+b"]
    await starts.close()


async def test_a_deployment_without_requests_ends_before_one_that_has_just_started() -> None:
    seen = Deployments()
    starts = SeparateStarts(seen.start, {"a": 1, "b": 1, "c": 1}, 2)
    async with starts.use("a"):
        pass
    async with asyncio.timeout(60), starts.use("b"), starts.use("c"):
        assert seen.log == ["+a", "+b", "-a", "+c"]
    await starts.close()


async def test_a_deployment_ends_behind_its_last_request() -> None:
    seen = Deployments()
    starts = SeparateStarts(seen.start, {"a": 1, "b": 1}, 1)

    async def ask(model: str) -> None:
        async with starts.use(model):
            pass

    async with starts.use("a"):
        other = asyncio.create_task(ask("b"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert seen.log == ["+a"]
    await other
    assert seen.log == ["+a", "-a", "+b"]
    await starts.close()


@pytest.mark.long
def test_models_in_turns_and_separate_starts_answer_the_same_trace() -> None:
    command = [sys.executable, "-m", "headwater.bench", "model-trace", "--device=cpu", "--json"]
    sizes = ["--big=1", "--small=1", "--seconds=5", "--prompt-len=16", "--output-len=4"]
    found = subprocess.run(
        [*command, *sizes, "--resident=0.06"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    turns, separate = json.loads(found.stdout)
    assert turns["requests"] == separate["requests"] > 0
    assert turns["failed"] == 0
    assert turns["not_begun"] == 0
