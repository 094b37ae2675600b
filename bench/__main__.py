"""`headwater bench NAME …`: becomes one of the benchmarks beside this file; each is a program of its own."""

from __future__ import annotations

import os
import sys

import typer

BENCHMARKS = {
    "serve": ("serve", "Drive an OpenAI-compatible server and tell what its users would feel."),
    "tune": ("tune", "Find the engine settings with the best throughput that keeps an objective."),
    "offline": ("offline", "Run a workload through the engine in this process."),
    "stub": ("stub_server", "A server that answers at once: the ceiling of the load generator."),
    "start": ("line_start", "Seconds from `headwater up` to the first token, and of each stage to be ready."),
    "structured": ("structured", "Throughput of answers that are held to a JSON schema against free ones."),
    "scheduler": ("scheduler_steps", "Host time of an engine step with the simulated executor."),
    "routing": ("routing_decision", "Time of a routing decision."),
    "index-events": ("index_events", "What it costs a gateway to know the caches of a thousand replicas."),
    "policies": ("policy_replay", "Replay traces through routing policies: hit rate and time to first token."),
    "replay": ("receipt_replay", "Score a gateway's logged routing decisions under other policies."),
    "cluster": ("cluster", "Real processes under a trace, undisturbed or broken by seed: what must hold."),
    "chaos": ("chaos", "Break a simulated cluster by seed and check what must hold."),
    "prefix-index": ("prefix_index", "What the prefix index in Redis takes and gives."),
    "prepare": ("prepare", "Time to prepare a prompt: template, tokens, hashes."),
    "output": ("output_path", "What the output processor makes of engine frames."),
    "sse": ("sse_path", "What a token costs between an engine's frame and the client's socket."),
    "line": ("line_load", "Drive a line of its own under the loads of the table, on random weights."),
    "dummy-model": ("dummy_model", "Write a model folder without weights, in the shape of a workload's model."),
    "gpu": ("gpu_suite", "Test and measure everything on a GPU: correctness, then the table of workloads."),
    "gateway": ("gateway_load", "What a gateway costs: overhead at a rate of requests, memory and CPU of streams."),
    "fairness": ("fairness", "What ten tenants are given of a line when one of them asks for far too much."),
    "isolation": ("isolation", "Whether a tenant feels in its first tokens what another has cached."),
    "kernels": ("gpu_kernels", "Time and check the kernels on a GPU."),
}
"""Name → module and one line of help."""

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure what docs/benchmarks.md records.")


def _add(name: str, module: str, summary: str) -> None:
    """A command that hands every flag on, `--help` included."""
    context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}

    @app.command(name, help=summary, add_help_option=False, context_settings=context_settings)
    def run(context: typer.Context) -> None:
        os.execv(sys.executable, [sys.executable, "-m", f"headwater.bench.{module}", *context.args])


for _name, (_module, _summary) in BENCHMARKS.items():
    _add(_name, _module, _summary)

if __name__ == "__main__":
    app(prog_name="headwater bench")
