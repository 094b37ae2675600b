"""A CPU in plain torch. Products and attention are computed row by row, so that a row's bits are
its own.

Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.layers.linear.dense import DenseLinear
from headwater.engine_core.layers.linear.linear import Linear, Product
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.platforms.capabilities import Capabilities
from headwater.engine_core.weights.model_config import ModelConfig
from headwater.kernels.launch.environment import Environment
from headwater.kernels.sampling.filtered_sample import Filters
from headwater.kernels.sampling.gumbel import gumbel_noise, noise_keys
from headwater.kernels.sampling.sample import Draws
from headwater.kernels.sampling.token_mask import LOWEST

api = 2
name = "plain"
capabilities = Capabilities(dtypes=("float32", "bfloat16"), max_head_dim=256, windows=True)
ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}
DEVICE = torch.device("cpu")


def is_available() -> bool:
    return True


def environment() -> Environment:
    return Environment.of(DEVICE)


def kv_cache_memory(options: ExecutorOptions) -> int:
    return 512 << 20


class Sampling:
    """Tokens from whole rows of logits."""

    def draw(self, logits: Tensor, draws: Draws, masks: Tensor | None = None) -> Tensor:
        logits = logits if masks is None else self.mask_tokens(logits, masks)
        return _scores(logits, draws).argmax(1).int()

    def draw_filtered(self, logits: Tensor, draws: Draws, filters: Filters) -> Tensor:
        return torch.cat([self._draw_one(logits, draws, filters, i) for i in range(len(logits))])

    def mask_tokens(self, logits: Tensor, masks: Tensor) -> Tensor:
        tokens = torch.arange(logits.shape[1])
        is_allowed = (masks[:, tokens // 32] >> (tokens % 32)) & 1 != 0
        return logits.float().clamp(min=LOWEST).masked_fill(~is_allowed, -math.inf)

    def logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        every = torch.stack([row.log_softmax(0) for row in logits.float()])
        best = every.sort(dim=1, descending=True, stable=True)
        chosen = every.gather(1, token_ids.long()[:, None])[:, 0]
        return chosen, best.indices[:, :num_top].int(), best.values[:, :num_top]

    def _draw_one(self, logits: Tensor, draws: Draws, filters: Filters, i: int) -> Tensor:
        row = torch.tensor([i])
        ranked = (
            (logits[i].double() / draws.temperatures[i].double()).softmax(0).sort(descending=True)
        )
        p = ranked.values
        least = float(filters.min_ps[i]) * p[0]
        if top_k := int(filters.top_ks[i]):
            least = max(least, p[min(top_k, len(p)) - 1])
        p = p * (p >= least)
        if float(filters.top_ps[i]) < 1:
            mass_above = (p.cumsum(0) - p) / p.sum()
            least = max(least, p[mass_above < filters.top_ps[i].double()].min())
        kept = torch.zeros_like(logits[i], dtype=torch.bool)
        kept[ranked.indices] = (p >= least) & (p > 0)
        return _scores(logits[row], draws.select(row)).masked_fill(~kept, -math.inf).argmax(1).int()


def _scores(logits: Tensor, draws: Draws) -> Tensor:
    keys = noise_keys(draws.seeds, draws.choice_indices, draws.output_indices)
    noise = gumbel_noise(keys, torch.arange(logits.shape[1], dtype=torch.int32))
    is_greedy = draws.temperatures[:, None] == 0
    scaled = logits.float() / torch.where(is_greedy, 1.0, draws.temperatures[:, None])
    return torch.where(is_greedy, scaled, scaled + noise)


class Platform:
    """See `headwater.engine_core.layers.platform.Platform`."""

    device = DEVICE
    sampling = Sampling()

    @classmethod
    def of(cls, model: ModelConfig, config: EngineConfig) -> Platform:
        return cls()

    def plan_attention(self, batch: ForwardBatch, *, of_ends: bool = False) -> ForwardBatch:
        return batch

    def linear(self, linear: Linear) -> Product:
        assert isinstance(linear, DenseLinear)
        return lambda x: _product(x, linear.weight)

    def gated_linear(self, linear: Linear, activation: str) -> None:
        """None: composed of the product and `gate`."""

    def gate(self, x: Tensor, activation: str) -> Tensor:
        gates, ups = x.float().chunk(2, dim=1)
        return _by_row(lambda gate, up: ACTIVATIONS[activation](gate) * up, gates, ups).to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _by_row(lambda row: _normed(row, weight, eps), x.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def qk_norm_rope_store_kv(
        self,
        qkv: Tensor,
        batch: ForwardBatch,
        cos_sin: Tensor,
        kv_cache: Tensor,
        *,
        bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        heads = (qkv.float() if bias is None else qkv.float() + bias.float()).unflatten(
            1, (-1, head_dim)
        )
        num_q_heads = heads.shape[1] - 2 * num_kv_heads
        q, k, v = heads.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
        cos, sin = cos_sin[batch.positions][:, None].chunk(2, dim=2)
        q = _rotated(
            q if q_norm is None else _by_row(lambda row: _normed(row, q_norm, eps), q), cos, sin
        )
        k = _rotated(
            k if k_norm is None else _by_row(lambda row: _normed(row, k_norm, eps), k), cos, sin
        )
        for side, values in zip(kv_cache, (k, v), strict=True):
            side[batch.slots // block_size, :, batch.slots % block_size] = values.to(kv_cache.dtype)
        return q.to(qkv.dtype)

    def attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        attention_plan: ForwardBatch,
        *,
        scale: float | None = None,
        window: int = 0,
    ) -> Tensor:
        scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
        plan = attention_plan
        out = torch.empty_like(q)
        token = 0
        for i, (start, count) in enumerate(
            zip(plan.starts.tolist(), plan.counts.tolist(), strict=True)
        ):
            keys, values = (
                side[plan.block_tables[i].long()].float().transpose(0, 1).flatten(1, 2)
                for side in kv_cache
            )
            for position in range(start, start + count):
                rows = q[token].clone().float().unflatten(0, (keys.shape[0], -1))
                seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
                scores = rows @ keys[:, seen].mT * scale
                out[token] = (scores.softmax(2) @ values[:, seen]).flatten(0, 1).to(q.dtype)
                token += 1
        return out.flatten(1)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Of a copy of each row, since the order of a library's sum depends on where in memory a row
    begins."""
    return (
        torch.stack([weight @ row.clone() for row in x]) if len(x) else x.new_empty(0, len(weight))
    )


def _by_row(operation, *inputs: Tensor) -> Tensor:
    """A library may choose other instructions for other numbers of rows."""
    return torch.stack([operation(*rows) for rows in zip(*inputs, strict=True)])


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=2)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=2)
