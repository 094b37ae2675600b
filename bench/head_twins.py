"""Draft heads in plain torch, over whole texts, so that autograd can differentiate them. Their
tensors have the names and shapes in which such heads are published.

A chain drafts one token after another, and reads its own hidden states behind the first. Over a
whole text all chains are computed at once: place p of link s is that link of the chain which began
at place p − s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad, rms_norm, silu

from headwater.engine_core.heads.heads_config import EAGLE3, MEDUSA, HeadsConfig
from headwater.engine_core.layers.rope import cos_sin_table

from .decoder_twin import DecoderTwin, rotated

Tensors = dict[str, Tensor]


class HeadsTwin(Protocol):
    """B texts of T tokens, H hidden, G tokens that are drafted among."""

    tensors: Tensors
    token_ids: Tensor | None
    """Ids int64 [G]; None: all of the vocabulary."""

    def links(
        self, token_ids: Tensor, final: Tensor, inputs: Mapping[int, Tensor], depth: int
    ) -> Iterator[Tensor]:
        """Yields, for each link of all chains, the states [B, T, H] that its `logits` are made
        from: place p drafts the token at p + 2. token_ids [B, T]; final [B, T, H] and inputs by
        layer are the model's hidden states."""

    def logits(self, link: int, hidden: Tensor) -> Tensor:
        """Logits float32 [N, G] of a link's states [N, H]."""

    def published(self) -> Tensors:
        """The tensors as they are served."""


class MedusaTwin:
    token_ids: Tensor | None = None

    def __init__(self, config: HeadsConfig, tensors: Tensors) -> None:
        self._config = config
        self.tensors = tensors

    def links(
        self, token_ids: Tensor, final: Tensor, inputs: Mapping[int, Tensor], depth: int
    ) -> Iterator[Tensor]:
        for link in range(min(depth, self._config.num_heads)):
            # The head drafts further ahead from where its chain began.
            yield _behind(final, link)

    def logits(self, link: int, hidden: Tensor) -> Tensor:
        for block in range(self._config.num_blocks):
            name = f"{link}.{block}.linear"
            hidden = hidden + silu(
                linear(hidden, self.tensors[name + ".weight"], self.tensors[name + ".bias"])
            )
        return linear(hidden, self.tensors[f"{link}.{self._config.num_blocks}.weight"]).float()

    def published(self) -> Tensors:
        return dict(self.tensors)


