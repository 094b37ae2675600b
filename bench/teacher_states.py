"""Hidden states of a model over texts, kept while there is room: training reads each text many
times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from .decoder_twin import DecoderTwin
from .distillation import Text, computing, padded

KEPT_BYTES = 48 << 30
"""Largest number of bytes that are kept on a GPU."""
KEPT_BYTES_ON_CPU = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """B texts of T tokens."""

    token_ids: Tensor
    """int64 [B, T]"""
    is_learned: Tensor
    """bool [B, T]: whether the model's distribution behind a token is learned."""
    final: Tensor
    """Hidden states [B, T, H], normed."""
    inputs: dict[int, Tensor]
    """Inputs of layers [B, T, H], by layer."""


@dataclass(slots=True)
class TeacherStates:
    """Hidden states of a model, on its device."""

    teacher: DecoderTwin
    layers: tuple[int, ...]
    """Layers whose inputs are kept."""
    _kept: dict[int, Tensor] = field(default_factory=dict)
    """States [1 + layers, T, H] by the identity of a text."""
    _num_bytes: int = 0

    @torch.no_grad()
    def of(self, texts: Sequence[Text]) -> Taught:
        device = self.teacher.tensors["embed"].device
        token_ids, is_learned = padded(texts, device)
        if all(id(text) in self._kept for text in texts):
            length = token_ids.shape[1]
            states = [self._kept[id(text)] for text in texts]
            whole = torch.stack(
                [pad(each, (0, 0, 0, length - each.shape[1])) for each in states]
            ).float()
            final, *others = whole.unbind(1)
        else:
            inputs = {layer: token_ids.new_zeros(()) for layer in self.layers}
            with computing(device):
                final = self.teacher.hidden(token_ids, inputs)
            others = [inputs[layer] for layer in self.layers]
            self._keep(texts, torch.stack([final, *others], dim=1))
        inputs = dict(zip(self.layers, others, strict=True))
        return Taught(token_ids=token_ids, is_learned=is_learned, final=final, inputs=inputs)

    def input_sizes(self, texts: Sequence[Text]) -> list[float]:
        """Typical magnitude of final states and of each layer's inputs. It is a median, so that the
        first tokens of a text count little: their states are a hundred times as large in many
        models."""
        taught = self.of(texts)
        return [float(states.abs().median()) for states in (taught.final, *taught.inputs.values())]

    def _keep(self, texts: Sequence[Text], states: Tensor) -> None:
        """Keeps states [B, 1 + layers, T, H]."""
        most = KEPT_BYTES if states.device.type == "cuda" else KEPT_BYTES_ON_CPU
        for text, each in zip(texts, states, strict=True):
            if id(text) not in self._kept and self._num_bytes < most:
                own = each[:, : len(text.token_ids)]
                # A GPU serves states of 16 bits.
                own = own.bfloat16() if own.device.type == "cuda" else own.clone()
                self._kept[id(text)] = own
                self._num_bytes += own.nbytes
