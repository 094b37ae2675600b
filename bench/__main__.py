"""`headwater bench NAME …`: replaces itself by one of the benchmarks beside this file; each is a
program of its own."""

from __future__ import annotations

import os
import sys

import typer

from .program import BENCHMARKS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Measure what bench/results records, and render it.",
)


def _add(name: str, module: str, summary: str) -> None:
    """Adds a command that passes every flag on, `--help` included."""
    context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=summary, add_help_option=False, context_settings=context_settings)
    def run(context: typer.Context) -> None:
        os.execv(sys.executable, [sys.executable, "-m", f"headwater.bench.{module}", *context.args])


for _name, (_module, _summary) in BENCHMARKS.items():
    _add(_name, _module, _summary)

if __name__ == "__main__":
    app(prog_name="headwater bench")
