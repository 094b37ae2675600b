"""Executors under random streams of plans: the same results wherever and however often a stream is
computed, and answers as of requests that are served alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.engine_core.replay import stream_file
from tests.engine_core.replay.cases import (
    DRAFTED,
    LOOKED_UP,
    PLACES,
    PLAIN,
    SIMULATED,
    TREE,
    Built,
    Case,
    Checkpoints,
    built,
    case_of,
)
from tests.engine_core.replay.comparing import wrong_answers
from tests.engine_core.replay.features import FEATURES
from tests.engine_core.replay.loads import Load, random_load
from tests.engine_core.replay.recording import Stream, record
from tests.engine_core.replay.repeating import first_difference

FEW_ROUNDS = 2
MEDUSA = Case(drafter="medusa")
ON_A_CPU = {
    case.name: (case, seed)
    for case, seed in ((PLAIN, 98), (LOOKED_UP, 65), (MEDUSA, 65), (DRAFTED, 82))
}
"""Cases, each with a seed; together their streams meet every feature."""
SIMULATED_SEEDS = range(2)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("replay"))


@pytest.fixture(scope="module")
def checked(checkpoints: Checkpoints) -> dict[str, tuple[Stream, str]]:
    """The stream of each case on a CPU, with what is wrong with its answers."""
    found = {}
    for name, (case, seed) in ON_A_CPU.items():
        with built("cpu", case, checkpoints) as on:
            found[name] = wrong_answers(on, load(seed))
    return found


@pytest.fixture
def simulated(checkpoints: Checkpoints) -> Iterator[Built]:
    with built(SIMULATED, LOOKED_UP, checkpoints) as on:
        yield on


def load(seed: int) -> Load:
    return random_load(seed, FEW_ROUNDS)


@pytest.mark.parametrize("name", ON_A_CPU)
def test_answers_on_a_cpu_are_those_of_requests_alone(
    name: str, checked: dict[str, tuple[Stream, str]]
) -> None:
    _, wrong = checked[name]
    assert not wrong


def test_streams_on_a_cpu_meet_every_feature(checked: dict[str, tuple[Stream, str]]) -> None:
    met = {name for stream, _ in checked.values() for name in stream.features}
    assert met == FEATURES


@pytest.mark.parametrize("drafter", [case.drafter for case in PLACES[SIMULATED].cases])
def test_simulated_answers_are_those_of_requests_alone(
    drafter: str, checkpoints: Checkpoints
) -> None:
    with built(SIMULATED, Case(drafter=drafter), checkpoints) as on:
        for seed in SIMULATED_SEEDS:
            stream, wrong = wrong_answers(on, load(seed))
            assert not wrong, seed
            assert first_difference(stream, on) is None, seed


def test_answers_do_not_depend_on_the_number_of_steps_in_flight(simulated: Built) -> None:
    for seed in SIMULATED_SEEDS:
        at_depths = []
        for depth in (1, 2, 4):
            # What is cancelled depends on how far it came.
            rounds = [replace(each, cancels=[]) for each in load(seed).rounds]
            limits = load(seed).limits | {"async_depth": depth}
            _, answers = record(simulated, replace(load(seed), rounds=rounds, limits=limits))
            at_depths.append(answers)
        assert at_depths[0] == at_depths[1] == at_depths[2], seed


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "case"),
    [("cpu-ranks", Case(drafter="look-up", options=TREE)), ("cpu-stages", LOOKED_UP)],
    ids=["ranks", "stages"],
)
def test_ranks_and_stages_compute_what_one_process_computes(
    place: str, case: Case, checkpoints: Checkpoints
) -> None:
    check_as_one_process(place, case, checkpoints, [49])


def test_a_stream_from_a_file_has_the_same_results(simulated: Built, tmp_path: Path) -> None:
    streams = [record(simulated, load(seed))[0] for seed in SIMULATED_SEEDS]
    with stream_file.written(tmp_path / "streams", SIMULATED, "this machine") as file:
        for stream in streams:
            stream_file.write(file, stream)
    header, found = stream_file.read(tmp_path / "streams")
    assert header == stream_file.Header(SIMULATED, "this machine")
    for stream, again in zip(streams, found, strict=True):
        assert again.features == stream.features
        assert again.num_steps == stream.num_steps
        assert first_difference(again, simulated) is None


def test_the_first_result_that_differs_is_named(simulated: Built, checkpoints: Checkpoints) -> None:
    stream, _ = record(simulated, load(49))
    with built("cpu", LOOKED_UP, checkpoints) as on:
        difference = first_difference(stream, on)
    assert difference is not None
    assert (difference.step, difference.part) == (1, "tokens")
    assert str(difference).startswith(f"step 1, tokens of row {difference.row}: [")


def test_a_field_that_plans_do_not_have_is_refused() -> None:
    with pytest.raises(
        stream_file.StreamError, match="StepPlan has no field row_speeds in this code"
    ):
        stream_file._call(["submit", {"step": 1, "row_speeds": [2]}])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(44))
@pytest.mark.parametrize("place", ["cpu", "cpu-stages", "cpu-ranks", SIMULATED])
def test_answers_of_more_seeds_are_those_of_requests_alone(
    place: str, seed: int, checkpoints: Checkpoints
) -> None:
    check_seed(place, seed, checkpoints)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(len(PLACES["cuda"].cases)))
def test_answers_on_a_gpu_are_those_of_requests_alone(seed: int, checkpoints: Checkpoints) -> None:
    check_seed("cuda", seed, checkpoints)


def check_seed(place: str, seed: int, checkpoints: Checkpoints) -> None:
    """A seed's case has the answers of requests alone, and the same results when repeated."""
    with built(place, case_of(place, seed), checkpoints) as on:
        stream, wrong = wrong_answers(on, random_load(seed))
        assert not wrong
        assert first_difference(stream, on) is None


def check_as_one_process(
    place: str, case: Case, checkpoints: Checkpoints, seeds: Sequence[int]
) -> None:
    """Streams of several processes give one process the same results."""
    with built(place, case, checkpoints) as several:
        streams = [record(several, load(seed))[0] for seed in seeds]
    with built("cpu", case, checkpoints) as one:
        differences = [first_difference(stream, one) for stream in streams]
    assert differences == [None] * len(seeds)
