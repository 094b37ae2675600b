"""EAGLE-3: as EAGLE, over hidden states of a low, a middle and a high layer, and with a head of its
own over the tokens that it drafts among. Source: Li et al., "EAGLE-3: Scaling up inference
acceleration of large language models via training-time test", 2025, with the published code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..config import ConfigError, require
from ..executor import Int32Array
from ..layers.batch import ForwardBatch
from ..layers.linear.kinds import Weights
from ..layers.norm import RMSNorm
from ..layers.platform import Platform
from ..models.model import LastTokens
from ..weights.layout import Layout, Split, linear, norm, table
from ..weights.model_config import ModelConfig
from ..weights.model_file import Tensors
from ..weights.names import CheckpointNames
from ..weights.shards import WHOLE, Shard
from . import draft_layer
from .checkpoint import HeadsFile, Shapes
from .draft_layer import DraftLayer
from .heads_config import NUM_INPUTS, HeadsConfig
from .served import Served

PREFIX = "midlayer."
TO_TOKENS = "d2t"
TO_DRAFTS = "t2d"
"""Names of the maps: the difference between the id of a token that heads draft among and its
number; whether heads draft a token."""
NAMES = CheckpointNames(
    model={"fc.weight": "fc", "norm.weight": "final_norm", "lm_head.weight": "lm_head"},
    layer=draft_layer.NAMES
    | {"hidden_norm.weight": "hidden_norm", "input_layernorm.weight": "input_norm"},
    fused=draft_layer.FUSED,
    ignored=("embed_tokens.weight", TO_TOKENS, TO_DRAFTS),
)
NEVER = -1e4
"""Logit of tokens that the heads do not draft among: finite in every dtype, divided by any
temperature too."""


class Eagle3:
    """See `ChainHeads`."""

    looks_at_all = False

    def __init__(
        self,
        config: HeadsConfig,
        weights: Weights,
        platform: Platform,
        served: Served,
        max_model_len: int,
        shard: Shard = WHOLE,
    ) -> None:
        assert config.layer is not None
        linears = weights.linears
        tensors = weights.tensors
        eps = config.layer.rms_norm_eps
        self.config = config.layer
        self.layers = config.input_layers
        self._served = served
        self._fc = platform.linear(linears["fc"])
        self._lm_head = platform.linear(linears["lm_head"])
        self._hidden_norm = RMSNorm(platform, tensors["layers.0.hidden_norm"], eps)
        self._input_norm = RMSNorm(platform, tensors["layers.0.input_norm"], eps)
        self._layer = DraftLayer(platform, config.layer, weights, max_model_len)
        self._final_norm = RMSNorm(platform, tensors["final_norm"], eps)
        self._vocabulary = None
        if (token_ids := tensors.get("token_ids")) is not None:
            self._vocabulary = DraftVocabulary.of(
                token_ids, shard.vocabulary(served.config.vocab_size)
            )

    @staticmethod
    def published(config: HeadsConfig, served: ModelConfig) -> tuple[Shapes, Shapes]:
        assert config.layer is not None
        hidden = served.hidden_size
        drafted = config.draft_vocab_size
        vocabulary = served.vocab_size
        layer = draft_layer.published_shapes(config.layer, 2 * hidden)
        layer = {**layer, "hidden_norm.weight": (hidden,), "input_layernorm.weight": (hidden,)}
        required: dict[str, tuple[int, ...]] = {
            PREFIX + name: shape for name, shape in layer.items()
        }
        required |= {"fc.weight": (hidden, NUM_INPUTS * hidden), "norm.weight": (hidden,)}
        required |= {"lm_head.weight": (drafted, hidden)}
        maps: dict[str, tuple[int, ...]] = {TO_TOKENS: (drafted,)}
        optional: dict[str, tuple[int, ...]] = {
            TO_DRAFTS: (vocabulary,),
            "embed_tokens.weight": (vocabulary, hidden),
        }
        biases = {
            PREFIX + name: shape
            for name, shape in draft_layer.published_biases(config.layer).items()
        }
        is_whole = drafted == vocabulary
        return (
            (required, optional | biases | maps)
            if is_whole
            else (required | maps, optional | biases)
        )

    @staticmethod
    def collect(file: HeadsFile, config: HeadsConfig, dtype: torch.dtype) -> Tensors:
        tensors = (
            (name.replace(PREFIX, "model.layers.0."), tensor) for name, tensor in file.tensors()
        )
        collected = NAMES.collect(tensors, dtype, lambda done: None)
        return collected if (ids := token_ids(file)) is None else collected | {"token_ids": ids}

    @staticmethod
    def layout(config: HeadsConfig, served: ModelConfig, names: Collection[str]) -> Layout:
        assert config.layer is not None
        hidden = served.hidden_size
        # Tokens of a map lie anywhere in the vocabulary: ranks have all of such a head.
        split = Split.NONE if "token_ids" in names else Split.VOCABULARY
        return {
            "fc": linear(hidden, NUM_INPUTS * hidden),
            "layers.0.hidden_norm": norm(hidden),
            "layers.0.input_norm": norm(hidden),
            **draft_layer.layout(config.layer, 2 * hidden, names),
            "final_norm": norm(hidden),
            "lm_head": linear(config.draft_vocab_size, hidden, split=split),
            **({"token_ids": table(config.draft_vocab_size)} if "token_ids" in names else {}),
        }

    def features(self, final: torch.Tensor, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return self._fc(torch.cat([inputs[layer] for layer in self.layers], dim=1))

    def ends(self, batch: ForwardBatch, num_wanted: Int32Array) -> LastTokens:
        return self._layer.ends(batch, num_wanted)

    def forward(
        self,
        batch: ForwardBatch,
        features: torch.Tensor,
        kv_cache: torch.Tensor,
        attention_plan: Any = None,
        *,
        ends: LastTokens | None = None,
    ) -> torch.Tensor:
        read = (
            self._input_norm(self._served.embedding(batch.token_ids)),
            self._hidden_norm(features),
        )
        return self._layer.forward(
            torch.cat(read, dim=1), features, batch, kv_cache[0], attention_plan, ends
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._lm_head(self._final_norm(hidden))
        return logits if self._vocabulary is None else self._vocabulary.scatter(logits)


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Logits of a head over some tokens that belong to a rank's part of the vocabulary."""

    num_tokens: int
    """Tokens of the part."""
    columns: torch.Tensor | slice
    """Logits of tokens in it."""
    places: torch.Tensor
    """int64: tokens of these logits, from the first of the part on."""

    @classmethod
    def of(cls, token_ids: torch.Tensor, part: range) -> DraftVocabulary:
        is_own = (token_ids >= part.start) & (token_ids < part.stop)
        columns = slice(None) if is_own.all() else torch.nonzero(is_own)[:, 0]
        return cls(len(part), columns, token_ids[columns] - part.start)

    def scatter(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [S, drafted tokens] → [S, tokens of the part]"""
        wide = logits.new_full((len(logits), self.num_tokens), NEVER)
        wide[:, self.places] = logits[:, self.columns]
        return wide


def token_ids(file: HeadsFile) -> torch.Tensor | None:
    """Ids of the tokens that heads draft among, int64; None: the file does not say, so all. Raises
    `ConfigError`."""
    if TO_TOKENS not in file.shapes:
        return None
    added = file.tensor(TO_TOKENS)
    is_whole = added.dtype in (torch.int64, torch.int32)
    require(
        is_whole, f"dtype of tensor {TO_TOKENS}", str(added.dtype), "torch.int64 or torch.int32"
    )
    return added.long() + torch.arange(len(added))


def check_map(file: HeadsFile, config: HeadsConfig, served: ModelConfig) -> None:
    """Raises `ConfigError` for a map that leads out of the vocabulary."""
    ids = token_ids(file)
    if ids is not None and not ((ids >= 0) & (ids < served.vocab_size)).all():
        found = f"{int(ids.min())}…{int(ids.max())}"
        raise ConfigError(
            f"checkpoint tensor {TO_TOKENS}", found, f"token ids 0…{served.vocab_size - 1}"
        )
