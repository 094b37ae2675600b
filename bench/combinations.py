"""`headwater bench combinations`: tests every capability beside every other, and writes
docs/combinations.md from the results.

Runs `tests/combinations` on one platform, notes each cell with the commit and the day in
docs/combinations.json, and renders the page from that file. Knows no capability: names and order
are those of the cells that ran.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .development import check_development
from .part import run_part
from .program import check_choice, run_program
from .source_version import ROOT, source_version

TESTS = "tests/combinations"
RESULTS = ROOT / "docs" / "combinations.json"
PAGE = ROOT / "docs" / "combinations.md"
DEMO_TESTS = "cells_of_the_demo_model"
PLATFORMS = {
    "cpu": (
        ("-m", "not gpu", "-k", f"not {DEMO_TESTS}"),
        "random weights on a CPU; the simulated executor where only a GPU serves it",
    ),
    "demo": (("-k", DEMO_TESTS), "the demo model on a CPU"),
    "gpu": (("-m", "gpu"), "random weights on an NVIDIA GPU"),
}
"""Platforms, each with the flags by which pytest selects its cells, and a description."""
NUM_WORKERS = {"cpu": 2, "gpu": 4}
"""Number of processes that run a platform's cells side by side; 1 for other platforms. Cells of an
engine share nothing with those of a cluster; on a GPU the cells of engines are divided too."""
FAILED = "failed"
REFUSED = "refused"
NOT_SEEN = "not run"
EQUAL = "equal"
Cells = dict[str, dict[str, Any]]
States = Mapping[str, tuple[str, ...]]
"""Cells by name, `first × second`: `place` in the table, and the result `seen` on each platform
with its commit and date."""

HEAD = """\
# Combinations of capabilities

Each capability of the engine and of the stages above it is tested together with each other one. A test asks for both at
once and compares tokens (and log probabilities, to the bit) with each alone, or checks the error that refuses the pair
and names it. A pair that no column names gives the tokens that it promises on every platform. Rows do not repeat a
capability whose own row has "all" in that column.

