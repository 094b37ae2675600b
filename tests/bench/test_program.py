from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.bench.program import BENCHMARKS


def test_the_help_of_a_benchmark_calls_it_what_people_do() -> None:
    command = [sys.executable, "-m", "headwater.bench", "stub", "--help"]
    message = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert "Usage: headwater bench stub [OPTIONS]" in message
    for module, _ in BENCHMARKS.values():
        spec = importlib.util.find_spec(f"headwater.bench.{module}")
        assert spec is not None
        places = spec.submodule_search_locations
        source = Path(places[0]) / "__main__.py" if places else Path(spec.origin or "")
        text = source.read_text()
        assert any(each in text for each in ("run_program(", "run_app(", "program_name()")), module


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["gpu_suite", "--help"], "Usage: headwater bench gpu", marks=pytest.mark.long),
        (["gpu_suite", "--part=tests"], "headwater bench gpu: --part tests needs a checkout"),
        pytest.param(
            ["combinations"],
            "headwater bench combinations: the table of combinations needs a checkout",
            marks=pytest.mark.long,
        ),
    ],
    ids=["help", "gpu", "combinations"],
)
def test_a_benchmark_that_runs_tests_says_so_where_nothing_can_run_them(
    arguments: list[str], says: str
) -> None:
    program = (
        "import runpy, sys; sys.modules['pytest'] = None; _, module, *sys.argv[1:] = sys.argv; "
        "runpy.run_module(f'headwater.bench.{module}', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


OFFLINE = (
    *(sys.executable, "-m", "headwater.bench", "offline"),
    *("--workload=O4", "--device=cpu", "--dry-run"),
)


@pytest.mark.long
def test_a_workload_runs_by_the_code_that_is_asked_for() -> None:
    command = [*OFFLINE, "--model-code=transformers", "--runs=1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "modelling code of transformers" in done.stderr + done.stdout
    assert '"workload": "O4"' in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--load-format=none", "load_format is 'none'; allowed: auto or dummy or dummy-uniform"),
        ("--numerics=trees", "numerics is 'trees'; allowed: default or tree"),
    ],
)
def test_a_setting_that_cannot_be_used_is_one_line(flag: str, message: str) -> None:
    done = subprocess.run(
        [*OFFLINE, flag], stderr=subprocess.PIPE, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr == f"headwater bench offline: {message}\n"
