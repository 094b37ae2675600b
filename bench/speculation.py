"""`headwater bench speculation`: replays through an engine with speculation off and on, in turn.

The answers of replays are forced, so that recorded text measures acceptance and speed on any
weights, random ones too. Both ways share a process, an executor and its graphs. Each run has an
engine of its own, with an empty prefix cache, and a speculator that has learned nothing; within a
run later requests may draw on what earlier ones answered.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from headwater.engine_core.options import MTP, OFF, ExecutorOptions
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.progress import silent
from headwater.services.runtime.speculation import DRAFTERS

from .forced_answers import ForcedAnswers
from .program import check_choice, run_program
from .replays import replay
from .replays.replay import Exchange
from .speculation_figures import Case, table
from .speculation_runs import Bench
from .workloads import MODELS, TINY

RANDOM = "random"
ROWS = {"edits": (1, 16), "agent-turns": (1, 16), "chat": (1, 16), RANDOM: (1, 16, 256)}
"""Number of requests at once, by workload."""
TEMPERATURE = 0.6
OWN_TEMPERATURES = (0.0, 1.0)
MAX_MODEL_LEN = 8192
DEFAULT_SEATS = 256
"""Seats of an engine by default; they bound the positions that a step samples."""


def run(
    workload: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(ROWS)}; repeatable; none: all of them")
    ] = None,
    model: Annotated[
        str, typer.Option(help=f"demo, or random weights in the shape of {', '.join(MODELS)}")
    ] = "demo",
    model_folder: Annotated[Path | None, typer.Option(help="a converted model instead")] = None,
    rows: Annotated[
        list[int] | None, typer.Option(help="requests at once; repeatable; none: the workload's")
    ] = None,
    requests: Annotated[
        int, typer.Option(help="the first so many of a workload; 0: all, of random tokens 2 a row")
    ] = 0,
    skip: Annotated[
        int, typer.Option(min=0, help="so many of a workload are left out before the first")
    ] = 0,
    max_drafts: Annotated[int, typer.Option(help="drafted tokens of a request in a step")] = 15,
    drafter: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(DRAFTERS)}; repeatable; none: all")
    ] = None,
    draft_model: Annotated[
        Path | None, typer.Option(help="a converted model that drafts instead")
    ] = None,
    draft_heads: Annotated[
        Path | None, typer.Option(help="a folder of heads that draft instead")
    ] = None,
    mtp: Annotated[
        bool,
        typer.Option(
            "--mtp", help="the layer for multi-token prediction of the model's checkpoint drafts"
        ),
    ] = False,
    whole_drafts: Annotated[
        bool,
        typer.Option(
            "--whole-drafts",
            help="model, heads or layer draft --max-drafts tokens in each step, and nothing else",
        ),
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="at which tokens are drawn, before they are replaced")
    ] = TEMPERATURE,
    edited: Annotated[
        bool,
        typer.Option(
            "--edited", help="requests have penalties, biases, bad words and log probabilities"
        ),
    ] = False,
    own_answers: Annotated[
        bool,
        typer.Option(
            "--own-answers",
            help="nothing is forced: the model answers, greedily and at temperature 1",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    block_size: Annotated[int, typer.Option(help="tokens a KV block")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="token budget of a step")] = 8192,
    async_depth: Annotated[int, typer.Option(help="steps in flight")] = 2,
    load_format: Annotated[
        str, typer.Option(help="of random weights: dummy or dummy-uniform")
    ] = "dummy",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or fp8 on a GPU")] = "auto",
    kv_cache_memory: Annotated[
        int, typer.Option(help="bytes of the KV cache; 0: what the device leaves")
    ] = 0,
    threads: Annotated[int, typer.Option(help="of a CPU; 0: torch decides")] = 0,
    runs: Annotated[
        int, typer.Option(help="measured pairs of runs after a short one that is not")
    ] = 2,
    dry_run: Annotated[
        bool, typer.Option(help="a small part of each workload, on a tiny model")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print JSON only, a line as soon as it is known")
    ] = False,
) -> None:
    """Measure what speculation gains, on recorded answers."""
    drafters = drafter or list(DRAFTERS)
    temperatures = OWN_TEMPERATURES if own_answers else (temperature,)
    asked = _cases(
        workload or list(ROWS), rows or (), temperatures, (skip, requests), dry_run=dry_run
    )
    cases = [replace(case, is_edited=edited) for case in asked]
    longest = max(len(exchange.answer_ids) for case in cases for exchange in case.exchanges)
    measurements = []
    with ExitStack() as stack:
        folder, load_format = _model(
            model, model_folder, load_format, device=device, dry_run=dry_run, stack=stack
        )
        options = ExecutorOptions(
            model_folder=folder,
            load_format=load_format,
            device=device,
            num_threads=threads,
            block_size=block_size,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=max(DEFAULT_SEATS, *(case.rows for case in cases)),
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            async_depth=async_depth,
            kv_cache_dtype=kv_cache_dtype,
            max_draft_tokens=max_drafts,
            draft_model=draft_model,
            draft_heads=draft_heads,
            speculation=MTP if mtp else OFF,
        )
        if whole_drafts and draft_model is None and draft_heads is None and not mtp:
            allowed = "--draft-model, --draft-heads or --mtp"
            raise typer.BadParameter(f"--whole-drafts goes with {allowed}")
        forced = None if own_answers else ForcedAnswers(longest)
        bench = Bench(options, drafters, forced, whole_drafts=whole_drafts)
        stack.callback(bench.close)
        settings = {
            "model": model if model_folder is None else model_folder.name,
            "drafters": bench.drafters,
        }
        for case in cases:
            measurements.append(bench.measure(case, runs=runs))
            if as_json:
                print(
                    json.dumps(settings | {"max_drafts": max_drafts} | asdict(measurements[-1])),
                    flush=True,
                )
    if not as_json:
        Console().print(table(measurements))
    typer.echo(json.dumps([asdict(each) for each in measurements]))
    raise typer.Exit(1 if any(each.different_tokens for each in measurements) else 0)


def _cases(
    names: Sequence[str],
    rows: Sequence[int],
    temperatures: Sequence[float],
    part: tuple[int, int],
    *,
    dry_run: bool,
) -> Iterator[Case]:
    """Cases to measure. Without `rows`, the workload's numbers of rows are used. `part`: number of
    exchanges that are skipped, and number of those that follow, or 0 for all."""
    for name in names:
        check_choice("--workload", name, ROWS)
        for num_rows in (1, 2) if dry_run else rows or ROWS[name]:
            exchanges = _exchanges(name, num_rows, *part, dry_run=dry_run)
            for temperature in temperatures:
                yield Case(
                    workload=name, rows=num_rows, temperature=temperature, exchanges=exchanges
                )


def _exchanges(name: str, rows: int, skip: int, requests: int, *, dry_run: bool) -> list[Exchange]:
    if name == RANDOM:
        found = replay.random_exchanges(skip + (requests or max(4, 2 * rows)))[skip:]
    else:
        found = replay.read(name)[skip:][: requests or None]
        if not found:
            raise typer.BadParameter(
                f"--skip is {skip}; allowed: less than the {len(replay.read(name))} of {name}"
            )
    if not dry_run:
        return found
    return [
        replace(each, prompt_ids=each.prompt_ids[-96:], answer_ids=each.answer_ids[:48])
        for each in found[:3]
    ]


def _model(
    name: str,
    folder: Path | None,
    load_format: str,
    *,
    device: str,
    dry_run: bool,
    stack: ExitStack,
) -> tuple[Path, str]:
    """Folder and load format of a model."""
    if folder is not None:
        return folder, "auto"
    if name == "demo" and not dry_run:
        return pull(
            DEMO_NAME, cache_dir=default_cache_dir(), progress=silent, device=device
        ), "auto"
    check_choice("--model", name, ("demo", *MODELS))
    made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (made / "config.json").write_text(json.dumps(TINY if dry_run else MODELS[name]))
    return made, load_format


if __name__ == "__main__":
    run_program(run)
