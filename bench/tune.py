"""`headwater bench tune`: finds the engine settings with the best throughput that keeps an
objective, on this machine.

Each trial is a cluster of its own under the same load; successive halving spends most requests on
the promising ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from headwater.services.stack.cluster_record import ClusterRecord
from headwater.services.stack.profile import Profile

from . import arrivals, datasets, tune_grid
from .datasets import Shape
from .halving import Trial, pareto_front, successive_halving, winner
from .latency_report import Objective, summarize
from .own_cluster import StartFailed, own_cluster
from .plot import check_plot, plot_front
from .program import run_program
from .serve_workers import drive

KEPT_SHARE = 0.95
"""Share of the requests that must meet the objective for a setting to count as meeting it."""


def run(
    model: Annotated[str, typer.Option(help="as for `headwater up`")] = "smollm2-135m-instruct",
    executor: Annotated[str, typer.Option(help="single, or simulated")] = "single",
    token_budget: Annotated[
        str, typer.Option(help="max_num_batched_tokens to try")
    ] = "512,1024,2048,4096",
    max_seqs: Annotated[str, typer.Option(help="max_num_seqs to try")] = "32,64,128,256",
    chunk: Annotated[
        str, typer.Option(help="long_prefill_chunk to try; 0: the whole budget")
    ] = "0,256",
    policy: Annotated[
        str, typer.Option(help="queue policies to try, with commas between them")
    ] = "fair,srpt,mlfq",
    replicas: Annotated[str, typer.Option(help="replicas to try")] = "1,2",
    num_candidates: Annotated[
        int, typer.Option(help="combinations to try, drawn at random; 0: all")
    ] = 9,
    eta: Annotated[
        int,
        typer.Option(
            help="one candidate in so many goes on to the next rung, with as many times the "
            "requests"
        ),
    ] = 3,
    num_requests: Annotated[int, typer.Option(help="requests of a trial in the first rung")] = 32,
    prompt_len: Annotated[int, typer.Option(help="tokens of a prompt")] = 256,
    output_len: Annotated[int, typer.Option(help="tokens of an answer")] = 64,
    concurrency: Annotated[int, typer.Option(help="requests at once in a closed loop")] = 32,
    rate: Annotated[
        float,
        typer.Option(help="requests a second (Poisson) instead of a closed loop; 0: closed loop"),
    ] = 0.0,
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="objective: time to first token")
    ] = None,
    slo_tpot_ms: Annotated[
        float | None, typer.Option(help="objective: time per output token")
    ] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="objective: whole request")] = None,
    seed: Annotated[int, typer.Option(help="seed of candidates, prompts and arrivals")] = 0,
    profile: Annotated[
        Path, typer.Option(help="file for the best settings, for `headwater up --profile`")
    ] = Path("headwater-profile.json"),
    plot: Annotated[
        Path | None, typer.Option(help="also plot the trials and their Pareto front")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON only")] = False,
) -> None:
    """Search engine settings for the best throughput under an objective."""
    check_plot(plot)
    objective = Objective(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms, e2e_ms=slo_e2e_ms)
    rng = np.random.default_rng(seed)
    console = Console(stderr=True, quiet=as_json)
    candidates = tune_grid.drawn(
        tune_grid.grid(
            tune_grid.ints(token_budget),
            tune_grid.ints(max_seqs),
            tune_grid.ints(chunk),
            tune_grid.policies_of(policy),
            tune_grid.ints(replicas),
        ),
        num_candidates,
        rng,
    )

    def measure(candidate: Profile, budget: int) -> dict[str, Any]:
        console.print(f"{tune_grid.name_of(candidate)}: {budget} requests")
        load = np.random.default_rng(seed)
        try:
            with _tuned_line(candidate, model, executor) as cluster:
                shape = Shape(
                    prompt_len=prompt_len,
                    output_len=output_len,
                    vocab_size=49152,
                    model=cluster.model,
                )
                dialogues = list(datasets.random_prompts(budget, shape, load))
                offsets = list(arrivals.poisson(budget, rate, load)) if rate else None
                warm_up = list(
                    datasets.random_prompts(
                        min(8, concurrency), shape, np.random.default_rng(seed + 1)
                    )
                )
                drive(cluster.rest, warm_up, None, concurrency, 1, quiet=True)
                outcomes, wall = drive(
                    cluster.rest,
                    dialogues,
                    offsets,
                    concurrency,
                    _workers(),
                    quiet=True,
                    headers=_goals(objective),
                )
        except StartFailed as failure:
            console.print(f"[yellow]it does not start: {str(failure)[-300:]}")
            return {"failed_to_start": str(failure)[-1000:]}
        return summarize(outcomes, wall, objective)

    trials = successive_halving(candidates, measure, _score, budget=num_requests, eta=eta)
    best = winner(trials)
    if "failed_to_start" in best.report:
        raise SystemExit(
            f"no setting could be started; the last one said:\n{best.report['failed_to_start']}"
        )
    _keep(best, objective, profile)
    latency = next(
        (name for name in ("ttft", "tpot", "e2e") if getattr(objective, f"{name}_ms") is not None),
        "e2e",
    )
    if plot is not None:
        _plot(plot, trials, latency)
    if as_json:
        print(json.dumps([_plain(trial) for trial in trials]))
    else:
        Console().print(_table(trials, best, latency))
        name = tune_grid.name_of(best.candidate)
        command = f"headwater up --profile {profile}"
        Console().print(f"best: {name}; run it with `{command}`", soft_wrap=True)
    if best.report["goodput_share"] < KEPT_SHARE:
        console.print(
            f"[yellow]it keeps the objective for {best.report['goodput_share']:.0%} of the "
            "requests only"
        )


def _score(report: dict[str, Any]) -> float:
    """Number of requests a second that keep the objective; a setting that keeps it for too few
    counts for little.

    Among those that keep it for none, tokens a second decide.
    """
    if "failed_to_start" in report:
        return -1.0
    kept: float = report["goodput_requests_per_s"]
    score = kept if report["goodput_share"] >= KEPT_SHARE else kept * report["goodput_share"] * 0.5
    return score + 1e-9 * float(report["output_tokens_per_s"])


@contextlib.contextmanager
def _tuned_line(candidate: Profile, model: str, executor: str) -> Iterator[ClusterRecord]:
    """A cluster with the candidate's settings, passed as a user would pass them."""
    with tempfile.TemporaryDirectory(prefix="headwater-profile-") as folder:
        path = Path(folder) / "profile.json"
        candidate.write(path)
        flags = [
            f"--model={model}",
            f"--executor={executor}",
            f"--profile={path}",
            "--log-level=warning",
        ]
        with own_cluster(flags) as (cluster, _):
            yield cluster


