"""The search for settings: with a known landscape, and once over real lines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from headwater.bench.halving import pareto_front, successive_halving, winner
from headwater.bench.latency_report import Objective
from headwater.bench.tune import _goals
from headwater.bench.tune_grid import grid, name_of, policies_of
from headwater.services.runtime.settings import SettingError
from headwater.services.stack.profile import EngineProfile, Profile


def test_halving_spends_on_what_is_promising_and_finds_the_best() -> None:
    asked: list[tuple[int, int]] = []

    def measure(candidate: int, budget: int) -> dict[str, float]:
        asked.append((candidate, budget))
        # Small budgets see through a fog.
        return {"value": -abs(candidate - 6) + (candidate % 3) / budget}

    trials = successive_halving(range(9), measure, lambda report: report["value"], budget=4, eta=3)
    assert asked[:9] == [(candidate, 4) for candidate in range(9)]
    assert [budget for _, budget in asked[9:]] == [12, 12, 12]
    assert winner(trials).candidate == 6
    assert [trial.rung for trial in trials] == [0] * 9 + [1] * 3


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    points = [(5.0, 50.0), (1.0, 10.0), (3.0, 9.0), (5.0, 40.0), (9.0, 49.0), (2.0, 30.0)]
    assert pareto_front(points) == [(1.0, 10.0), (2.0, 30.0), (5.0, 50.0)]


def test_a_profile_gives_way_to_what_the_environment_says(tmp_path: Path) -> None:
    profile = Profile(replicas=3, engine=EngineProfile(max_num_seqs=64, long_prefill_chunk=0))
    profile.write(tmp_path / "profile.json")
    read = Profile.read(tmp_path / "profile.json")
    assert read == profile
    assert read.engine_flags({}) == ["--max-num-seqs=64", "--long-prefill-chunk=0"]
    assert read.engine_flags({"HEADWATER_MAX_NUM_SEQS": "8"}) == ["--long-prefill-chunk=0"]


@pytest.mark.parametrize("content", ["", "{}}", '{"replicas": 0}', '{"engine": {"max_seqs": 1}}'])
def test_a_profile_that_is_none_is_refused_byname_of(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(SettingError, match="--profile is"):
        Profile.read(path)


@pytest.mark.long
def test_a_search_over_real_lines_ends_in_a_profile_that_a_line_starts_with(tmp_path: Path) -> None:
    profile = tmp_path / "best.json"
    plot = tmp_path / "front.png"
    command = [
        sys.executable,
        "-m",
        "headwater.bench.tune",
        "--executor=simulated",
        f"--profile={profile}",
        "--json",
    ]
    command += [
        f"--plot={plot}",
        "--token-budget=256,512",
        "--max-seqs=64",
        "--chunk=0",
        "--replicas=1",
    ]
    command += [
        "--num-candidates=0",
        "--eta=2",
        "--num-requests=24",
        "--output-len=16",
        "--slo-e2e-ms=5000",
        "--policy=fair,srpt",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
    trials = json.loads(done.stdout)
    assert len(trials) >= 4
    best = Profile.read(profile)
    assert best.measured["goodput_requests_per_s"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_queue_policies_are_a_dimension_of_the_search() -> None:
    found = [each.engine.policy for each in grid([512], [32], [0], policies_of("fair,srpt"), [1])]
    assert found == ["fair", "srpt"]
    assert EngineProfile(policy="srpt").policy in name_of(
        Profile(replicas=1, engine=EngineProfile(policy="srpt"))
    )
    with pytest.raises(typer.BadParameter, match="policy is 'last'; allowed: fcfs, priority"):
        policies_of("fair,last")


def test_the_objective_is_sent_as_goals_of_each_request() -> None:
    assert _goals(Objective(ttft_ms=300.0, e2e_ms=1000.0)) == {"x-headwater-ttft-ms": "300"}