class EagleTwin:
    """EAGLE and EAGLE-3. `fc.weight` is kept divided by `scale`, a number for each input, 1 where
    none is given: inputs differ in size by a factor of a hundred, which one learning rate does not
    suit."""

    def __init__(
        self,
        config: HeadsConfig,
        tensors: Tensors,
        teacher: DecoderTwin,
        token_ids: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        assert config.layer is not None
        self._config = config
        self._layer = config.layer
        self._teacher = teacher
        self._is_third = config.kind == EAGLE3
        self._prefix = "midlayer." if self._is_third else "layers.0."
        self.tensors = tensors
        self.token_ids = token_ids
        self._scale = tensors["fc.weight"].new_ones(()) if scale is None else scale

    def published(self) -> Tensors:
        return self.tensors | {"fc.weight": self.tensors["fc.weight"] * self._scale}

    def links(
        self, token_ids: Tensor, final: Tensor, inputs: Mapping[int, Tensor], depth: int
    ) -> Iterator[Tensor]:
        # A place reads the token after it; the last one of a text has none, and drafts nothing
        # that counts.
        tokens = embedding(pad(token_ids[:, 1:], (0, 1)), self._teacher.tensors["embed"])
        cos, sin = (
            cos_sin_table(self._layer, token_ids.shape[1]).to(token_ids.device).chunk(2, dim=1)
        )
        features = final
        if self._is_third:
            read = torch.cat([inputs[layer] for layer in self._config.input_layers], dim=-1)
            features = linear(read * self._scale, self.tensors["fc.weight"])
        keys = list[Tensor]()
        values = list[Tensor]()
        for _ in range(depth):
            x, residual = self._inputs(tokens, features)
            q, k, v = (self._heads(x, name) for name in "qkv")
            q = rotated(q, cos, sin)
            k = rotated(k, cos, sin)
            keys.append(k)
            values.append(v)
            residual = residual + self._product(_attention(q, keys, values), "self_attn.o_proj")
            x = self._norm(residual, self._prefix + "post_attention_layernorm")
            gated = silu(self._product(x, "mlp.gate_proj")) * self._product(x, "mlp.up_proj")
            hidden = residual + self._product(gated, "mlp.down_proj")
            yield hidden
            features = _behind(hidden, 1)

    def logits(self, link: int, hidden: Tensor) -> Tensor:
        if not self._is_third:
            return self._teacher.logits(hidden)
        return linear(self._norm(hidden, "norm"), self.tensors["lm_head.weight"]).float()

    def _inputs(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Input of attention, and the residual stream."""
        if self._is_third:
            read = (
                self._norm(tokens, "midlayer.input_layernorm"),
                self._norm(features, "midlayer.hidden_norm"),
            )
            return torch.cat(read, dim=-1), features
        x = linear(
            torch.cat((tokens, features.to(tokens.dtype)), dim=-1) * self._scale,
            self.tensors["fc.weight"],
        )
        return x, x

    def _heads(self, x: Tensor, name: str) -> Tensor:
        """Heads of a projection, [B, heads, T, D]."""
        heads = self._product(x, f"self_attn.{name}_proj")
        return heads.view(*heads.shape[:2], -1, self._layer.head_dim).transpose(1, 2)

    def _product(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.tensors[f"{self._prefix}{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[name + ".weight"]
        return rms_norm(x.float(), weight.shape, weight, self._layer.rms_norm_eps)


def _behind(x: Tensor, count: int) -> Tensor:
    """[B, T, …] moved by `count` places towards the end; zeros come in."""
    return pad(x[:, : x.shape[1] - count], (0, 0, count, 0)) if count else x


def _attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of a link, [B, T, Hq D]: q [B, Hq, T, D] of the link, keys and values [B, Hk, T, D]
    of the links so far. A place reads those of the model's own hidden states, up to the beginning
    of its chain, and those of the links of its chain."""
    link = len(keys) - 1
    length = q.shape[2]
    repeats = q.shape[1] // keys[0].shape[1]
    wide_keys, wide_values = (
        [each.repeat_interleave(repeats, dim=1) for each in parts] for parts in (keys, values)
    )
    is_ahead = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1 - link)
    scores = (q @ wide_keys[0].transpose(2, 3)).float().masked_fill(is_ahead, -math.inf)
    own = [_moved(each, link - i) for i, each in enumerate(wide_keys[1:], start=1)]
    scores = torch.cat((scores, *((q * key).sum(-1, keepdim=True).float() for key in own)), dim=-1)
    # Places before the first of a link have no chain; some score keeps them finite.
    scores[:, :, :link, 0] = 0.0
    weights = (scores / math.sqrt(q.shape[3])).softmax(-1).to(q.dtype)
    read = weights[..., :length] @ wide_values[0]
    for i, each in enumerate(wide_values[1:], start=1):
        read = read + weights[..., length + i - 1 : length + i] * _moved(each, link - i)
    return read.transpose(1, 2).flatten(2)


def _moved(x: Tensor, count: int) -> Tensor:
    """Like `_behind`, for [B, heads, T, D]."""
    return pad(x[:, :, : x.shape[2] - count], (0, 0, count, 0)) if count else x


def twin_of(
    config: HeadsConfig,
    tensors: Tensors,
    teacher: DecoderTwin,
    token_ids: Tensor | None = None,
    scale: Tensor | None = None,
) -> MedusaTwin | EagleTwin:
    if config.kind == MEDUSA:
        return MedusaTwin(config, tensors)
    return EagleTwin(config, tensors, teacher, token_ids, scale)
