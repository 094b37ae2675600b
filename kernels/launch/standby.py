"""Opens a GPU ahead of an engine: its context, its library of products and Triton's driver are
there when the engine begins in this process, and the kernels of the list named ARGUMENT, if it has
stood by for long enough."""

from __future__ import annotations

import sys

import torch
from triton.runtime import driver

from .kernel_list import KernelList

LEAST_FREE_BYTES = 2 << 30
"""Memory that the GPU has left when a process may stand by. It takes 0.65 GB (H200, 2026-11-30)."""


def main() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < LEAST_FREE_BYTES:
        sys.exit(f"no process stands by: {free / 1e9:.1f} GB of the GPU are free")
    matrix = torch.zeros(64, 64, dtype=torch.bfloat16, device="cuda")
    # Sums of words are the checksums of weights.
    torch.mm(matrix, matrix).view(torch.int64).sum()
    driver.active.get_current_target()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # The engine does not wait for it, and goes on with what is not there yet.
    KernelList(sys.argv[1]).load_behind()
