from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from headwater.bench import gpu_suite
from headwater.bench.gpu_peers import ONE_GPU, TWO_GPUS
from headwater.bench.gpu_suite import SMALL_MODELS, Suite, main
from headwater.bench.part import FAILED, TOO_LATE, Row, run_named, run_part
from headwater.bench.source_version import source_version
from headwater.bench.workloads import CLUSTER_LOADS, WORKLOADS

PROGRAM = """
import sys, time
for name in sys.argv[1:]:
    if name == "bad":
        sys.exit(3)
    if name == "slow":
        time.sleep(600)
    print('{"id": "' + name + '"}', flush=True)
    print("not a row")
"""


def run(*ids: str, limit: float = 60.0) -> tuple[list[str], dict[str, str]]:
    reported: list[str] = []

    def receive(name: str, row: Row) -> None:
        assert row == {"id": name}
        reported.append(name)

    return reported, run_named(
        ids, "id", lambda left: [sys.executable, "-c", PROGRAM, *left], limit, receive
    )


def test_a_failed_test_costs_no_earlier_verdict() -> None:
    assert run("a", "bad", "b") == (["a", "b"], {"bad": f"{FAILED} with 3"})
    assert run("bad", "bad", "b") == ([], dict.fromkeys(("bad", "b"), f"{FAILED} with 3"))


def test_a_late_part_is_ended_and_keeps_its_rows() -> None:
    assert run("a", "slow", "b", limit=2.0)[1].keys() >= {"slow", "b"}
    assert run_part([sys.executable, "-c", PROGRAM, "a"], 0.0).why == TOO_LATE


def test_every_figure_has_one_to_beat() -> None:
    for peer in ONE_GPU, TWO_GPUS:
        assert peer.figures.keys() == peer.targets.keys()
    # With one request the times of a token count, which the table shows.
    assert ONE_GPU.figures.keys() == WORKLOADS.keys() | CLUSTER_LOADS.keys() - {"S1", "T1"}
    assert TWO_GPUS.figures.keys() <= WORKLOADS.keys()


@pytest.mark.parametrize(("is_alone", "longest"), [(True, 900.0), (False, 240.0)])
def test_tests_have_all_of_the_time_where_no_other_part_wants_it(
    is_alone: bool, longest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    class Noted:
        def __init__(self, flags: Sequence[str], limit: float, *, num_processes: int) -> None:
            limits.append(limit)

        def run(self) -> Any:
            return SimpleNamespace(plain=dict)

    monkeypatch.setattr(gpu_suite, "IsolatedTests", Noted)
    Suite(runs=1, limit=900.0, output=None, dry_run=False).test([], is_alone=is_alone)
    assert longest - 60 < limits[0] <= longest


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *settings, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_report_names_the_commit_or_outside_a_checkout_the_content(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    copy = tmp_path / "copy"
    other = tmp_path / "project" / "copy"
    for folder in (checkout, copy, other):
        (folder / "kernels").mkdir(parents=True)
        (folder / "kernels/gemm.py").write_text("1")
    git(checkout, "init", "-q")
    # A repository without a commit has none to name.
    tree = source_version(copy)
    assert source_version(checkout) == tree
    git(checkout, "add", ".")
    git(checkout, "commit", "-qm", "first")
    commit = git(checkout, "rev-parse", "--short", "HEAD")
    assert source_version(checkout) == commit
    (checkout / "kernels/gemm.py").write_text("2")
    assert source_version(checkout) == f"{commit}+dirty"
    assert tree.startswith("tree:")
    # The same wherever the copy lies, also in the checkout of something else.
    git(tmp_path / "project", "init", "-q")
    git(tmp_path / "project", "commit", "-qm", "first", "--allow-empty")
    assert source_version(other) == tree
    (copy / "kernels/gemm.py").write_text("2")
    assert source_version(copy) != tree


def test_a_report_says_that_the_peer_was_measured_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    suite = Suite(runs=1, limit=1.0, output=None, dry_run=True)
    assert suite.close()
    printed = capsys.readouterr()
    peer = json.loads(printed.out.splitlines()[-1])["peer"]
    assert peer["figures"] == ONE_GPU.figures
    assert peer["machine"].startswith("another machine")
    assert peer["date"] == "2026-11-21"
    words = " ".join(printed.err.split())
    assert "vLLM 0.23.0, elsewhere: measured 2026-11-21 on another machine" in words


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tensor-parallel-size=3"], "tensor_parallel_size is 3; allowed: 1 or 2"),
        (
            ["--tensor-parallel-size=2", "--part=serve"],
            "part is serve; allowed: tests, sums, compute, large",
        ),
    ],
)
def test_sizes_and_parts_without_figures_are_refused(flags: list[str], message: str) -> None:
    refused = CliRunner().invoke(_app(), [*flags, "--dry-run"], env={"COLUMNS": "300"})
    assert refused.exit_code == 2
    assert message in refused.output


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command()(main)
    return app


@pytest.mark.long
def test_the_whole_suite_runs_dry(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headwater.bench.gpu_suite",
        "--dry-run",
        f"--output={tmp_path / 'report'}",
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "report").read_text())
    assert report["missing"] == {}
    assert report["tests"]["collected"] > 200
    small = {name for name, workload in WORKLOADS.items() if workload.model in SMALL_MODELS}
    assert report["workloads"].keys() == small | {"D1", "D3"}
    assert report["workloads_uniform"].keys() == {"O5", "O6"}
    assert report["line"].keys() == CLUSTER_LOADS.keys()
    assert report["structured"]["schema_tokens_per_second"] > 0
