"""From a checkpoint's names to those of a model's layout; projections that read the same input become one matrix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from headwater.engine_core.config import ConfigError
from headwater.engine_core.weights.model_file import Tensors

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """Hugging Face's names of an architecture's tensors, each with ours."""

    model: Mapping[str, str]
    """Of tensors outside the layers."""
    layer: Mapping[str, str]
    """Behind `model.layers.N.`; ours stand behind `layers.N.`."""
    fused: Mapping[str, tuple[str, int]]
    """As `layer`, of a part of a tensor: that tensor's name, and the place of the part among its rows."""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Endings of names of tensors that are no weights."""

    def collect(
        self, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, progress: Callable[[int], None]
    ) -> Tensors:
        """The tensors under our names. Progress is told in tensors read. Raises `ConfigError` for a tensor that the
        architecture has not, and for parts of a tensor without the others."""
        collected: Tensors = {}
        parts: dict[str, dict[int, torch.Tensor]] = {}
        num_parts = Counter(name for name, _ in self.fused.values())
        for done, (name, tensor) in enumerate(tensors):
            if not name.endswith(self.ignored):
                prefix, ours, place = self._place(name)
                waiting = parts.setdefault(prefix + ours, {})
                waiting[place] = tensor.to(dtype)
                if len(waiting) == num_parts.get(ours, 1):
                    del parts[prefix + ours]
                    whole = [waiting[i] for i in range(len(waiting))]
                    collected[prefix + ours] = torch.cat(whole) if len(whole) > 1 else whole[0].contiguous()
            progress(done)
        if parts:
            raise ConfigError("checkpoint", sorted(parts), "every part of a fused projection")
        return collected

    def _place(self, name: str) -> tuple[str, str, int]:
        """Our prefix and name, and the place among parts."""
        if name in self.model:
            return "", self.model[name], 0
        match = _LAYER.fullmatch(name)
        if match is not None:
            prefix, rest = f"layers.{match[1]}.", match[2]
            if rest in self.layer:
                return prefix, self.layer[rest], 0
            if rest in self.fused:
                return prefix, *self.fused[rest]
        raise ConfigError("checkpoint tensor", name, "tensors of the architecture")
