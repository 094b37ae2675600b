"""Rows of bench/results, and the pages that `headwater bench report` makes of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.bench.program import BENCHMARKS
from headwater.bench.report import (
    RESULTS,
    add_row,
    digest_of,
    read_topics,
    render,
    shares_of,
    write_report,
)
from headwater.bench.report_pages import claims_of, topic_page
from headwater.bench.result_rows import RowError, by_series, read_rows

ROOT = Path(__file__).parents[2]
TOPICS = read_topics()
COMMITS = "allowed: 7 to 40 hexadecimal digits of a commit without changes"
ROW: dict[str, Any] = {
    "date": "2026-11-21",
    "commit": "d14ad46",
    "machine": "A",
    "section": "Start",
    "what": "first token",
    "command": "headwater bench start",
    "metric": "seconds",
    "unit": "s",
    "value": 5.5,
}


def row(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in (ROW | fields).items() if value is not None}


def rows_in(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "cpu.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return path


def git(*arguments: str) -> str:
    command = ["git", "-C", ROOT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_the_pages_are_those_of_the_rows() -> None:
    pages = render(TOPICS)
    stale = [name for name, text in pages.items() if (ROOT / "docs" / name).read_text() != text]
    assert stale == [], "run `headwater bench report`"
    assert {path.name for path in (ROOT / "docs" / "benchmarks").glob("*.md")} == {
        f"{topic}.md" for topic in TOPICS
    }


@pytest.mark.parametrize("topic", TOPICS)
def test_a_plot_is_that_of_the_rows(topic: str) -> None:
    plot = (ROOT / "docs" / "benchmarks" / f"{topic}.svg").read_text()
    assert digest_of(shares_of(TOPICS[topic])) in plot, "run `headwater bench report`"


def test_the_newest_claims_are_few_and_the_topics_at_most_six() -> None:
    lines = (ROOT / "docs" / "benchmarks.md").read_text().splitlines()
    assert 10 < sum(line.startswith("|") for line in lines) <= 25
    assert len(TOPICS) <= 6


@pytest.mark.parametrize("topic", TOPICS)
def test_the_command_of_a_claim_is_one_that_there_is(topic: str) -> None:
    newest = [series[-1] for section in claims_of(TOPICS[topic]).values() for series in section]
    commands = [part.strip() for each in newest for part in each.command.split(";")]
    unknown = []
    for command in commands:
        program, *words = command.split()
        known = {
            "headwater": lambda rest: rest[0] == "bench" and rest[1] in BENCHMARKS,
            "python": lambda rest: (
                rest[0] == "-m" and list(ROOT.glob(f"{rest[1].replace('.', '/')}*"))
            ),
            "pytest": lambda rest: (ROOT / rest[0]).exists(),
        }
        if program not in known or not known[program](words):
            unknown.append(command)
    assert unknown == []


def test_every_commit_is_in_the_history() -> None:
    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no git history here")
    history = git("rev-list", "HEAD").split()
    commits = {each.commit for rows in TOPICS.values() for each in rows}
    lengths = {len(each) for each in commits}
    known = {commit[:length] for commit in history for length in lengths}
    assert sorted(commits - known) == []


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        (row(machine=None), "cpu.jsonl:2: Object missing required field `machine`"),
        (row(command=""), "cpu.jsonl:2: Expected `str` of length >= 1 - at `$.command`"),
        (row(commit="tree:d14ad46"), f"cpu.jsonl:2: commit is 'tree:d14ad46'; {COMMITS}"),
        (row(value="fast"), "cpu.jsonl:2: Expected `float | array`, got `str` - at `$.value`"),
        (row(speed=1), "cpu.jsonl:2: Object contains unknown field `speed`"),
    ],
    ids=["without machine", "empty command", "commit", "value", "unknown field"],
)
def test_a_row_that_is_none_is_named_by_file_and_line(
    tmp_path: Path, wrong: dict[str, Any], reported: str
) -> None:
    with pytest.raises(RowError, match=f"^{re.escape(reported)}$"):
        read_rows(rows_in(tmp_path, ROW, wrong))


def test_the_newest_row_of_a_series_is_on_its_page(tmp_path: Path) -> None:
    newest = row(
        date="2026-11-23",
        value=[5.0, 6.0],
        target=5.5,
        peers={"other": 11, "d14ad46": 6},
        note="cold | warm",
    )
    ready = row(what="ready", value=1234.5, claim=True)
    rows = read_rows(rows_in(tmp_path, newest, row(), ready))
    assert [[each.median for each in series] for series in by_series(rows).values()] == [
        [5.5, 5.5],
        [1234.5],
    ]
    page = topic_page("cpu", "# On a CPU", rows)
    assert "`headwater bench start`, seconds, A, d14ad46, s:\n" in page
    assert "| first token | 5–6 | ≤ 5.5 | 0.50 × other |" in page
    assert "| ready | 1,234 |  |  |" in page
    assert page.count("| first token |") == 1
    assert "cold" not in page, "notes stay in the rows"


def test_what_rows_of_a_command_share_is_written_once_above_their_table(tmp_path: Path) -> None:
    claims = row(claim=True), row(what="a | b", machine="B", commit="c45458e", claim=True)
    rows = read_rows(rows_in(tmp_path, *claims))
    page = topic_page("cpu", "# On a CPU", rows)
    assert "`headwater bench start`, seconds, s:\n" in page
    assert "|  | machine | figure |" in page
    assert "| a &#124; b | B | 5.5 |" in page


def test_a_figure_that_no_command_repeats_is_in_the_rows_alone(tmp_path: Path) -> None:
    lost = row(date="2026-11-23", command="headwater bench offline --gemv")
    ready = row(section="Ready", what="ready", target=6)
    bare = row(section="Bare", what="bare")
    gained = row(section="Gained", what="ready", target=1, metric="time, of that of 1f6305f")
    rows = read_rows(rows_in(tmp_path, row(), lost, ready, bare, gained))
    page = topic_page("cpu", "# On a CPU", rows)
    assert "## Ready" in page
    assert "## Start" not in page, "its newest row has no command"
    assert "## Bare" not in page, "it is compared with nothing"
    assert "## Gained" not in page, "it is compared with an earlier commit"


@pytest.mark.parametrize(
    ("fields", "met", "ratio"),
    [
        ({"value": 4, "target": 5}, "yes", 0.5),
        ({"value": [4, 6], "target": 5}, "in part", 0.625),
        ({"value": 4, "interval": [3, 6], "target": 5}, "no", 0.5),
        ({"value": 16, "better": "more", "target": 15}, "yes", 0.5),
        ({"value": 4}, "", 0.5),
    ],
)
def test_a_target_is_met_by_all_readings_and_by_the_interval(
    tmp_path: Path, fields: dict[str, Any], met: str, ratio: float
) -> None:
    (found,) = read_rows(rows_in(tmp_path, row(**fields)))
    assert (found.met, found.ratio(8)) == (met, ratio)


def test_another_reading_is_added_with_what_the_series_has(tmp_path: Path) -> None:
    path = rows_in(tmp_path, row(target=15, claim=True, note="beside others"))
    text = path.read_text()
    wanted = (
        "^"
        + re.escape("cpu.jsonl has no series of 'last token' and 'seconds'; write its row by hand")
        + "$"
    )
    with pytest.raises(RowError, match=wanted):
        add_row(path, "last token", "seconds", [1.0])
    with pytest.raises(
        RowError, match=f"^not added to cpu.jsonl: commit is 'd14ad46.dirty'; {COMMITS}$"
    ):
        add_row(path, "first token", "seconds", [1.0], commit="d14ad46+dirty")
    assert path.read_text() == text
    add_row(path, "first token", "seconds", [5.0, 5.2], commit="c45458e", machine="A, load 2")
    added = read_rows(path)[-1]
    assert (added.value, added.commit, added.machine, added.note) == (
        [5.0, 5.2],
        "c45458e",
        "A, load 2",
        "",
    )
    assert (added.target, added.claim, added.command) == (15, True, ROW["command"])


@pytest.mark.long
def test_a_report_writes_what_differs(tmp_path: Path) -> None:
    written = {str(path.relative_to(tmp_path)) for path in write_report(tmp_path)}
    assert written == {"benchmarks.md"} | {
        f"benchmarks/{each}{end}" for each in TOPICS for end in (".md", ".svg")
    }
    assert write_report(tmp_path) == []


@pytest.mark.long
def test_the_command_says_what_it_lacks() -> None:
    topics = ", ".join(sorted(path.stem for path in RESULTS.glob("*.jsonl")))
    command = [
        sys.executable,
        "-m",
        "headwater.bench.report",
        "--add=gpu",
        "--what=a",
        "--metric=b",
        "--value=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (
        1,
        f"headwater bench report: no topic 'gpu'; there are {topics}\n",
    )
