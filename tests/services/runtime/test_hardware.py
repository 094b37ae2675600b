"""Number of threads that libraries read from the environment of a process."""

from __future__ import annotations

import pytest

from headwater.services.runtime import hardware
from headwater.services.runtime.hardware import thread_variables


def both(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


@pytest.mark.parametrize(
    ("threads", "quota", "env", "variables"),
    [
        pytest.param(0, 2, {}, both(2), id="as many as a quota is worth"),
        pytest.param(0, None, {}, {}, id="as many as libraries choose"),
        pytest.param(3, 2, {}, both(3), id="a setting wins over a quota"),
        pytest.param(0, 2, {"OMP_NUM_THREADS": "5"}, {}, id="a variable wins over a quota"),
        pytest.param(3, 2, {"OMP_NUM_THREADS": "5"}, both(3), id="a setting wins over a variable"),
    ],
)
def test_threads_of_a_process(
    threads: int,
    quota: int | None,
    env: dict[str, str],
    variables: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "quota_cores", lambda: quota)
    monkeypatch.setattr(hardware, "usable_cores", lambda: quota or 64)
    assert thread_variables(threads, env) == variables
