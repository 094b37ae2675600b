"""`headwater bench NAME …`: runs one of the benchmarks beside this file; each is a program of its own."""

from __future__ import annotations

import runpy
import sys

import typer

BENCHMARKS = {
    "serve": "Drive an OpenAI-compatible server and tell what its users would feel.",
    "stub": "A server that answers at once: the ceiling of the load generator.",
    "scheduler": "Host time of an engine step with the simulated executor.",
}
MODULES = {
    "serve": "serve",
    "stub": "stub_server",
    "scheduler": "scheduler_steps",
}

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure what docs/benchmarks.md records.")


def _add(name: str, summary: str) -> None:
    """A command that hands every flag on, `--help` included."""
    context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=summary, add_help_option=False, context_settings=context_settings)
    def run(context: typer.Context) -> None:
        sys.argv = [f"headwater bench {name}", *context.args]
        runpy.run_module(f"headwater.bench.{MODULES[name]}", run_name="__main__", alter_sys=True)


for _name, _summary in BENCHMARKS.items():
    _add(_name, _summary)

if __name__ == "__main__":
    app(prog_name="headwater bench")
