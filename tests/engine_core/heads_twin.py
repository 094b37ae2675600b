"""What published draft heads draft behind known tokens, in plain torch and float64: everything is
computed anew for each draft, in one pass over the whole text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear, silu

from tests.engine_core.published_heads import Tensors


class HeadsTwin:
    def __init__(self, model: Any, config: dict[str, Any], tensors: Tensors) -> None:
        """model: the served one, of transformers."""
        self._model = copy.deepcopy(model).double()
        self._config = config
        self._tensors = {
            name: t.double() if t.is_floating_point() else t for name, t in tensors.items()
        }

    @torch.no_grad()
    def drafts(self, known: Sequence[int], count: int) -> list[int]:
        """Greedy ones of the tokens behind the known ones."""
        ids = torch.tensor(known)
        states = [
            each[0] for each in self._model(ids[None, :-1], output_hidden_states=True).hidden_states
        ]
        if "medusa_num_heads" in self._config:
            return [int(self._medusa(i, states[-1][-1]).argmax()) for i in range(count)]
        features = self._features(states)
        tokens = ids[1:]
        drafted = list[int]()
        for _ in range(count):
            hidden = self._layer(features, tokens)[-1:]
            drafted.append(self._likeliest(hidden))
            features = torch.cat((features, hidden))
            tokens = torch.cat((tokens, torch.tensor(drafted[-1:])))
        return drafted

    @property
    def _is_third(self) -> bool:
        return "midlayer.hidden_norm.weight" in self._tensors

    def _medusa(self, head: int, x: torch.Tensor) -> torch.Tensor:
        for j in range(self._config["medusa_num_layers"]):
            name = f"{head}.{j}.linear"
            x = x + silu(linear(x, self._tensors[name + ".weight"], self._tensors[name + ".bias"]))
        return linear(x, self._tensors[f"{head}.{self._config['medusa_num_layers']}.weight"])

    def _features(self, states: list[torch.Tensor]) -> torch.Tensor:
        """states: input of each layer, then the normed last one."""
        if not self._is_third:
            return states[-1]
        num_layers = len(states) - 1
        read = [states[i] for i in range(num_layers) if i in (2, num_layers // 2, num_layers - 3)]
        return linear(torch.cat(read, dim=1), self._tensors["fc.weight"])

    def _likeliest(self, hidden: torch.Tensor) -> int:
        if not self._is_third:
            return int(self._model.lm_head(hidden).argmax())
        best = int(linear(self._norm(hidden, "norm"), self._tensors["lm_head.weight"]).argmax())
        return best + int(self._tensors["d2t"][best]) if "d2t" in self._tensors else best

    def _layer(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self._model.get_input_embeddings()(tokens)
        if self._is_third:
            prefix = "midlayer."
            residual = features
            x = torch.cat(
                (
                    self._norm(embedded, prefix + "input_layernorm"),
                    self._norm(features, prefix + "hidden_norm"),
                ),
                dim=1,
            )
        else:
            prefix = "layers.0."
            x = residual = self._product(torch.cat((embedded, features), dim=1), "fc")
        x = residual + self._attention(x, prefix + "self_attn.")
        y = self._norm(x, prefix + "post_attention_layernorm")
        gated = silu(self._product(y, prefix + "mlp.gate_proj")) * self._product(
            y, prefix + "mlp.up_proj"
        )
        return x + self._product(gated, prefix + "mlp.down_proj")

    def _attention(self, x: torch.Tensor, prefix: str) -> torch.Tensor:
        num_heads = self._config["num_attention_heads"]
        length = len(x)
        repeats = num_heads // self._config["num_key_value_heads"]
        q, k, v = (self._product(x, f"{prefix}{name}_proj").view(length, -1, 16) for name in "qkv")
        q = self._rotated(q)
        k = self._rotated(k).repeat_interleave(repeats, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / 4
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        read = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(repeats, dim=1))
        return self._product(read.flatten(1), prefix + "o_proj")

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """The pair of position p stands at place p."""
        base = float(self._config.get("rope_theta", 10_000.0))
        angles = torch.arange(len(x)).double()[:, None] * base ** -(torch.arange(8).double() / 8)
        cos = angles.cos()[:, None]
        sin = angles.sin()[:, None]
        low = x[..., :8]
        high = x[..., 8:]
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def _product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self._tensors[name + ".weight"], self._tensors.get(name + ".bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self._config["rms_norm_eps"]).rsqrt()
        return x * scale * self._tensors[name + ".weight"]
