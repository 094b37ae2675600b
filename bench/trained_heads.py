"""Training of draft heads on the answers of the served model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import typer

from headwater.engine_core.heads.heads_config import (
    HeadsConfig,
)
from headwater.engine_core.models import registry
from headwater.engine_core.weights import model_file

from .decoder_twin import DecoderTwin
from .distillation import Text, Tuning
from .draft_model import report_loss
from .first_heads import SCALE_TEXTS, first_tensors, frequent_tokens, input_scale
from .head_training import chain_quality, train_heads
from .head_twins import HeadsTwin, Tensors, twin_of
from .teacher_states import TeacherStates


def trained_heads(
    config: HeadsConfig,
    source: Path,
    texts: Sequence[Text],
    tuning: Tuning,
    depth: int,
    device: torch.device,
) -> Tensors:
    """Tensors under their published names. Prints the quality of chains, before and after. Raises
    `ConfigError`."""
    served = registry.read_config(source)
    stored = model_file.load(source, device)
    teacher = DecoderTwin(served, {name: tensor.float() for name, tensor in stored.items()})
    states = TeacherStates(teacher, config.input_layers)
    scale = input_scale(config, states, texts[:SCALE_TEXTS])
    tensors = first_tensors(config, teacher, scale)
    maps = Tensors()
    token_ids = None
    if config.draft_vocab_size:
        token_ids = frequent_tokens(texts, config.draft_vocab_size, served.vocab_size).to(device)
        maps = maps_of(token_ids.cpu(), served.vocab_size)
        tensors["lm_head.weight"] = teacher.vocabulary[token_ids].clone()
    heads = twin_of(config, tensors, teacher, token_ids, scale)
    _print_quality("before", heads, states, texts, tuning, depth)
    train_heads(config, heads, states, texts, tuning, depth, report_loss)
    _print_quality("trained", heads, states, texts, tuning, depth)
    published = heads.published().items()
    return {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous() for name, tensor in published
    } | maps


def maps_of(token_ids: torch.Tensor, vocab_size: int) -> Tensors:
    """The published maps of the tokens that heads draft among: to ids, and from ids."""
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[token_ids] = True
    return {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": is_drafted}


def _print_quality(
    when: str,
    heads: HeadsTwin,
    states: TeacherStates,
    texts: Sequence[Text],
    tuning: Tuning,
    depth: int,
) -> None:
    for found in chain_quality(heads, states, texts, tuning, depth):
        stands = ", ".join(f"{share:.1%}" for share in found.stands)
        what = f"{found.tokens_per_step:.3f} tokens a step at temperature {found.temperature:g}"
        typer.echo(f"{when}: {what}; drafts that stand, by place: {stands}")
