"""The load generator against a server whose answers are known."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import typer

from headwater.bench import arrivals, datasets
from headwater.bench.datasets import Chat, Shape
from headwater.bench.latency_report import Objective, summarize
from headwater.bench.plot import check_plot
from headwater.bench.serve import run
from headwater.bench.serve_workers import drive
from headwater.bench.sse_client import Outcome, SseConnection
from headwater.bench.stub_server import StubConnection
from tests.long_values import long_but

SHAPE = Shape(prompt_len=8, output_len=5, vocab_size=100, model="stub")


@pytest.fixture
async def stub_url() -> AsyncIterator[str]:
    server = await asyncio.get_running_loop().create_server(StubConnection, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()


async def test_an_answer_counts_its_tokens_and_its_gaps(stub_url: str) -> None:
    connection = await SseConnection.open(stub_url)
    outcome = await connection.call("/v1/completions", SHAPE.body([1, 2, 3]), {}, keep_reply=True)
    connection.close()
    assert (outcome.completion_tokens, outcome.reply, outcome.error) == (5, " word" * 5, "")
    assert outcome.sent_at < outcome.first_at <= outcome.last_at


async def test_every_request_is_sent_once_over_two_processes(stub_url: str) -> None:
    dialogues = list(datasets.random_prompts(12, SHAPE, np.random.default_rng(0)))
    outcomes, wall = await asyncio.to_thread(drive, stub_url, dialogues, None, 4, 2, quiet=True)
    assert [outcome.completion_tokens for outcome in outcomes] == [5] * 12
    assert wall > 0


async def test_a_server_that_is_gone_is_reported_not_raised() -> None:
    dialogues = list(datasets.random_prompts(2, SHAPE, np.random.default_rng(0)))
    outcomes, _ = await asyncio.to_thread(
        drive, "http://127.0.0.1:1", dialogues, None, 2, 1, quiet=True
    )
    assert all(outcome.error for outcome in outcomes)


def test_goodput_counts_requests_that_keep_every_objective() -> None:
    fast = Outcome(0.0, 0.1, 1.1, completion_tokens=11)
    slow = Outcome(0.0, 0.9, 1.9, completion_tokens=11)
    report = summarize([fast, slow], 2.0, Objective(ttft_ms=500))
    assert (report["goodput_requests_per_s"], report["output_tokens_per_s"]) == (0.5, 11.0)


@pytest.mark.parametrize("shape", [0.5, 1.0, 4.0])
def test_gamma_arrivals_keep_their_rate(shape: float) -> None:
    offsets = arrivals.gamma(20_000, 10.0, np.random.default_rng(0), shape=shape)
    assert 20_000 / offsets[-1] == pytest.approx(10.0, rel=0.05)


def test_a_chat_sends_all_earlier_messages() -> None:
    chat = Chat(["a?", "b?"], {"model": "stub"})
    assert chat.next_body(None) == {
        "messages": [{"role": "user", "content": "a?"}],
        "model": "stub",
    }
    second = chat.next_body("yes")
    assert second is not None
    assert [message["content"] for message in second["messages"]] == ["a?", "yes", "b?"]
    assert chat.next_body("no") is None


def test_equal_hash_ids_of_a_trace_become_equal_tokens(tmp_path: object) -> None:
    path = tmp_path / "trace.jsonl"  # type: ignore[operator]
    line = '{"timestamp": 1500, "input_length": 700, "output_length": 3, "hash_ids": [7, %d]}\n'
    path.write_text(line % 8 + line % 9)
    (at, first), (_, second) = datasets.trace(path, SHAPE)
    one, two = (dialogue.next_body(None) for dialogue in (first, second))
    assert one is not None
    assert two is not None
    assert (at, len(one["prompt"]), one["prompt"][:512] == two["prompt"][:512]) == (1.5, 700, True)
    assert one["prompt"][512:] != two["prompt"][512:]


def test_words_instead_of_ids_ask_for_nothing_that_openai_does_not_know() -> None:
    shape = Shape(prompt_len=8, output_len=5, vocab_size=100, model="stub", as_text=True)
    (dialogue,) = datasets.random_prompts(1, shape, np.random.default_rng(0))
    body = dialogue.next_body(None)
    assert body is not None
    assert body.keys() == {"prompt", "max_tokens", "model", "temperature"}
    assert len(body["prompt"].split()) == 8


@pytest.mark.long
@pytest.mark.parametrize("suffix", long_but(("png", "html"), "png"))
async def test_a_run_leaves_its_figures_and_a_plot(
    stub_url: str, tmp_path: Path, suffix: str
) -> None:
    plot = tmp_path / f"plot.{suffix}"
    output = tmp_path / "run.json"
    command = [
        sys.executable,
        "-m",
        "headwater.bench.serve",
        f"--base-url={stub_url}/v1",
        "--num-requests=8",
        "--json",
    ]
    command += [
        "--workers=1",
        "--slo-ttft-ms=5000",
        f"--plot={plot}",
        f"--output={output}",
        "--output-len=4",
    ]
    command += ["--arrival=poisson", "--rate=100", "--warmup=2"]
    run = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await run.communicate()
    report = json.loads(printed)
    kept = json.loads(output.read_text())
    assert run.returncode == 0
    assert kept == {"settings": kept["settings"], **report}
    assert (report["requests"], report["goodput_share"], kept["settings"]["rate"]) == (
        8,
        1.0,
        100.0,
    )
    assert {"p50", "p90", "p95", "p99"} < report["itl_ms"].keys()
    begins = plot.read_bytes()[:15]
    assert begins == b"<!doctype html>" if suffix == "html" else begins.startswith(b"\x89PNG")


def test_a_plot_of_an_unknown_kind_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(
        typer.BadParameter, match=r"a plot is one of .png, .svg, .pdf, .html; got 'plot.gif'"
    ):
        check_plot(tmp_path / "plot.gif")


NUMBERS = [
    ("--num-requests=0", "equal to 1"),
    ("--concurrency=0", "equal to 1"),
    ("--prompt-len=0", "equal to 1"),
    ("--num-turns=0", "equal to 1"),
    ("--num-groups=0", "equal to 1"),
    ("--rate=0", "equal to 0.001"),
    ("--burstiness=0", "equal to 0.001"),
    ("--vocab-size=0", "equal to 11"),
    ("--workers=-1", "equal to 0"),
]


@pytest.mark.parametrize(("flag", "allowed"), NUMBERS, ids=[flag for flag, _ in NUMBERS])
def test_a_number_that_no_load_has_is_refused_by_its_flag(
    flag: str, allowed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    app.command()(run)
    with pytest.raises(SystemExit) as ended:
        app(["--base-url=http://127.0.0.1:1/v1", "--model=m", flag])
    name = flag.partition("=")[0]
    text = capsys.readouterr().err
    assert ended.value.code == 2
    assert f"Invalid value for '{name}': " in text
    assert allowed in text