def _keep(best: Trial[Profile], objective: Objective, path: Path) -> None:
    names = (
        "output_tokens_per_s",
        "goodput_requests_per_s",
        "goodput_share",
        "ttft_ms",
        "tpot_ms",
        "e2e_ms",
    )
    measured = {name: best.report[name] for name in names}
    limits = {name: getattr(objective, name) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    measured["objective"] = {name: limit for name, limit in limits.items() if limit is not None}
    msgspec.structs.replace(best.candidate, measured=measured).write(path)


def _plot(path: Path, trials: Sequence[Trial[Profile]], latency: str) -> None:
    started = [trial for trial in trials if "failed_to_start" not in trial.report]
    place: Callable[[Trial[Profile]], tuple[float, float]] = lambda trial: (  # noqa: E731
        trial.report[f"{latency}_ms"]["p95"],
        trial.report["output_tokens_per_s"],
    )
    points = [
        (
            *place(trial),
            tune_grid.name_of(trial.candidate),
            trial.report["goodput_share"] >= KEPT_SHARE,
        )
        for trial in started
    ]
    figures = json.dumps([_plain(trial) for trial in trials], indent=1)
    plot_front(
        path, points, pareto_front([place(trial) for trial in started]), f"p95 {latency}", figures
    )


def _table(trials: Sequence[Trial[Profile]], best: Trial[Profile], latency: str) -> Table:
    table = Table("rung", "requests", "tok/s", f"p95 {latency} ms", "kept", "good req/s")
    table.add_column("settings", no_wrap=True)
    for trial in trials:
        report = trial.report
        style = "bold green" if trial is best else None
        if "failed_to_start" in report:
            table.add_row(
                str(trial.rung),
                "does not start",
                "",
                "",
                "",
                "",
                tune_grid.name_of(trial.candidate),
                style="red",
            )
            continue
        cells = (
            trial.rung,
            trial.budget,
            report["output_tokens_per_s"],
            report[f"{latency}_ms"]["p95"],
            f"{report['goodput_share']:.0%}",
            report["goodput_requests_per_s"],
            tune_grid.name_of(trial.candidate),
        )
        table.add_row(*map(str, cells), style=style)
    return table


def _plain(trial: Trial[Profile]) -> dict[str, Any]:
    settings = msgspec.to_builtins(trial.candidate)
    return {
        "rung": trial.rung,
        "budget": trial.budget,
        "score": trial.score,
        "settings": settings,
        **trial.report,
    }


def _goals(objective: Objective) -> dict[str, str]:
    """Headers that say the objective to the policy `slo`."""
    goals = {
        "x-headwater-ttft-ms": objective.ttft_ms,
        "x-headwater-tpot-ms": objective.tpot_ms,
    }
    return {name: str(round(goal)) for name, goal in goals.items() if goal is not None}


def _workers() -> int:
    return max(1, (os.cpu_count() or 2) // 4)


if __name__ == "__main__":
    run_program(run)
