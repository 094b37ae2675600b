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
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Annotated

# Kernels are interpreted where there is no GPU; Triton decides so when it decorates a function.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import typer

from headwater.bench.program import check_choice, run_program
from headwater.kernels.environment import Environment
from headwater.services.engine.kernel_cache import with_kernel_cache
from tests.engine_core.replay import stream_file
from tests.engine_core.replay.cases import PLACES, Built, Checkpoints, built, case_named, case_of
from tests.engine_core.replay.comparing import wrong_answers
from tests.engine_core.replay.features import FEATURES
from tests.engine_core.replay.loads import random_load
from tests.engine_core.replay.recording import Stream, record
from tests.engine_core.replay.repeating import first_difference


def main(
    executor: Annotated[str, typer.Option(help=", ".join(PLACES))] = "cpu",
    seeds: Annotated[str, typer.Option(help="FIRST:END")] = "0:50",
    write: Annotated[Path | None, typer.Option(help="file for calls and digests")] = None,
    against: Annotated[Path | None, typer.Option(help="file of `--write`, repeated here")] = None,
) -> None:
    """Record, repeat or check streams of plans."""
    check_choice("executor", executor, PLACES)
    if write is not None and against is not None:
        raise typer.BadParameter("write and against are given; allowed: one of them")
    os.environ.update(with_kernel_cache(os.environ))
    report = Report()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-replay-")))
        checkpoints = Checkpoints(folder)
        environment = str(Environment.of(torch.device(_device_of(executor))))
        if against is not None:
            theirs, streams = stream_file.read(against)
            if theirs != environment:
                print(f"recorded with {theirs}, repeated with {environment}: bits may differ")
            _repeat(streams, checkpoints, report)
        elif write is not None:
            file = stack.enter_context(stream_file.written(write, environment))
            for on, seed in _seeds(executor, _range(seeds), checkpoints):
                stream, _ = record(on, random_load(seed))
                stream_file.write(file, stream)
                report.add(stream, "")
        else:
            for on, seed in _seeds(executor, _range(seeds), checkpoints):
                report.add(*wrong_answers(on, random_load(seed)))
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


def _repeat(streams: Iterable[Stream], checkpoints: Checkpoints, report: Report) -> None:
    """Streams of one case follow one another in a file."""
    for (place, _), group in groupby(streams, key=lambda each: (each.executor, each.case)):
        first = next(group)
        with built(place, case_named(place, first.case), checkpoints) as on:
            for stream in (first, *group):
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


def _device_of(place: str) -> str:
    return str(PLACES[place].options.get("device", "cpu"))


if __name__ == "__main__":
    run_program(main)
