"""Which processes of `headwater up` are forked, and from a process that has imported what."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from headwater.services.engine.core.environment import core_environment
from headwater.services.stack import fork_servers as stack_forks
from headwater.services.stack.fork_servers import (
    CORE_MODULES,
    STAGE_MODULES,
    VARIABLES_OF_CORES,
    VARIABLES_OF_STAGES,
    fork_servers,
)
from headwater.services.stack.roles import Role
from tests.services.stack.test_plan import plan

Started = dict[tuple[str, ...], tuple[dict[str, str], tuple[str, ...]]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Environment and free variables of each server that was started, by its modules."""
    servers: Started = {}

    @contextlib.contextmanager
    def record(
        modules: Sequence[str],
        *,
        environment: Mapping[str, str],
        free_variables: Sequence[str] = (),
    ) -> Iterator[None]:
        servers[tuple(modules)] = dict(environment), tuple(free_variables)
        yield None

    monkeypatch.setattr(stack_forks, "fork_server", record)
    return servers


def of_libraries(environment: Mapping[str, str], free: Sequence[str] = ()) -> dict[str, str]:
    """Variables that libraries may read when they are imported."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("HEADWATER_") and name not in free
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_a_server_imports_is_what_its_programs_would_import_with_their_environment(
    started: Started, device: str
) -> None:
    stack = plan(replicas=2, device=device)
    with fork_servers(stack.settings):
        pass
    engine = os.environ | stack.engine_env(0)
    environment, free = started[STAGE_MODULES]
    for stage in (
        engine,
        os.environ | stack.gateway_env(),
        os.environ | stack.servers.env(Role.PROCESSOR),
    ):
        assert of_libraries(stage, free) == of_libraries(environment, free)
    assert free == VARIABLES_OF_STAGES
    environment, free = started[CORE_MODULES[device]]
    for place in (0, 1):
        core = core_environment(stack.threads, os.environ | stack.engine_env(place))
        assert of_libraries(core, free) == of_libraries(environment, free)
    assert environment["OMP_NUM_THREADS"] == str(stack.threads)
    assert free == VARIABLES_OF_CORES


@pytest.mark.parametrize(
    "given",
    [{"executor": "simulated"}, {"replicas": None, "min_replicas": 0}],
    ids="-".join,
)
def test_cores_are_forked_where_engines_compute_from_the_start_on(
    started: Started, given: dict[str, Any]
) -> None:
    with fork_servers(plan(**given).settings) as servers:
        assert servers.cores is None
    assert list(started) == [STAGE_MODULES]


def test_no_core_is_forked_where_a_variable_says_its_threads(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_THREADS", "3")
    with fork_servers(plan().settings):
        pass
    assert list(started) == [STAGE_MODULES]


def test_stages_are_forked_from_a_process_without_torch() -> None:
    imports = "; ".join(f"import_module({module!r})" for module in STAGE_MODULES)
    probe = (
        f"import sys; from importlib import import_module; {imports}; assert 'torch' not in "
        "sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


@pytest.mark.gpu
def test_a_fork_opens_a_gpu_after_the_imports_of_a_core() -> None:
    imports = "; ".join(f"import_module({module!r})" for module in CORE_MODULES["cuda"])
    probe = f"import os; from importlib import import_module; {imports}; import torch, triton\n"
    probe += (
        "if (pid := os.fork()) == 0:\n    torch.zeros(1, device='cuda').item()\n    os._exit(0)\n"
    )
    probe += "assert os.waitpid(pid, 0)[1] == 0"
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
