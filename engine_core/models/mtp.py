"""Layers for multi-token prediction in checkpoints: by architecture, the names of their tensors
there and the layout of ours. Sources: DeepSeek-AI, "DeepSeek-V3 technical report", 2024; the
checkpoints of DeepSeek V3, Qwen3-Next, Qwen3.5 and GLM-4.5."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from ..layers.linear.kinds import load_weights
from ..weights import model_file
from ..weights.draft_layer import DRAFT_WEIGHTS_NAME, draft_layer_of
from ..weights.hugging_face import HuggingFaceFolder
from ..weights.layout import Layout, linear
from ..weights.model_config import ModelConfig
from ..weights.model_file import Tensors
from ..weights.names import CheckpointNames, Weight
from ..weights.unpacking import unpacked
from .decoder import Decoder
from .layer_layout import layout_of, norms_of
from .model import model_class

FC = "fc"
EMBEDDING_NORM = "embedding_norm"
HIDDEN_NORM = "hidden_norm"
FINAL_NORM = "final_norm"
LAYER = "layers.0."
"""Beginning of the names of the decoder layer's tensors, here and in Qwen's checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpNames:
    """Names of a draft layer's tensors and of those around it."""

    prefix: str
    """Beginning of all names; `{}` stands for the number of the model's layers."""
    around: Mapping[str, str]
    """Ours, by name behind the prefix, of tensors around the decoder layer."""
    shared: tuple[str, ...] = ()
    """Endings of names of the model's own embedding and head, which are stored a second time."""

    def has(self, name: str) -> bool:
        """Whether a tensor of a checkpoint is one of the layer."""
        return name.startswith(self.prefix)

    def collect(
        self,
        tensors: Iterable[tuple[str, Weight]],
        config: ModelConfig,
        dtype: torch.dtype,
        left_out: list[str],
    ) -> Tensors:
        """The layer's tensors under our names, which begin with the prefix. `left_out` takes the
        names of tensors that are not used. Raises `ConfigError`."""
        names: CheckpointNames = model_class(config).names
        own = replace(names, model=self.around, ignored=(*names.ignored, *self.shared))
        unused: list[str] = []
        found = own.collect(
            ((self._behind(name), tensor) for name, tensor in tensors),
            dtype,
            lambda done: None,
            mtp_layout(draft_layer_of(config)),
            config=config,
            left_out=unused,
        )
        left_out += [self.prefix + name.removeprefix(LAYER) for name in unused]
        return found

    def _behind(self, name: str) -> str:
        """The name of a tensor as that of a model of one layer."""
        rest = name.removeprefix(self.prefix)
        is_placed = rest in self.around or rest.startswith(LAYER)
        return rest if is_placed else LAYER + rest


_QWEN = MtpNames(
    prefix="mtp.",
    around={
        "fc.weight": FC,
        "pre_fc_norm_embedding.weight": EMBEDDING_NORM,
        "pre_fc_norm_hidden.weight": HIDDEN_NORM,
        "norm.weight": FINAL_NORM,
    },
)
_GLM = MtpNames(
    prefix="model.layers.{}.",
    around={
        "eh_proj.weight": FC,
        "enorm.weight": EMBEDDING_NORM,
        "hnorm.weight": HIDDEN_NORM,
        "shared_head.norm.weight": FINAL_NORM,
    },
    shared=("embed_tokens.weight", "shared_head.head.weight"),
)
MTP_NAMES = {
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "DeepseekV3ForCausalLM": _GLM,
    "DeepseekV32ForCausalLM": _GLM,
    "Glm4MoeForCausalLM": _GLM,
    "Glm4MoeLiteForCausalLM": _GLM,
    "GlmMoeDsaForCausalLM": _GLM,
}
"""Keyed by architecture."""


@dataclass(frozen=True, slots=True)
class MtpTensors:
    """The layer in a checkpoint."""

    checkpoint: HuggingFaceFolder
    names: MtpNames

    @classmethod
    def of(cls, checkpoint: HuggingFaceFolder, config: ModelConfig) -> Self | None:
        """The layer that drafts; None: the checkpoint has none that is used."""
        known = MTP_NAMES.get(config.architecture) if config.foreign is None else None
        if known is None:
            return None
        names = replace(known, prefix=known.prefix.format(config.num_layers))
        return cls(checkpoint, names) if any(map(names.has, checkpoint.names())) else None

    def others(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of everything else in the checkpoint."""
        return self.checkpoint.tensors(lambda name: not self.names.has(name))

    def write(
        self, config: ModelConfig, dtype: torch.dtype, left_out: list[str], folder: Path
    ) -> None:
        """Writes the layer into a converted model's folder. It is not rounded, since it is small
        beside the model. `left_out` takes the names of tensors that are not used. Raises
        `ConfigError` for a tensor that is missing or does not fit."""
        published = unpacked(self.checkpoint.tensors(self.names.has), config.quantization)
        tensors = self.names.collect(published, config, dtype, left_out)
        load_weights(mtp_layout(draft_layer_of(config)), tensors, dtype)
        model_file.save(tensors, folder, DRAFT_WEIGHTS_NAME)


def mtp_layout(layer: ModelConfig) -> Layout:
    """Weights of a layer with this config, in the order of our names."""
    hidden = layer.hidden_size
    whole = layout_of(layer, Decoder.layer_norms)
    return {
        FC: linear(hidden, 2 * hidden),
        **norms_of(layer, (EMBEDDING_NORM, HIDDEN_NORM, FINAL_NORM)),
        **{name: spec for name, spec in whole.items() if name.startswith(LAYER)},
    }
