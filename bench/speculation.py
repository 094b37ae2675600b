"""`headwater bench speculation`: replays through an engine with speculation off and on, in turn.

The answers of replays are forced, so that recorded text measures acceptance and speed on any weights, random ones too.
Both ways share a process, an executor and its graphs. Each run has an engine of its own, with an empty prefix cache,
and a speculator that has learned nothing; within a run later requests may draw on what earlier ones answered.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headwater.bench.forced_answers import ForcedAnswers
from headwater.bench.program import run_program
from headwater.bench.replays import replay
from headwater.bench.replays.replay import Exchange
from headwater.bench.speculated_run import FIRST_SEED, SpeculatedRun, run_exchanges
from headwater.bench.workloads import MODELS, TINY
from headwater.engine_core.executors.build import build_executor
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.scheduling.speculator import Speculator
from headwater.services.engine.settings import EngineSettings
from headwater.services.engine.speculation import build_speculator
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.progress import silent
from headwater.services.speculation import DRAFTERS

DEMO = "smollm2-135m-instruct"
RANDOM = "random"
ROWS = {"edits": (1, 16), "agent-turns": (1, 16), "chat": (1, 16), RANDOM: (1, 16, 256)}
"""Requests at once, by workload."""
TEMPERATURE = 0.6
MAX_MODEL_LEN = 8192
WARM_UP_LEN = 24
"""Tokens of answers before the first measured run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """The best run with speculation off or on; engine's times are microseconds of a step."""

    seconds: float
    tokens_per_second: float
    token_ms: float
    """Of a token after the first one of an answer."""
    steps: int
    tokens_per_step: float
    """Of a request."""
    engine_us: float
    """Scheduling, drafting and settling."""
    launch_us: float
    """On a GPU: telling it the step. On a CPU: the step."""

    @classmethod
    def of(cls, run: SpeculatedRun) -> Way:
        return cls(
            seconds=round(run.seconds, 4),
            tokens_per_second=round(run.tokens_per_second, 1),
            token_ms=round(run.token_ms, 4),
            steps=run.num_steps,
            tokens_per_step=round(run.tokens_per_step, 3),
            engine_us=round(run.engine_seconds / run.num_steps * 1e6, 1),
            launch_us=round(run.launch_seconds / run.num_steps * 1e6, 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    workload: str
    model: str
    rows: int
    drafters: str
    max_drafts: int
    temperature: float
    is_forced: bool
    requests: int
    prompt_tokens: int
    answer_tokens: int
    speedup: float
    """Tokens a second with speculation over those without, prompts being computed in both."""
    decode_speedup: float
    """The same of the time from an answer's first token to its last."""
    drafted: int
    accepted: int
    acceptance: float
    different_tokens: int
    """Places in which answers differ, all runs counted; of forced answers also from what is forced."""
    off: Way
    on: Way
    runs: list[tuple[float, float]]
    """Seconds, off and on."""


class Bench:
    """One executor, and engines over it."""

    def __init__(self, options: ExecutorOptions, drafters: Sequence[str], forced: ForcedAnswers | None) -> None:
        with nullcontext() if forced is None else forced.installed():
            self.executor, self.config, self._facts = build_executor(options, lambda phase, done, total: None)
        self._forced = forced
        self._settings = EngineSettings(
            model_folder=options.model_folder,
            block_size=options.block_size,
            drafters=tuple(drafters),
            max_draft_tokens=options.max_draft_tokens,
        )
        self.executor.warm_up()
        while self.executor.prepare():
            pass

    def measure(
        self, exchanges: Sequence[Exchange], *, rows: int, runs: int, temperature: float
    ) -> tuple[list[tuple[SpeculatedRun, SpeculatedRun]], int]:
        """Runs off and on, in turn, and the number of tokens that are not what they should be."""
        short = [replace(each, answer_ids=each.answer_ids[:WARM_UP_LEN]) for each in exchanges[:rows]]
        self._pair(short, rows, temperature)
        pairs = [self._pair(exchanges, rows, temperature) for _ in range(runs)]
        first = pairs[0][0].token_ids if self._forced is None else [each.answer_ids for each in exchanges]
        return pairs, sum(_num_different(first, run.token_ids) for pair in pairs for run in pair)

    def _pair(
        self, exchanges: Sequence[Exchange], rows: int, temperature: float
    ) -> tuple[SpeculatedRun, SpeculatedRun]:
        off = self._run(None, exchanges, rows, temperature)
        speculator = build_speculator(self._settings, self.config, self.executor, self._facts.vocab_size)
        return off, self._run(speculator, exchanges, rows, temperature)

    def _run(
        self, speculator: Speculator | None, exchanges: Sequence[Exchange], rows: int, temperature: float
    ) -> SpeculatedRun:
        if self._forced is not None:
            self._forced.expect({FIRST_SEED + i: each.answer_ids for i, each in enumerate(exchanges)})
        return run_exchanges(self.executor, self.config, speculator, exchanges, rows=rows, temperature=temperature)


def _num_different(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> int:
    return sum(
        sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
        for one, other in zip(expected, got, strict=True)
    )


def run(
    workload: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(ROWS)}; repeatable; none: all of them")
    ] = None,
    model: Annotated[str, typer.Option(help=f"demo, or random weights in the shape of {', '.join(MODELS)}")] = "demo",
    model_folder: Annotated[Path | None, typer.Option(help="a converted model instead")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="requests at once; repeatable; none: the workload's")] = None,
    requests: Annotated[
        int, typer.Option(help="the first so many of a workload; 0: all, of random tokens 2 a row")
    ] = 0,
    max_drafts: Annotated[int, typer.Option(help="drafted tokens of a request in a step")] = 15,
    drafter: Annotated[list[str] | None, typer.Option(help=f"{', '.join(DRAFTERS)}; repeatable; none: all")] = None,
    temperature: Annotated[
        float, typer.Option(help="at which tokens are drawn, before they are replaced")
    ] = TEMPERATURE,
    own_answers: Annotated[
        bool, typer.Option("--own-answers", help="nothing is forced: the model answers, greedily and at temperature 1")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    block_size: Annotated[int, typer.Option(help="tokens a KV block")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="token budget of a step")] = 8192,
    async_depth: Annotated[int, typer.Option(help="steps in flight")] = 2,
    load_format: Annotated[str, typer.Option(help="of random weights: dummy or dummy-uniform")] = "dummy",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, or fp8 on a GPU")] = "auto",
    threads: Annotated[int, typer.Option(help="of a CPU; 0: torch decides")] = 0,
    runs: Annotated[int, typer.Option(help="measured pairs of runs after a short one that is not")] = 2,
    dry_run: Annotated[bool, typer.Option(help="a small part of each workload, on a tiny model")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only, a line as soon as it is known")] = False,
) -> None:
    """Measure what speculation gains, on recorded answers."""
    names, drafters = workload or list(ROWS), drafter or list(DRAFTERS)
    for name in names:
        if name not in ROWS:
            raise typer.BadParameter(f"--workload is {name!r}; allowed: {', '.join(ROWS)}")
    cases = [(name, each) for name in names for each in ((1, 2) if dry_run else rows or ROWS[name])]
    chosen = {(name, each): _exchanges(name, each, requests, dry_run=dry_run) for name, each in cases}
    longest = max(len(exchange.answer_ids) for those in chosen.values() for exchange in those)
    forced = None if own_answers else ForcedAnswers(longest)
    with ExitStack() as stack:
        folder, loading = _model(model, model_folder, load_format, dry_run=dry_run, stack=stack)
        options = ExecutorOptions(
            model_folder=folder,
            load_format=loading,
            device=device,
            num_threads=threads,
            block_size=block_size,
            max_num_seqs=max(max_drafts + 1, *(each for _, each in cases)),
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            async_depth=async_depth,
            kv_cache_dtype=kv_cache_dtype,
            max_draft_tokens=max_drafts,
        )
        bench = Bench(options, drafters, forced)
        stack.callback(bench.executor.close)
        measurements = []
        for (name, num_rows), exchanges in chosen.items():
            for each in (0.0, 1.0) if own_answers else (temperature,):
                pairs, num_different = bench.measure(exchanges, rows=num_rows, runs=runs, temperature=each)
                off, on = (min((pair[i] for pair in pairs), key=lambda run: run.seconds) for i in (0, 1))
                measurements.append(
                    Measurement(
                        workload=name,
                        model=model if model_folder is None else model_folder.name,
                        rows=num_rows,
                        drafters=",".join(drafters),
                        max_drafts=max_drafts,
                        temperature=each,
                        is_forced=not own_answers,
                        requests=len(exchanges),
                        prompt_tokens=sum(len(exchange.prompt_ids) for exchange in exchanges),
                        answer_tokens=on.num_tokens,
                        speedup=round(on.tokens_per_second / off.tokens_per_second, 3),
                        decode_speedup=round(off.token_ms / on.token_ms, 3),
                        drafted=on.num_drafted,
                        accepted=on.num_accepted,
                        acceptance=round(on.acceptance, 3),
                        different_tokens=num_different,
                        off=Way.of(off),
                        on=Way.of(on),
                        runs=[(round(a.seconds, 4), round(b.seconds, 4)) for a, b in pairs],
                    )
                )
                if as_json:
                    print(json.dumps(asdict(measurements[-1])), flush=True)
    if not as_json:
        Console().print(_table(measurements))
    typer.echo(json.dumps([asdict(each) for each in measurements]))
    raise typer.Exit(1 if any(each.different_tokens for each in measurements) else 0)


def _exchanges(name: str, rows: int, requests: int, *, dry_run: bool) -> list[Exchange]:
    if name == RANDOM:
        found = replay.random_exchanges(requests or max(4, 2 * rows))
    else:
        found = replay.read(name)[: requests or None]
    if not dry_run:
        return found
    return [replace(each, prompt_ids=each.prompt_ids[-96:], answer_ids=each.answer_ids[:48]) for each in found[:3]]


def _model(name: str, folder: Path | None, load_format: str, *, dry_run: bool, stack: ExitStack) -> tuple[Path, str]:
    """Its folder and load format."""
    if folder is not None:
        return folder, "auto"
    if name == "demo" and not dry_run:
        return pull(DEMO, cache_dir=default_cache_dir(), progress=silent), "auto"
    if name not in ("demo", *MODELS):
        raise typer.BadParameter(f"--model is {name!r}; allowed: demo, {', '.join(MODELS)}")
    made = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (made / "config.json").write_text(json.dumps(TINY if dry_run else MODELS[name]))
    return made, load_format


def _table(rows: Sequence[Measurement]) -> Table:
    table = Table(
        *("workload", "rows", "temperature", "off tok/s", "on tok/s", "speed-up", "of decoding"),
        *("tokens a step", "accepted", "engine µs off", "on", "differ"),
    )
    for row in rows:
        cells = row.workload, row.rows, row.temperature, row.off.tokens_per_second, row.on.tokens_per_second
        more = row.speedup, row.decode_speedup, row.on.tokens_per_step, row.acceptance
        table.add_row(*map(str, (*cells, *more, row.off.engine_us, row.on.engine_us, row.different_tokens)))
    return table


if __name__ == "__main__":
    run_program(run)
