"""The benchmarks by the names under which `headwater bench` knows them; each is a program of its
own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import typer

from headwater.engine_core.config import ConfigError
from headwater.services.runtime.settings import SettingError

from .development import DevelopmentMissing
from .found_server import ServerNotFound
from .own_cluster import StartFailed
from .trace_file import TraceError

BENCHMARKS = {
    "serve": (
        "serve",
        "Load an OpenAI-compatible server; measure throughput, TTFT, TPOT, ITL and goodput.",
    ),
    "tune": (
        "tune",
        "Find the engine settings with the best throughput that meet a latency objective.",
    ),
    "queue": (
        "queue_policies",
        "Queue policies beside order of arrival: time to first token, goodput, fairness.",
    ),
    "adapters": ("adapters", "Decode tokens a second of rows with adapters, beside rows without."),
    "encoders": ("encoders", "Texts a second of an encoder, beside plain torch on a CPU."),
    "rerank": ("rerank", "Pairs a second of a cross-encoder, beside sentence-transformers."),
    "served-encoder": (
        "served_encoder",
        "Latencies of texts that a deployment embeds, beside those in one process.",
    ),
    "offline": ("offline", "Run a workload through the engine in this process."),
    "accuracy": (
        "accuracy",
        "Accuracy of packed or rounded weights: perplexity, top-1 agreement, KL.",
    ),
    "report": ("report", "Render bench/results into docs/benchmarks.md, or add a row there."),
    "stub": (
        "stub_server",
        "A server that answers at once, to measure the load generator's own limit.",
    ),
    "start": (
        "cluster_start",
        "Seconds from `headwater up` to the first token, and until each stage is ready.",
    ),
    "restart": (
        "engine_restart",
        "Pauses of answers whose engine is killed, and what its next life does meanwhile.",
    ),
    "structured": (
        "structured",
        "Throughput of answers that must match a JSON schema, against free ones.",
    ),
    "turns": ("turns", "Two engines that take turns on one device: memory, switches, old prompts."),
    "model-trace": (
        "model_trace",
        "Models of one device asked for by a Zipf trace: in turns, beside separate starts.",
    ),
    "scheduler": ("scheduler_steps", "Host time of an engine step with the simulated executor."),
    "drafters": ("drafters", "Host time of the look-up drafters, for each row and step."),
    "routing": ("routing_decision", "Time of a routing decision."),
    "index-events": ("index_events", "Cost of a gateway's index of a thousand replicas' caches."),
    "replay": (
        "receipt_replay",
        "Score a gateway's logged routing decisions under other policies.",
    ),
    "prefix-index": ("prefix_index", "Cost of writing and reading the prefix index in Redis."),
    "prepare": ("prepare", "Time to prepare a prompt: template, tokens, hashes."),
    "sse": ("sse_path", "Cost of a token from the engine's frame to the client's socket."),
    "line": (
        "cluster_load",
        "Measure a cluster that it starts, on random weights, under the loads of the benchmarks.",
    ),
    "engine": ("engine_load", "Measure an engine alone under the loads of `line`."),
    "dummy-model": (
        "dummy_model",
        "Write a model folder without weights, in the shape of a workload's model.",
    ),
    "gpu": (
        "gpu_suite",
        "Test and measure everything on a GPU: correctness, then the table of workloads.",
    ),
    "gateway": (
        "gateway_load",
        "Cost of a gateway: overhead at a rate of requests, memory and CPU of streams.",
    ),
    "fairness": (
        "fairness",
        "Shares of ten tenants of a cluster when one of them sends far too many requests.",
    ),
    "hostile": (
        "hostile",
        "What a neighbour notices of hostile bodies: its first token, its structured answers.",
    ),
    "isolation": (
        "isolation",
        "Whether a tenant's time to first token shows what another tenant has cached.",
    ),
    "exactness": (
        "exactness",
        "Whether answers have the same bits alone and in a batch, on many model shapes.",
    ),
    "combinations": (
        "combinations",
        "Test every two capabilities together: tokens as promised, or refused by name.",
    ),
    "unread": (
        "unread_streams",
        "Time to first token of a tenant while clients of other streams do not read.",
    ),
    "speculation": (
        "speculation",
        "Replay recorded answers with speculation off and on: speed and acceptance.",
    ),
    "kernels": ("gpu_kernels", "Time and check the kernels on a GPU."),
    "kv-swap": (
        "kv_swap",
        "Prompts that a GPU has evicted: computed again, or loaded from host memory.",
    ),
    "kv-tiers": (
        "kv_tiers",
        "Bandwidth of KV blocks to host memory and a disk, beside that of the bus and the disk.",
    ),
    "cache-bytes": (
        "cache_bytes",
        "Memory of the KV cache of published shapes, by kind of layer, and what it wastes.",
    ),
    "snapshot-hits": (
        "snapshot_hits",
        "Prefix hits of a model with states: at its snapshots, beside one at each border.",
    ),
    "agents": (
        "agents",
        "Sessions of agents on one engine: goodput by order of eviction, on a GPU or simulated.",
    ),
    "eviction": (
        "eviction",
        "Orders of eviction on traces of agents: by value, LRU, informed, Belady's.",
    ),
    "kv-overhead": ("kv_overhead", "Cost of a tier behind the KV cache while no memory is short."),
    "hand-over": (
        "hand_over",
        "Blocks that one engine pulls from another; engines with roles beside engines without.",
    ),
    "peer-sums": ("peer_sums", "Time sums over the memory of several GPUs, beside NCCL."),
    "peer-draws": (
        "peer_draws",
        "Time filtered draws over the logits of several GPUs, gathered and not.",
    ),
    "attention": (
        "attention_library",
        "Attention on a GPU, compared with other libraries, at the power limit.",
    ),
}
"""Benchmarks by name, each with its module and one line of help."""


WRONG_INPUT = 2
"""Exit code for invalid arguments, as of the parser of the command line, and for invalid files that
they name."""


def run_program(main: Callable[..., Any]) -> None:
    """Runs a benchmark's module as `typer.run` does; its help shows the benchmark's name."""
    app = typer.Typer(add_completion=False)
    app.command()(main)
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Runs a benchmark of several commands; what stops it is one message on standard error, and no
    traceback."""
    try:
        app(prog_name=program_name())
    except (ConfigError, SettingError, ServerNotFound, DevelopmentMissing, StartFailed) as error:
        sys.exit(f"{program_name()}: {error}")
    except TraceError as error:
        print(f"{program_name()}: {error}", file=sys.stderr)
        sys.exit(WRONG_INPUT)


def check_choice(option: str, given: str, allowed: Iterable[str], between: str = ", ") -> None:
    """Raises `typer.BadParameter` for a value of an option that is not among those allowed."""
    if given not in (choices := list(allowed)):
        raise typer.BadParameter(f"{option} is {given!r}; allowed: {between.join(choices)}")


def program_name() -> str:
    """Name of the running module in a terminal."""
    spec = sys.modules["__main__"].__spec__
    name = "" if spec is None else spec.name.removesuffix(".__main__")
    module = name.removeprefix("headwater.bench.")
    known = (f"headwater bench {name}" for name, (file, _) in BENCHMARKS.items() if file == module)
    return next(known, f"python -m {name}" if name else sys.argv[0])
