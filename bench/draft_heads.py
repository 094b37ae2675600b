"""`headwater bench draft-heads`: trains draft heads for a model on the model's own answers.

As for a draft model, nothing but the model is needed. The written folder has the layout in which
such heads are published, and is the value of `headwater up --draft-heads`.
"""

from __future__ import annotations

import json
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
from headwater.engine_core.models import registry
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.services.models.demo_model import DEMO_NAME
from headwater.services.models.store import default_cache_dir, pull
from headwater.services.runtime.hardware import resolve_device
from headwater.services.runtime.progress import silent

from .distillation import Tuning
from .draft_model import answers_of
from .program import check_choice, run_program
from .trained_heads import trained_heads

KINDS = (EAGLE, EAGLE3, MEDUSA)
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")


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


if __name__ == "__main__":
    run_program(main)
