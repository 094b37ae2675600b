"""Small random encoders of every family, as transformers and sentence-transformers write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from headwater.engine_core.request import NewRequest
from headwater.engine_core.sampling_params import SamplingParams
from tests.engine_core.small_models import SmallEngine

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 322,
}
MODERN = {"local_attention": 64, "pad_token_id": 0}
ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(**SHAPE, architectures=["BertModel"]),
    "roberta": lambda: transformers.RobertaConfig(**SHAPE, architectures=["RobertaModel"]),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(
        **SHAPE, type_vocab_size=1, architectures=["XLMRobertaModel"]
    ),
    "mpnet": lambda: transformers.MPNetConfig(**SHAPE, architectures=["MPNetModel"]),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SHAPE, **MODERN, architectures=["ModernBertModel"]
    ),
    "nomic": lambda: transformers.NomicBertConfig(**SHAPE, architectures=["NomicBertModel"]),
}


def random_encoder(family: str, folder: Path) -> Any:
    """A random model of the family, written into the folder. Weights are large enough for attention
    to choose between tokens."""
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(ENCODERS[family]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3 if parameter.dim() > 1 else 0.1)
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def write_modules(
    folder: Path,
    pooling: str,
    *,
    dense: Sequence[torch.nn.Linear] = (),
    modules: Sequence[str] = (),
    **pooled: Any,
) -> None:
    """Files of sentence-transformers: pooling, dense layers with tanh, and a normalization.
    `modules`: classes in place of the normalization; `pooled`: more of the pooling's config."""
    kinds = ["Transformer", "Pooling", *("Dense" for _ in dense), *(modules or ("Normalize",))]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds) if i)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    modes = {f"pooling_mode_{pooling}": True, "word_embedding_dimension": 64} | pooled
    (folder / paths[1] / "config.json").write_text(json.dumps(modes))
    for layer, path in zip(dense, paths[2:], strict=False):
        config = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        (folder / path / "config.json").write_text(json.dumps(config))
        tensors = {f"linear.{name}": each.detach() for name, each in layer.named_parameters()}
        save_file(tensors, folder / path / "model.safetensors")


def embed(
    engine: SmallEngine,
    texts: Sequence[Sequence[int]],
    pooling: str = "mean",
    second_starts: Sequence[int] = (),
) -> list[np.ndarray]:
    """Vectors of texts that are asked for at once; `second_starts`: of pairs."""
    for key, text in enumerate(texts):
        start = second_starts[key] if second_starts else 0
        sampling = SamplingParams(max_tokens=0, pooling=pooling, second_start=start)
        engine.engine.add(
            NewRequest(key=key, prompt_ids=list(text), output_ids=[], sampling=sampling)
        )
    vectors: dict[int, np.ndarray] = {}
    while engine.engine.has_work():
        if (output := engine.engine.step()) is not None:
            vectors |= {
                key: np.frombuffer(values, np.float32) for key, values in output.embeddings.items()
            }
    return [vectors[key] for key in range(len(texts))]


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    lengths = np.linalg.norm(first) * np.linalg.norm(second)
    return float(first.astype(np.float64) @ second / lengths)


CLASSIFIERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(
        **SHAPE, num_labels=1, architectures=["BertForSequenceClassification"]
    ),
    "roberta": lambda: transformers.RobertaConfig(
        **SHAPE, num_labels=3, architectures=["RobertaForSequenceClassification"]
    ),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(
        **SHAPE,
        type_vocab_size=1,
        num_labels=1,
        architectures=["XLMRobertaForSequenceClassification"],
    ),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SHAPE,
        **MODERN,
        num_labels=3,
        classifier_pooling="mean",
        architectures=["ModernBertForSequenceClassification"],
    ),
}


def random_classifier(family: str, folder: Path) -> Any:
    """As `random_encoder`, with a head of labels."""
    torch.manual_seed(0)
    config = CLASSIFIERS[family]()
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3 if parameter.dim() > 1 else 0.1)
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model
