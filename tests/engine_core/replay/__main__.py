"""Replays plans on an executor: `python -m tests.engine_core.replay --executor cpu --seeds 0:50`.

With `--write FILE` the calls of every seed are recorded with digests of all results. With
`--against FILE` they are repeated, and the first result that differs is shown: old code writes, new
code repeats, on one machine. With neither, answers are compared with those of requests that are
served alone.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Annotated

# Kernels are interpreted where there is no GPU; Triton decides so when it decorates a function.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import typer

from headwater.bench.program import check_choice, run_program
from headwater.kernels.launch.environment import Environment
from headwater.services.engine.core.kernel_cache import with_kernel_cache
from tests.engine_core.replay import stream_file
from tests.engine_core.replay.cases import PLACES, Built, Checkpoints, built, case_named, case_of
from tests.engine_core.replay.comparing import wrong_answers
from tests.engine_core.replay.features import FEATURES
from tests.engine_core.replay.loads import random_load
from tests.engine_core.replay.recording import Stream, record
from tests.engine_core.replay.repeating import first_difference

CPU = "cpu"
SEEDS = "0:50"


def main(
    executor: Annotated[
        str | None, typer.Option(help=f"{', '.join(PLACES)}; {CPU} if none")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help=f"FIRST:END; {SEEDS} if none")] = None,
    write: Annotated[Path | None, typer.Option(help="file for calls and digests")] = None,
    against: Annotated[Path | None, typer.Option(help="file of `--write`, repeated here")] = None,
) -> None:
    """Record, repeat or check streams of plans."""
    os.environ.update(with_kernel_cache(os.environ))
    report = Report()
    with tempfile.TemporaryDirectory(prefix="headwater-replay-") as folder:
        checkpoints = Checkpoints(Path(folder))
        if against is not None:
            for name, value in (("executor", executor), ("seeds", seeds), ("write", write)):
                if value is not None:
                    raise typer.BadParameter(f"{name} is {value}; allowed: none with against")
            _repeat(against, checkpoints, report)
        else:
            place = CPU if executor is None else executor
            check_choice("executor", place, PLACES)
            chosen = _seeds(place, _range(SEEDS if seeds is None else seeds), checkpoints)
            if write is None:
                _check(chosen, report)
            else:
                _record(chosen, write, place, report)
    report.close()


class Report:
    """A line for each stream, and the features that they met."""

    def __init__(self) -> None:
        self._met = Counter[str]()
        self._num_streams = self._num_steps = self._num_wrong = 0

    def add(self, stream: Stream, wrong: str) -> None:
        self._met.update(stream.features)
        self._num_streams += 1
        self._num_steps += stream.num_steps
        self._num_wrong += bool(wrong)
        print(
            f"{stream.executor}, seed {stream.seed} ({stream.case}): {stream.num_steps} steps, "
            f"{len(stream.features)} features{f': {wrong}' if wrong else ''}",
            flush=True,
        )

    def close(self) -> None:
        """Raises `typer.Exit` where a stream is wrong."""
        for name in sorted(FEATURES):
            print(f"{self._met[name]:6} {name}")
        print(f"{self._num_streams} streams, {self._num_steps} steps, {self._num_wrong} differ")
        if self._num_wrong:
            raise typer.Exit(1)


def _check(chosen: Iterable[tuple[Built, int]], report: Report) -> None:
    for on, seed in chosen:
        report.add(*wrong_answers(on, random_load(seed)))


def _record(chosen: Iterable[tuple[Built, int]], path: Path, place: str, report: Report) -> None:
    with stream_file.written(path, place, _environment(place)) as file:
        for on, seed in chosen:
            stream, _ = record(on, random_load(seed))
            stream_file.write(file, stream)
            report.add(stream, "")


def _repeat(path: Path, checkpoints: Checkpoints, report: Report) -> None:
    """Streams of one case follow one another in a file."""
    header, streams = stream_file.read(path)
    if header.environment != (here := _environment(header.executor)):
        print(f"recorded with {header.environment}, repeated with {here}: bits may differ")
    for name, group in groupby(streams, key=lambda each: each.case):
        case = case_named(header.executor, name)
        with built(header.executor, case, checkpoints) as on:
            for stream in group:
                difference = first_difference(stream, on)
                report.add(stream, "" if difference is None else str(difference))


def _seeds(place: str, seeds: range, checkpoints: Checkpoints) -> Iterator[tuple[Built, int]]:
    """Each seed with its executor; those of one case follow one another."""
    for case in PLACES[place].cases:
        own = [seed for seed in seeds if case_of(place, seed) is case]
        if not own:
            continue
        with built(place, case, checkpoints) as on:
            for seed in own:
                yield on, seed


def _range(seeds: str) -> range:
    first, _, end = seeds.partition(":")
    if not (first.isdecimal() and end.isdecimal()):
        raise typer.BadParameter(f"seeds is {seeds!r}; allowed: FIRST:END, as in 0:50")
    return range(int(first), int(end))


def _environment(place: str) -> str:
    device = PLACES[place].options.get("device", "cpu")
    return str(Environment.of(torch.device(device)))


if __name__ == "__main__":
    run_program(main)
