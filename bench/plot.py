"""Plots measurements as PNG, SVG, PDF or a page of HTML. Knows nothing about measuring."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from headwater.services.runtime.pip_line import pip_line

SUFFIXES = (".png", ".svg", ".pdf", ".html")


def check_plot(path: Path | None) -> None:
    """Checks a plot's path before anything is measured. Raises `typer.BadParameter` for a format
    that cannot be written."""
    if path is None:
        return
    if path.suffix not in SUFFIXES:
        raise typer.BadParameter(f"a plot is one of {', '.join(SUFFIXES)}; got {path.name!r}")
    try:
        import matplotlib  # noqa: F401, PLC0415 (an extra, wanted only by whoever plots)
    except ImportError:
        raise typer.BadParameter(f"plots need matplotlib: {pip_line('plots')}") from None


def plot_latencies(
    path: Path,
    seconds: Mapping[str, Sequence[float]],
    limits: Mapping[str, float | None],
    title: str,
    figures: str,
) -> None:
    """Cumulative shares of requests by latency, one panel a metric, objectives (ms) as lines."""
    figure = _figure(width=4 * len(seconds), height=3.6)
    for panel, (name, values) in zip(
        figure.subplots(1, len(seconds), squeeze=False)[0], seconds.items(), strict=True
    ):
        ordered = np.sort(np.asarray(values or [0.0])) * 1000
        panel.plot(
            ordered, np.arange(1, ordered.size + 1) / ordered.size * 100, drawstyle="steps-post"
        )
        if (limit := limits.get(name)) is not None:
            panel.axvline(limit, linestyle="--", color="tab:red", label=f"objective {limit:g} ms")
            panel.legend(loc="lower right")
        panel.set(xlabel=f"{name} (ms)", ylabel="% of samples", ylim=(0, 101), xlim=(0, None))
        panel.grid(alpha=0.3)
    figure.suptitle(title)
    _save(figure, path, title, figures)


def plot_curves(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    metric: str,
    title: str,
    figures: str,
) -> None:
    """Cumulative shares of samples (seconds, on a logarithmic scale), a panel for each group, a
    curve for each name."""
    figure = _figure(width=5.5 * len(panels), height=4)
    for panel, (group, curves) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name, values in curves.items():
            # As many points as can be distinguished.
            shares = np.linspace(0, 100, 400)
            panel.plot(np.percentile(values, shares), shares, label=name)
        panel.set(
            title=group, xlabel=f"{metric} (s)", ylabel="% of samples", ylim=(0, 101), xscale="log"
        )
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.suptitle(title)
    _save(figure, path, title, figures)


def plot_lines(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    axes: tuple[str, str],
    title: str,
    figures: str,
) -> None:
    """Points (x, y) joined by lines, a panel for each group, a line for each name; `axes` names
    both axes."""
    figure = _figure(width=4.2 * len(panels), height=3.4)
    for panel, (group, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name, points in lines.items():
            panel.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
        panel.set(title=group, xlabel=axes[0], ylabel=axes[1])
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    figure.suptitle(title)
    _save(figure, path, title, figures)


def plot_front(
    path: Path,
    points: Sequence[tuple[float, float, str, bool]],
    front: Sequence[tuple[float, float]],
    latency: str,
    figures: str,
) -> None:
    """Trials as (latency ms, tokens a second, name, keeps the objective), and the best of both as a
    line."""
    figure = _figure(width=7, height=4.5)
    panel = figure.subplots()
    for keeps, color, label in (
        (True, "tab:green", "keeps the objective"),
        (False, "tab:gray", "does not"),
    ):
        those = [point for point in points if point[3] is keeps]
        panel.scatter(
            [each[0] for each in those], [each[1] for each in those], color=color, label=label
        )
    panel.plot(
        [x for x, _ in front],
        [y for _, y in front],
        drawstyle="steps-post",
        color="tab:blue",
        label="front",
    )
    for place, rate, name, _ in points:
        panel.annotate(name, (place, rate), fontsize=6, xytext=(3, 3), textcoords="offset points")
    panel.set(
        xlabel=f"{latency} (ms)",
        ylabel="output tokens a second",
        title="Throughput against latency",
    )
    panel.grid(alpha=0.3)
    panel.legend()
    _save(figure, path, "Throughput against latency", figures)


def plot_shares(
    path: Path, shares: Mapping[str, tuple[Sequence[float], float]], description: str
) -> None:
    """Figures as shares of what they are compared with, a line each: the newest one, and pale those
    before. `description` is kept in the SVG's metadata; two drawings of the same shares are the
    same file."""
    from matplotlib import rc_context, ticker  # noqa: PLC0415 (as above)

    figure = _figure(width=8, height=1 + 0.22 * len(shares))
    panel = figure.subplots()
    for line, (before, newest) in enumerate(shares.values()):
        panel.plot(before, [line] * len(before), "o", color="tab:gray", alpha=0.4, markersize=4)
        panel.plot(
            [1, newest], [line, line], color="tab:green" if newest <= 1 else "tab:red", linewidth=1
        )
        panel.plot(newest, line, "o", color="tab:green" if newest <= 1 else "tab:red", markersize=5)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set(xscale="log", xlabel="share of target or peer; below 1 is better")
    panel.set_yticks(range(len(shares)), list(shares), fontsize=7)
    panel.set_ylim(len(shares) - 0.5, -0.5)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    panel.xaxis.set_minor_formatter("")
    panel.grid(alpha=0.3)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "headwater"}):
        figure.savefig(path, metadata={"Date": None, "Description": description})


def _figure(width: float, height: float) -> Any:
    # The figure alone, without pyplot's global state or a display.
    from matplotlib.figure import Figure  # noqa: PLC0415 (as above)

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path, title: str, figures: str) -> None:
    if path.suffix != ".html":
        figure.savefig(path, dpi=144)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    page = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
    path.write_text(f"{page}{svg[svg.index('<svg') :]}<pre>{html.escape(figures)}</pre>\n")
