"""Plugin of pytest: a test that leaves its process unusable is named, and fails no other test.

After an illegal access every later CUDA call of a process fails. A worker of xdist is ended then,
and xdist runs its tests on another; in a single process the following tests report why they were
not run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator

import pytest

POISONED = "poisoned"
"""Property of the report of a test that left its process unusable: the problem."""
EXIT_CODE = 70
"""Exit code of a worker that ends itself."""


def cuda_problem() -> str:
    """Reason for which this process cannot compute on its GPU any more; empty where it can, or
    never did."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).strip().partition("\n")[0]
    return ""


def free_unused_memory() -> None:
    """Gives memory of a GPU that no tensor uses back to it: the processes of a test run share the
    device, and each would keep the most that any of its tests took."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class ProcessHealth:
    """Looks at the process after each test that is marked `gpu`."""

    def __init__(self, config: pytest.Config, problem: Callable[[], str] = cuda_problem) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._problem = problem
        self._culprit = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._culprit:
            pytest.fail(f"not run: {self._culprit} has left this process unusable", pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        try:
            yield
        finally:
            # Fixtures may fail first.
            if not self._culprit and item.get_closest_marker("gpu") is not None:
                if problem := self._problem():
                    self._culprit = item.nodeid
                    item.user_properties.append((POISONED, problem))
                    pytest.fail(
                        f"{item.nodeid} has left its process unusable: {problem}", pytrace=False
                    )
                free_unused_memory()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        # Its reports have been sent. xdist blames the test that is running when its worker ends.
        if self._is_worker and nodeid == self._culprit:
            os._exit(EXIT_CODE)
