"""The environment of an engine's core, for its server and for programs that compute as it does."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ...runtime.hardware import thread_variables
from ...runtime.process import PARENT_FD, READY_FD
from .kernel_cache import with_kernel_cache
from .variables import CORE_FORKS_FD, WEIGHTS_HOLDER_FD


def core_environment(threads: int, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a core: the number of computing threads, how long idle threads spin (from one
    operation of the model to the next), and where kernels are kept."""
    environment = {
        name: value
        for name, value in env.items()
        if name not in (READY_FD, PARENT_FD, CORE_FORKS_FD, WEIGHTS_HOLDER_FD)
    }
    environment |= {"GOMP_SPINCOUNT": "30000", "KMP_BLOCKTIME": "1"}
    environment.pop("OMP_WAIT_POLICY", None)
    environment |= thread_variables(threads, environment)
    return with_kernel_cache(environment)
