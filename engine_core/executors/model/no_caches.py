"""Stands where a model caches nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...executor import Int32Array


class NoCaches:
    """See `Caches`."""

    kv_caches: Sequence[torch.Tensor] = ()

    def copy(self, pairs: Int32Array) -> None:
        assert not len(pairs)
