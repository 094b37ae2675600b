"""Kernel tests run on the GPU where there is one, and under Triton's interpreter at small shapes
elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

# Before Triton is imported: it decides when it decorates a function.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from tests.kernels import interpreter

if not torch.cuda.is_available():
    torch.set_num_threads(1)
    interpreter.mend()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    """Fresh random inputs in every run; the seed is printed when a test fails."""
    generator = torch.Generator(device)
    print("seed", generator.seed())
    return generator
