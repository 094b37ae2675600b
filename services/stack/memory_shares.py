"""How models that a cluster starts with divide the memory of a GPU: each gets what it needs, and
those with a KV cache divide the rest by the sizes of their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..models.manifest import ModelManifest, weight_bytes
from .stack_error import StackError

GB = 1e9
ROOM = 1.1
"""Factor of weights: layouts of kernels, tables and fragments beside them."""
WORK_BYTES = 2 << 30
"""Memory of CUDA itself, of a step and of graphs, of one engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedModel:
    """A model that a cluster starts with."""

    folder: Path
    name: str
    """Served name."""
    weight_bytes: int
    has_cache: bool
    """Whether it keeps keys and values; an encoder does not."""

    @classmethod
    def of(cls, folder: Path, name: str | None) -> StartedModel:
        """The model of a folder, under its own name where none is given."""
        manifest = ModelManifest.read(folder)
        return cls(
            folder=folder,
            name=name or manifest.name,
            weight_bytes=weight_bytes(folder),
            has_cache=manifest.has_cache,
        )

    @property
    def needed_bytes(self) -> int:
        """Memory without a KV cache."""
        return int(ROOM * self.weight_bytes) + WORK_BYTES


def start_order(models: Sequence[StartedModel]) -> list[StartedModel]:
    """The order in which models take their memory: those without a KV cache, whose need is fixed,
    then the smallest first."""
    return sorted(models, key=lambda model: (model.has_cache, model.weight_bytes))


def memory_shares(
    models: Sequence[StartedModel], total: int, utilization: float
) -> dict[str, float]:
    """Share of a GPU's memory in use once each model's engine has started, by name, in order of
    start: an engine measures what others use, and takes the rest of its share. Raises `StackError`
    where they do not fit."""
    needed = sum(model.needed_bytes for model in models)
    rest = int(total * utilization) - needed
    if rest <= 0:
        names = ", ".join(f"{model.name} {model.needed_bytes / GB:.1f} GB" for model in models)
        raise StackError(
            f"the models do not fit on a GPU of {total / GB:.1f} GB, of which "
            f"--gpu-memory-utilization gives them {total * utilization / GB:.1f}: {names}"
        )
    cached = sum(model.weight_bytes for model in models if model.has_cache)
    taken = 0.0
    shares = {}
    for model in start_order(models):
        taken += model.needed_bytes
        if model.has_cache:
            taken += rest * model.weight_bytes / max(1, cached)
        shares[model.name] = min(utilization, round(taken / total, 4))
    return shares
