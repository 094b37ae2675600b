"""The kinds of linear layers, by the tensors that their weights consist of."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...config import ConfigError
from .blocks import BlockLinear
from .dense import DenseLinear
from .fp8 import Fp8Linear, Fp8TokensLinear
from .int4 import Int4Linear
from .int8 import Int8Linear, W8A8Linear
from .linear import StoredLinear
from .mxfp4 import Mxfp4Linear
from .planes import PlanesLinear

Tensors = Mapping[str, torch.Tensor]
KINDS: dict[str, type[StoredLinear]] = {
    kind.kind: kind
    for kind in (
        DenseLinear,
        Int4Linear,
        Int8Linear,
        W8A8Linear,
        Fp8Linear,
        Fp8TokensLinear,
        BlockLinear,
        PlanesLinear,
        Mxfp4Linear,
    )
}
"""Kinds that a model's file can hold, or tensors made of it when it is loaded, by name."""


def register(kind: type[StoredLinear]) -> None:
    """Adds a kind. Its suffixes must differ from the suffixes of every other kind."""
    assert all(set(kind.suffixes) != set(known.suffixes) for known in KINDS.values())
    KINDS[kind.kind] = kind


def kind_of(name: str, tensors: Tensors) -> type[StoredLinear]:
    """The kind of the weight whose tensors have this name and a suffix. Raises `ConfigError`."""
    for kind in KINDS.values():
        if all(name + suffix in tensors for suffix in kind.suffixes):
            return kind
    raise missing(name)


def missing(name: str) -> ConfigError:
    """The error about a checkpoint without this tensor."""
    return ConfigError("checkpoint", f"without {name}", "every tensor of the architecture")
