"""Times norms, gates and rotations on a GPU against what memory allows: figures of
`gpu_kernels`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from headwater.kernels.attention.qk_norm_rope_store_kv import qk_norm_rope_store_kv
from headwater.kernels.norm.rms_norm import add_rms_norm
from headwater.kernels.norm.silu_mul import silu_mul

from .gpu_timing import BYTES_PER_US, Figure, copies_for, randn, timed


def elementwise() -> Iterator[Figure]:
    for m in (1, 256, 8192):
        pairs = [(randn(m, 4096), randn(m, 4096)) for _ in range(copies_for(m * 4096 * 2))]
        weight = randn(4096)
        normed = randn(m, 4096)
        us = timed(
            [partial(add_rms_norm, x, residual, weight, 1e-6, normed) for x, residual in pairs]
        )
        yield Figure("rms norm + residual", f"4096 M={m}", us, m * 4096 * 8 / BYTES_PER_US)
        halves = [randn(m, 24576) for _ in range(copies_for(m * 24576 * 2))]
        product = randn(m, 12288)
        us = timed([partial(silu_mul, x, product) for x in halves])
        yield Figure("silu mul", f"12288 M={m}", us, m * 12288 * 6 / BYTES_PER_US)
        qkvs = [randn(m, 6144) for _ in range(copies_for(m * 6144 * 2))]
        k_cache, v_cache = (randn(m // 64 + 1, 8, 64, 128) for _ in range(2))
        places = torch.arange(m, dtype=torch.int32, device="cuda")
        angles = torch.randn(8192, 128, device="cuda")
        q = randn(m, 32, 128)
        norm = randn(128)
        rest = (places, places, angles, k_cache, v_cache, q)
        us = timed(
            [partial(qk_norm_rope_store_kv, x, *rest, q_norm=norm, k_norm=norm) for x in qkvs]
        )
        yield Figure("q/k norm, rope, store", f"8B M={m}", us, m * 6144 * 4 / BYTES_PER_US)
