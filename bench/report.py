"""`headwater bench report`: makes docs/benchmarks.md and a page and plot for each topic from
bench/results, or adds a row there. Measures nothing."""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from .plot import check_plot, plot_shares
from .program import program_name, run_program
from .report_pages import claims_of, claims_page, names_of, topic_page
from .result_rows import Row, RowError, append_row, by_series, read_rows
from .source_version import ROOT, source_version

RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs"
HEAD = "claims"
"""Stem of the file that begins docs/benchmarks.md; those of topics are named like their rows."""
Shares = dict[str, tuple[list[float], float]]
"""Keyed by figure: those before, and the newest one, as shares of a target or peer."""


def read_topics(results: Path = RESULTS) -> dict[str, list[Row]]:
    """Rows by topic. Raises `RowError`."""
    if not (paths := sorted(results.glob("*.jsonl"))):
        raise RowError(
            f"{results} holds no rows; the report is made in a checkout of the repository"
        )
    return {path.stem: read_rows(path) for path in paths}


def render(topics: dict[str, list[Row]], results: Path = RESULTS) -> dict[str, str]:
    """Pages by their path below docs/."""
    heads = {name: (results / f"{name}.md").read_text() for name in (HEAD, *topics)}
    pages = {
        f"benchmarks/{topic}.md": topic_page(topic, heads[topic], rows)
        for topic, rows in topics.items()
    }
    return {"benchmarks.md": claims_page(heads[HEAD], topics)} | pages


def shares_of(rows: list[Row]) -> Shares:
    """Ratios in a topic's plot: each series that is a claim, relative to its target and each of its
    peers."""
    found: Shares = {}
    for section in claims_of(rows).values():
        for name, series in zip(names_of([each[-1] for each in section]), section, strict=True):
            newest = series[-1]
            for other in [*newest.peers, *(["target"] if newest.target else [])]:
                beside = [
                    (row, row.target if other == "target" else row.peers.get(other))
                    for row in series
                ]
                ratios = [row.ratio(figure) for row, figure in beside if figure]
                # The scale is logarithmic.
                if 0 < ratios[-1] < math.inf:
                    before = [each for each in ratios[:-1] if 0 < each < math.inf]
                    found[f"{newest.section}{': ' * bool(name)}{name} / {other}"] = (
                        before,
                        ratios[-1],
                    )
    return found


def digest_of(shares: Shares) -> str:
    """Digest of a plot's data. The plot's file contains it, so that a plot is redrawn only when its
    data have changed."""
    return f"rows {hashlib.sha256(json.dumps(shares).encode()).hexdigest()[:16]}"


def write_report(docs: Path = DOCS) -> list[Path]:
    """Writes pages and plots that differ. Returns their paths."""
    topics = read_topics()
    changed = []
    for name, text in render(topics).items():
        path = docs / name
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            changed.append(path)
    for topic, rows in topics.items():
        path = docs / "benchmarks" / f"{topic}.svg"
        shares = shares_of(rows)
        if not path.exists() or digest_of(shares) not in path.read_text():
            check_plot(path)
            plot_shares(path, shares, digest_of(shares))
            changed.append(path)
    return changed


def add_row(path: Path, what: str, metric: str, values: list[float], **others: str) -> Row:
    """Adds a figure of this commit to a series that exists; what is not given is as in its newest
    row, notes excepted. Raises `RowError`."""
    series = [
        rows for (_, *names), rows in by_series(read_rows(path)).items() if names == [what, metric]
    ]
    if len(series) != 1:
        known = "more than one" if series else "no"
        raise RowError(
            f"{path.name} has {known} series of {what!r} and {metric!r}; write its row by hand"
        )
    value = values if len(values) > 1 else values[0]
    given = {name: text for name, text in others.items() if text}
    now = {
        "date": datetime.date.today(),
        "commit": source_version(),
        "value": value,
        "interval": None,
        "note": "",
    }
    return append_row(path, msgspec.structs.asdict(series[0][-1]) | now | given)


def main(
    add: Annotated[
        str, typer.Option(metavar="TOPIC", help="add a row to bench/results/TOPIC.jsonl first")
    ] = "",
    what: Annotated[str, typer.Option(help="with --add: the series' subject")] = "",
    metric: Annotated[str, typer.Option(help="with --add: the series' metric")] = "",
    value: Annotated[
        list[float] | None, typer.Option(help="with --add: a reading; again for each of several")
    ] = None,
    machine: Annotated[
        str, typer.Option(help="with --add: where it was measured, if elsewhere than before")
    ] = "",
    command: Annotated[
        str, typer.Option(help="with --add: what was typed, if it is not what was before")
    ] = "",
    note: Annotated[str, typer.Option(help="with --add: what a reader must know of it")] = "",
) -> None:
    """Render bench/results into docs/benchmarks.md and docs/benchmarks/."""
    try:
        if add:
            if not (what and metric and value):
                raise RowError("--add wants --what, --metric and --value")
            path = RESULTS / f"{add}.jsonl"
            if not path.exists():
                raise RowError(f"no topic {add!r}; there are {', '.join(read_topics())}")
            add_row(path, what, metric, value, machine=machine, command=command, note=note)
        for path in write_report():
            typer.echo(path.relative_to(ROOT))
    except RowError as error:
        sys.exit(f"{program_name()}: {error}")


if __name__ == "__main__":
    run_program(main)
