"""Files that sentence-transformers writes beside a checkpoint: how hidden states become one vector.

`modules.json` lists what follows the model: pooling, dense layers, a normalization.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config import ConfigError, require
from ..json_object import read_array, read_object

KEY = "headwater_sentence"
"""Field of a converted model's `config.json` with what the files say."""
MODULES = "modules.json"
SPARSE = "sparse_linear.pt"
"""File of bge-m3 with the layer that makes a weight of each token."""
COLBERT = "colbert_linear.pt"
"""File of bge-m3 with the layer that makes a vector of each token."""
LAYERS_OF_TOKENS = {"sparse": SPARSE, "colbert": COLBERT}
"""Files of layers for tokens, by what their tensors' names begin with."""
LATE = "late_interaction"
TOKEN = "token"
SENTENCE_CONFIG = "config_sentence_transformers.json"
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
"""Poolings by their fields of a pooling's `config.json`."""
SERVED_POOLINGS = ("cls", "mean", "last")
DENSE_ACTIVATIONS = {"Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
"""Activations of dense layers, by the class of torch that a file names."""
_FOLDER = re.compile(r"[A-Za-z0-9_.-]*")


def read_sentence_files(folder: Path) -> dict[str, Any] | None:
    """Content of sentence-transformers' files, in the form that is stored in `config.json`; None:
    there are none. Raises `ConfigError` for a module that is not served."""
    if not (folder / MODULES).is_file():
        return None
    kinds = _modules(folder)
    require(
        bool(kinds) and kinds[0] == ("Transformer", ""),
        MODULES,
        kinds[0] if kinds else "empty",
        "a Transformer in the folder itself as its first module",
    )
    found: dict[str, Any] = {"pooling": "", "normalizes": False, "dense": []}
    for kind, path in kinds[1:]:
        match kind:
            case "Pooling":
                found["pooling"] = _pooling(read_object(folder / path / "config.json"))
            case "Dense":
                found["dense"].append(_dense(path, read_object(folder / path / "config.json")))
            case "Normalize":
                found["normalizes"] = True
            case "LogitScore":
                found["logit_tokens"] = _logit_tokens(read_object(folder / path / "config.json"))
            case _:
                allowed = "Pooling, Dense, Normalize, LogitScore"
                raise ConfigError(f"module of {MODULES}", kind, allowed)
    found |= _prompts(folder) | _length(folder)
    for kind, name in LAYERS_OF_TOKENS.items():
        if (folder / name).is_file():
            found[kind] = True
    if all(kind != "Pooling" for kind, _ in kinds) and found["dense"]:
        found |= _late_interaction(folder)
    return found


def _late_interaction(folder: Path) -> dict[str, Any]:
    """How a model compares two texts token by token, as PyLate writes it. Source: Khattab and
    Zaharia, "ColBERT", 2020."""
    config = read_object(folder / SENTENCE_CONFIG)
    marks = {side: config.get(f"{side}_prefix") for side in ("query", "document")}
    for side, mark in marks.items():
        is_text = isinstance(mark, str)
        require(is_text, f"{side}_prefix", mark, f"a text, where {MODULES} has no Pooling")
    query_len = config.get("query_length", 32)
    is_len = type(query_len) is int and 1 <= query_len <= 1 << 16
    require(is_len, "query_length", query_len, "a whole number, 1…65536")
    words = config.get("skiplist_words") or []
    are_words = isinstance(words, list) and all(isinstance(word, str) for word in words)
    require(are_words, "skiplist_words", words, "a list of words")
    expands = config.get("do_query_expansion", True)
    return {
        "pooling": TOKEN,
        "prompts": marks,
        LATE: {
            "query_len": query_len if expands else 0,
            "attends_to_expansion": bool(config.get("attend_to_expansion_tokens", False)),
            "skipped_words": words,
        },
    }


def dense_folders(sentence: Mapping[str, Any] | None) -> list[str]:
    """Folders of dense layers, in their order."""
    return [each["path"] for each in (sentence or {}).get("dense", ())]


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(class, folder) of each module."""
    found = []
    for module in read_array(folder / MODULES):
        is_module = isinstance(module, dict) and isinstance(module.get("type"), str)
        require(is_module, f"module of {MODULES}", module, "objects with type and path")
        path = module.get("path", "")
        is_inside = isinstance(path, str) and _FOLDER.fullmatch(path) and not path.startswith(".")
        require(is_inside, f"path in {MODULES}", path, "a folder beside it")
        found.append((module["type"].rpartition(".")[2], path))
    return found


def _pooling(config: Mapping[str, Any]) -> str:
    mode = config.get("pooling_mode")
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    modes = [mode] if isinstance(mode, str) else [POOLINGS.get(name, name) for name in on]
    is_served = len(modes) == 1 and modes[0] in SERVED_POOLINGS
    require(is_served, "pooling_mode", ", ".join(modes), f"one of {', '.join(SERVED_POOLINGS)}")
    return modes[0]


def _logit_tokens(config: Mapping[str, Any]) -> list[int | None]:
    """Token ids whose logits make a score: the first one's less the second one's."""
    token_ids = [config.get(name) for name in ("true_token_id", "false_token_id")]
    for name, token_id in zip(("true_token_id", "false_token_id"), token_ids, strict=True):
        is_id = type(token_id) is int and token_id >= 0
        is_none = name == "false_token_id" and token_id is None
        require(is_id or is_none, name, token_id, "a token id")
    return token_ids


def _dense(path: str, config: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {name: config.get(name) for name in ("in_features", "out_features")}
    for name, size in sizes.items():
        is_size = type(size) is int and 1 <= size <= 1 << 18
        require(is_size, f"{name} of {path}", size, "a whole number, 1…262144")
    residual = config.get("use_residual", False)
    require(not residual, f"use_residual of {path}", residual, "false")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    require(
        activation in DENSE_ACTIVATIONS,
        f"activation_function of {path}",
        activation,
        ", ".join(DENSE_ACTIVATIONS),
    )
    return {
        **sizes,
        "path": path,
        "bias": bool(config.get("bias", True)),
        "activation": DENSE_ACTIVATIONS[activation],
    }


def _prompts(folder: Path) -> dict[str, Any]:
    """Texts that go before an input, by name, and the name of the one that always does."""
    path = folder / SENTENCE_CONFIG
    config = read_object(path) if path.is_file() else {}
    prompts = config.get("prompts") or {}
    is_texts = isinstance(prompts, dict) and all(isinstance(each, str) for each in prompts.values())
    require(is_texts, "prompts", prompts, "texts by name")
    default = config.get("default_prompt_name")
    is_known = default is None or default in prompts
    require(is_known, "default_prompt_name", default, f"one of {', '.join(prompts) or 'none'}")
    return {"prompts": prompts, "default_prompt": default or ""}


def _length(folder: Path) -> dict[str, Any]:
    """The longest text in tokens; 0: the files do not say."""
    path = folder / "sentence_bert_config.json"
    length = read_object(path).get("max_seq_length") if path.is_file() else None
    is_length = length is None or (type(length) is int and length >= 1)
    require(is_length, "max_seq_length", length, "a whole number from 1, or none")
    return {"max_length": length or 0}
