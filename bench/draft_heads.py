"""`headwater bench draft-heads`: trains draft heads for a model on the model's own answers.

As for a draft model, nothing but the model is needed. The written folder has the layout in which
such heads are published, and is the value of `headwater up --draft-heads`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from headwater.engine_core.config import ConfigError
from headwater.engine_core.heads.checkpoint import write_heads
from headwater.engine_core.heads.heads_config import (
    EAGLE,
    EAGLE3,
    EAGLE3_ARCHITECTURE,
    MEDUSA,
    HeadsConfig,
)
from headwater.engine_core.heads.registry import CLASSES
from headwater.engine_core.models import registry
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.hardware import resolve_device
from headwater.services.runtime.progress import silent

from .decoder_twin import DecoderTwin
from .distillation import Text, Tuning
from .draft_model import answers_of, report_loss
from .head_training import chain_quality, train_heads
from .head_twins import HeadsTwin, Tensors, twin_of
from .program import check_choice, run_program
from .teacher_states import TeacherStates

KINDS = (EAGLE, EAGLE3, MEDUSA)
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
SCALE_TEXTS = 8
"""Number of texts that the size of hidden states is taken from."""
SPREAD = 0.02
"""Standard deviation of weights before training."""
NOT_WRITTEN = ("embed_tokens.weight",)
"""Published tensors that are not written, because they are the served model's own."""


def main(
    folder: Annotated[Path, typer.Argument(help="to write; must not exist")],
    kind: Annotated[str, typer.Option(help=", ".join(KINDS))] = EAGLE,
    model: Annotated[
        str, typer.Option(help="the served model: a name, a Hugging Face id or a folder")
    ] = DEMO_NAME,
    intermediate: Annotated[int, typer.Option(help="width of EAGLE's gates; 0: the model's")] = 0,
    kv_heads: Annotated[
        int,
        typer.Option(
            help="key heads of EAGLE's attention, with as many query heads each as the "
            "model's; 0: its"
        ),
    ] = 0,
    draft_vocab: Annotated[
        int, typer.Option(help="tokens that EAGLE-3 drafts among, the most frequent ones; 0: all")
    ] = 16_384,
    heads: Annotated[int, typer.Option(help="of Medusa")] = 4,
    depth: Annotated[
        int, typer.Option(help="links of the chains that are learned and measured")
    ] = 4,
    answers: Annotated[int, typer.Option(help="of the model at most, to train on")] = 16_384,
    answer_tokens: Annotated[int, typer.Option(help="of an answer at most")] = 192,
    rows: Annotated[int, typer.Option(help="answers at once")] = 256,
    minutes: Annotated[float, typer.Option(help="of training at most")] = 2.0,
    steps: Annotated[int, typer.Option(help="of training at most")] = 100_000,
    learning_rate: Annotated[float, typer.Option(help="of Muon and AdamW, at its highest")] = 2e-3,
    batch_tokens: Annotated[
        int, typer.Option(help="of a step of training; each takes up to 100 bytes a token id")
    ] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
) -> None:
    """Train draft heads for a model on the model's own answers."""
    if folder.exists():
        raise typer.BadParameter(f"{folder} exists already")
    check_choice("--kind", kind, KINDS)
    device = resolve_device(device)
    source = pull(model, cache_dir=default_cache_dir(), progress=silent, device=device)
    served = registry.read_config(source)
    sizes = {
        "intermediate": intermediate,
        "kv_heads": kv_heads,
        "draft_vocab": draft_vocab,
        "num_heads": heads,
    }
    hf_config = published_config(kind, source, served, **sizes)
    config = HeadsConfig.from_hf(hf_config, served)
    texts = answers_of(source, device, answers, answer_tokens, rows)
    tuning = Tuning(
        steps=steps, seconds=60 * minutes, learning_rate=learning_rate, batch_tokens=batch_tokens
    )
    tensors = trained_heads(config, source, texts, tuning, depth, torch.device(device))
    write_heads(folder, hf_config, tensors)
    typer.echo(
        f"written: {folder}, {sum(tensor.nbytes for tensor in tensors.values()) / 1e6:.1f} MB"
    )


def published_config(
    kind: str,
    source: Path,
    served: ModelConfig,
    *,
    intermediate: int,
    kv_heads: int,
    draft_vocab: int,
    num_heads: int,
) -> dict[str, Any]:
    """The `config.json` of heads for a converted model. Raises `ConfigError`."""
    if kind == MEDUSA:
        return {"medusa_num_heads": num_heads, "medusa_num_layers": 1}
    model = json.loads((source / "config.json").read_text())
    if draft_vocab < 0:
        raise ConfigError("draft_vocab", draft_vocab, f"0…{served.vocab_size}")
    if kv_heads < 0:
        raise ConfigError("kv_heads", kv_heads, "0 or more")
    kv_heads = kv_heads or served.num_kv_heads
    drafted = min(draft_vocab or served.vocab_size, served.vocab_size)
    config = {
        "architectures": [EAGLE3_ARCHITECTURE if kind == EAGLE3 else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "bias": False,
        "hidden_size": served.hidden_size,
        "intermediate_size": intermediate or served.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": kv_heads * (served.num_heads // served.num_kv_heads),
        "num_key_value_heads": kv_heads,
        "head_dim": served.head_dim,
        "rms_norm_eps": served.rms_norm_eps,
        "vocab_size": served.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{key: model[key] for key in ROPE_KEYS if model.get(key) is not None},
    }
    return config | ({"draft_vocab_size": drafted} if kind == EAGLE3 else {})


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


if __name__ == "__main__":
    run_program(main)
