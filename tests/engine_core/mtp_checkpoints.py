"""Small random checkpoints with a layer for multi-token prediction, in the layouts in which Qwen,
DeepSeek and GLM publish them, and what such a layer drafts, in float64.

The decoder layer, its rotary positions and the norm behind it are those of a model of one layer by
transformers, which itself ignores the tensors of these layers."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.engine_core.small_models import FAMILIES, random_checkpoint

Tensors = dict[str, torch.Tensor]
QWEN = {
    "fc.weight": "mtp.fc.weight",
    "embedding": "mtp.pre_fc_norm_embedding.weight",
    "hidden": "mtp.pre_fc_norm_hidden.weight",
    "norm.weight": "mtp.norm.weight",
    "layer": "mtp.layers.0.",
}
GLM = {
    "fc.weight": "model.layers.{}.eh_proj.weight",
    "embedding": "model.layers.{}.enorm.weight",
    "hidden": "model.layers.{}.hnorm.weight",
    "norm.weight": "model.layers.{}.shared_head.norm.weight",
    "layer": "model.layers.{}.",
}
"""Published names, by those of `OneLayer`."""
NAMES = {
    **dict.fromkeys(("qwen3-next", "qwen3.5", "qwen3.5-moe"), QWEN),
    **dict.fromkeys(("glm4-moe", "deepseek-v3", "glm4-moe-lite", "deepseek-v3.2", "glm-5"), GLM),
}
"""By family."""


class OneLayer:
    """A layer for multi-token prediction, beside the model whose embedding and head it shares."""

    def __init__(self, family: str, model: Any, *, seed: int = 1, **sizes: int) -> None:
        """model: the served one, of transformers, with these `sizes`. The layer's weights are
        random."""
        torch.manual_seed(seed)
        config = FAMILIES[family]()
        config.update(sizes)
        config.num_hidden_layers = 1
        if hasattr(config, "layer_types"):
            is_indexed = hasattr(config, "index_topk")
            config.layer_types = ["indexed_attention" if is_indexed else "full_attention"]
        if hasattr(config, "first_k_dense_replace"):
            config.first_k_dense_replace = 0
        if hasattr(config, "mlp_layer_types"):
            config.mlp_layer_types = ["sparse"]
        config._attn_implementation = "eager"
        size = config.hidden_size
        self._names = NAMES[family]
        self._num_layers = model.config.num_hidden_layers
        # (1 + w) in Qwen's norms.
        self._offset = 0.0 if self._names is GLM else 1.0
        self._eps = config.rms_norm_eps
        self.served = model
        self.layer = type(model.model)(config).float().eval()
        self.fc = torch.randn(size, 2 * size) / (2 * size) ** 0.5
        self.embedding_norm = 0.3 * torch.randn(size) + 1 - self._offset
        self.hidden_norm = 0.3 * torch.randn(size) + 1 - self._offset
        with torch.no_grad():
            for parameter in self.layer.parameters():
                spread = 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
                middle = 1 - self._offset if parameter.dim() == 1 else 0.0
                parameter.copy_(spread * torch.randn_like(parameter) + middle)

    def tensors(self) -> Tensors:
        """All of them by their published names."""
        found = {
            "fc.weight": self.fc,
            "embedding": self.embedding_norm,
            "hidden": self.hidden_norm,
            "norm.weight": self.layer.norm.weight,
        }
        named = {self._names[name]: tensor for name, tensor in found.items()}
        for name, tensor in self.layer.state_dict().items():
            if name.startswith("layers.0."):
                named[self._names["layer"] + name.removeprefix("layers.0.")] = tensor
        if self._names is GLM:
            named["model.layers.{}.embed_tokens.weight"] = self.served.model.embed_tokens.weight
            named["model.layers.{}.shared_head.head.weight"] = self.served.lm_head.weight
        return {
            name.format(self._num_layers): tensor.detach().clone().contiguous()
            for name, tensor in named.items()
        }

    def hidden(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """features [T, H] of positions, and the tokens [T] behind them → [T, H]"""
        embedded = self.served.get_input_embeddings()(tokens)
        x = torch.cat(
            (self._norm(embedded, self.embedding_norm), self._norm(features, self.hidden_norm)), 1
        )
        made = self.layer(inputs_embeds=(x @ self.fc.T)[None], use_cache=False)
        found: torch.Tensor = made.last_hidden_state[0]
        return found

    def rounded(self) -> OneLayer:
        """The same with weights that bfloat16 holds."""
        other = copy.deepcopy(self)
        other.served = other.served.bfloat16().float()
        other.layer = other.layer.bfloat16().float()
        for name in ("fc", "embedding_norm", "hidden_norm"):
            setattr(other, name, getattr(other, name).bfloat16().float())
        return other

    def double(self) -> OneLayer:
        """The same in float64."""
        other = copy.deepcopy(self)
        other.served = other.served.double()
        other.layer = other.layer.double()
        for config in (other.served.config, other.layer.config):
            # Products of all experts in one call know no float64.
            config._experts_implementation = "eager"
        for name in ("fc", "embedding_norm", "hidden_norm"):
            setattr(other, name, getattr(other, name).double())
        return other

    @torch.no_grad()
    def drafts(self, known: Sequence[int], count: int) -> list[int]:
        """Greedy ones of the tokens behind the known ones: everything is computed anew for each, in
        one pass over the whole text."""
        ids = torch.tensor(known)
        features = self.served.model(ids[None, :-1], use_cache=False).last_hidden_state[0]
        tokens = ids[1:]
        drafted = list[int]()
        for _ in range(count):
            hidden = self.hidden(features, tokens)[-1:]
            drafted.append(int(self.served.lm_head(hidden).argmax()))
            features = torch.cat((features, hidden))
            tokens = torch.cat((tokens, torch.tensor(drafted[-1:])))
        return drafted

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self._eps).rsqrt()
        return x * scale * (self._offset + weight)


def mtp_checkpoint(family: str, folder: Path, **sizes: int) -> OneLayer:
    """Writes a random checkpoint with a random layer; returns the layer. `sizes` are fields of the
    model's config."""
    layer = OneLayer(family, random_checkpoint(family, folder, **sizes), **sizes)
    add_layer(folder, layer.tensors())
    return layer


def add_layer(folder: Path, tensors: Tensors) -> None:
    """Writes the tensors beside those of a checkpoint, and what GLM's config says of them."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})
    if any(name.endswith("eh_proj.weight") for name in tensors):
        config = json.loads((folder / "config.json").read_text())
        config["num_nextn_predict_layers"] = 1
        (folder / "config.json").write_text(json.dumps(config))
