"""Layers as AWQ's tools pack them for products of matrices (Lin et al., 2023; the layout "gemm" of
AutoAWQ).

qweight int32 [K, N / 8]: word c of a row holds outputs 8 c … 8 c + 7 in the order `ORDER`, the
first in the lowest four bits. qzeros int32 [groups, N / 8]: likewise. scales [groups, N].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headwater.kernels.quant.int4_layout import WORD, Int4Weight, pack

from ...config import require
from ..grouped import SCALE_DTYPES, check_scales, check_tensor, integers_of, num_groups
from .packing import Packing

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of a word by nibble."""


def suffixes(packing: Packing) -> tuple[str, ...]:
    return ("qweight", "qzeros", "scales")


def drops(name: str, suffix: str, tensor: torch.Tensor, packing: Packing) -> bool:
    return False


def unpack(name: str, tensors: Mapping[str, torch.Tensor], packing: Packing) -> Int4Weight:
    """Raises `ConfigError` naming the tensor that does not fit."""
    qweight, qzeros, scales = (tensors[suffix] for suffix in suffixes(packing))
    require(
        qweight.ndim == 2,
        f"checkpoint tensor {name}.qweight",
        tuple(qweight.shape),
        "[inputs, outputs / 8]",
    )
    k = qweight.shape[0]
    n = qweight.shape[1] * WORD
    groups = num_groups(name, k, packing.group_size)
    check_tensor(f"{name}.qweight", qweight, (k, n // WORD), torch.int32)
    check_tensor(f"{name}.qzeros", qzeros, (groups, n // WORD), torch.int32)
    check_tensor(f"{name}.scales", scales, (groups, n), *SCALE_DTYPES)
    check_scales(f"{name}.scales", scales)
    return Int4Weight(
        words=pack(_in_order(qweight).t().contiguous()), scales=scales, zeros=_in_order(qzeros)
    )


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N / 8] → uint8 [R, N]"""
    nibble_of_output = torch.tensor([ORDER.index(i) for i in range(WORD)])
    return integers_of(words, 4)[..., nibble_of_output].flatten(1)