[combinations.json](combinations.json) has each pair with what was seen, the commit and the day. `headwater bench
combinations --render` writes this page from that file: do not edit it.
[CONTRIBUTING.md](../CONTRIBUTING.md#add-a-capability) says how a capability gets its row.

"""
COLUMNS: tuple[tuple[str, States], ...] = (
    ("refused with", {"cpu": (REFUSED,), "gpu": (REFUSED,)}),
    ("refused on a CPU with", {"cpu": (REFUSED,), "gpu": (EQUAL, NOT_SEEN)}),
    ("refused on a GPU with", {"cpu": (EQUAL, NOT_SEEN), "gpu": (REFUSED,)}),
    ("not run on a GPU with", {"cpu": (EQUAL,), "gpu": (NOT_SEEN,)}),
    ("failed on a CPU with", {"cpu": (FAILED,)}),
    ("failed on a GPU with", {"gpu": (FAILED,)}),
)
"""Columns of the page, and the results by platform of the pairs that each names."""


def main(
    platform: Annotated[str, typer.Option(help="cpu, demo or gpu")] = "cpu",
    render: Annotated[
        bool, typer.Option("--render", help="run nothing: render the page from the results")
    ] = False,
    write: Annotated[
        bool, typer.Option(help="note what was seen in docs/combinations.json and on the page")
    ] = False,
    limit: Annotated[float, typer.Option(help="seconds")] = 1800.0,
    collect: Annotated[
        bool, typer.Option(help="run nothing: count the cells that would run")
    ] = False,
) -> None:
    """Run the cells of a platform; the last line is all of them as JSON."""
    check_choice("--platform", platform, PLATFORMS)
    if render:
        PAGE.write_text(page(read_results()))
        return
    check_development("the table of combinations")
    # The tests run on the tree as it is now.
    commit = source_version()
    lines, why = _run(platform, limit, ["--collect-only"] if collect else [])
    collected = next((len(line["collected"]) for line in lines if "collected" in line), 0)
    if collect:
        print(json.dumps({"collected": collected, "why": why}))
        raise typer.Exit(0 if collected else 1)
    seen = cells_seen(lines)
    if write:
        # Other tests of the folder are collected with the cells.
        is_whole = (
            platform == "cpu" and len({line["id"] for line in lines if "id" in line}) == collected
        )
        note(seen, platform, commit, forget=is_whole)
    states = {name: cell["seen"] for name, cell in seen.items()}
    failed = sum(state.startswith(FAILED) for state in states.values())
    print(
        json.dumps({"passed": len(states) - failed, "failed": failed, "why": why, "cells": states})
    )
    raise typer.Exit(0 if states and not failed and not why else 1)


def _run(platform: str, limit: float, more: Iterable[str]) -> tuple[list[dict[str, Any]], str]:
    """Runs cells; returns the lines of `pytest_results`, and the way pytest ended if not well."""
    with tempfile.TemporaryDirectory(prefix="headwater-combinations-") as folder:
        path = Path(folder) / "results"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "headwater.bench.pytest_results"]
        command += [f"--results-file={path}", *PLATFORMS[platform][0], TESTS, *more]
        if platform in NUM_WORKERS:
            # A plugin for benchmarks, where there is one, warns of workers.
            command += ["-n", str(NUM_WORKERS[platform]), "-p", "no:benchmark"]
        outcome = run_part(command, limit, cwd=ROOT)
        return [json.loads(line) for line in path.read_text().splitlines()], outcome.why


def cells_seen(lines: Iterable[Mapping[str, Any]]) -> Cells:
    """Result of each cell: its own words, or the first line of its error."""
    found: Cells = {}
    for line in lines:
        cell = line.get("properties", {}).get("cell")
        if cell is None or line["phase"] == "teardown":
            continue
        state = (
            cell.get("seen", "") if line["outcome"] == "passed" else f"{FAILED}: {line['error']}"
        )
        if line["phase"] == "call" or line["outcome"] == "failed":
            found[cell["name"]] = {"place": cell["place"], "seen": state}
    return found


def note(seen: Cells, platform: str, commit: str, *, forget: bool) -> None:
    """Adds results to the file's. Results of other platforms for the same cells stay. With
    `forget`, cells without a new result are dropped."""
    before = read_results()
    today = time.strftime("%Y-%m-%d", time.gmtime())
    kept = set(seen) if forget else before.keys() | seen.keys()
    results: Cells = {}
    for name in sorted(kept, key=lambda each: (seen.get(each) or before[each])["place"]):
        platforms = dict(before.get(name, {}).get("platforms", {}))
        if name in seen:
            platforms[platform] = {"seen": seen[name]["seen"], "commit": commit, "date": today}
        results[name] = {"place": (seen.get(name) or before[name])["place"], "platforms": platforms}
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(results))


def read_results() -> Cells:
    results: Cells = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results


def page(results: Cells) -> str:
    """The page, rendered from the results alone."""
    names = [
        name.split(" × ")[0]
        for name, cell in results.items()
        if cell["place"][0] == cell["place"][1]
    ]
    seen = {tuple(cell["place"]): _seen(cell["platforms"]) for cell in results.values()}
    columns = [_column(names, seen, states) for _, states in COLUMNS]
    rows = [[f"**{name}**", *(column[name] for column in columns)] for name in names]
    table = [["capability", *(title for title, _ in COLUMNS)], *rows]
    used = [k for k in range(len(table[0])) if k == 0 or any(row[k] for row in rows)]
    lines = [f"| {' | '.join(row[k] for k in used)} |" for row in table]
    lines.insert(1, "|---" * len(used) + "|")
    return HEAD + "\n".join(lines) + "\n"


def _column(
    names: list[str], seen: Mapping[tuple[int, ...], Mapping[str, str]], states: States
) -> dict[str, str]:
    """Cells of a column by row: the capabilities whose pairs with the row's have `states`, or those
    without where these are fewer."""

    def is_found(i: int, j: int) -> bool:
        pair = seen[min(i, j), max(i, j)]
        return all(pair[platform] in allowed for platform, allowed in states.items())

    found = {name: [is_found(i, j) for j in range(len(names))] for i, name in enumerate(names)}
    with_most = {name for name, row in found.items() if 2 * sum(row) > len(names)}
    cells = {}
    for name, row in found.items():
        wanted = name not in with_most
        listed = [
            other
            for other, is_in in zip(names, row, strict=True)
            if is_in is wanted and not (wanted and other in with_most)
        ]
        beginning = "" if wanted else "all but " if listed else "all"
        cells[name] = beginning + ", ".join(listed)
    return cells


def _seen(platforms: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """State of a pair on each platform, in one word."""
    states = {name: platforms.get(name, {}).get("seen", NOT_SEEN) for name in PLATFORMS}
    return {name: _word(state) for name, state in states.items()}


def _word(state: str) -> str:
    return next((word for word in (FAILED, REFUSED, NOT_SEEN) if state.startswith(word)), EQUAL)


if __name__ == "__main__":
    run_program(main)
