"""Weights of draft heads before their training: drawn, or taken from the served model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from headwater.engine_core.heads.heads_config import (
    EAGLE3,
    MEDUSA,
    HeadsConfig,
)
from headwater.engine_core.heads.registry import CLASSES

from .decoder_twin import DecoderTwin
from .distillation import Text
from .head_twins import Tensors
from .teacher_states import TeacherStates

NOT_WRITTEN = ("embed_tokens.weight",)
"""Published tensors that are not written, because they are the served model's own."""
SCALE_TEXTS = 8
"""Number of texts that the size of hidden states is taken from."""
SPREAD = 0.02
"""Standard deviation of weights before training."""


def input_scale(
    config: HeadsConfig, states: TeacherStates, texts: Sequence[Text]
) -> torch.Tensor | None:
    """Factor for each input of EAGLE's `fc`, which makes the inputs about equally large."""
    if config.kind == MEDUSA:
        return None
    embedding = states.teacher.tensors["embed"]
    final, *inputs = states.input_sizes(texts)
    sizes = inputs if config.kind == EAGLE3 else [float(embedding.abs().median()), final]
    hidden = embedding.shape[1]
    return torch.cat([embedding.new_full((hidden,), 1 / max(size, 1e-6)) for size in sizes])


def first_tensors(config: HeadsConfig, teacher: DecoderTwin, scale: torch.Tensor | None) -> Tensors:
    """Small random weights. Tensors that add to a residual stream begin at zero, a head and the
    norm before it as the model's, and tensors that read hidden states pass the last ones on: EAGLE
    as they are, EAGLE-3 scaled, since it has a norm."""
    served = teacher.config
    vocabulary = teacher.vocabulary
    required, _ = CLASSES[config.kind].published(config, served)
    generator = torch.Generator().manual_seed(0)
    tensors = Tensors()
    for name, shape in required.items():
        if name in ("d2t", *NOT_WRITTEN):
            continue
        tensor = SPREAD * torch.randn(shape, generator=generator)
        if "norm" in name:
            tensor = torch.ones(shape)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "linear.weight", "bias")):
            tensor = torch.zeros(shape)
        tensors[name] = tensor.to(vocabulary.device)
        if shape == tuple(vocabulary.shape):
            tensors[name] = vocabulary.clone()
    if scale is not None:
        size = 1.0 if config.kind == EAGLE3 else 1 / float(scale[-1])
        hidden = served.hidden_size
        tensors["fc.weight"][:, -hidden:] += size * torch.eye(hidden, device=vocabulary.device)
    if "norm.weight" in tensors:
        tensors["norm.weight"] = teacher.tensors["final_norm"].clone()
    return tensors


def frequent_tokens(texts: Sequence[Text], count: int, vocab_size: int) -> torch.Tensor:
    """Ids of the most frequent tokens of answers, then of the lowest ids, int64 [count],
    ascending."""
    counts = Counter(token for text in texts for token in text.token_ids[text.num_prompt :])
    ranked = [token for token, _ in counts.most_common(count)]
    rest = (token for token in range(vocab_size) if token not in counts)
    return torch.tensor(
        sorted(
            [*ranked, *(token for token, _ in zip(rest, range(count - len(ranked)), strict=False))]
        )
    )
