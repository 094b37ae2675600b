"""Contract of a device: each operation of a decoder, with the implementation chosen in one place a
device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from headwater.kernels.attention.rotary_pairs import RotaryPairs
from headwater.kernels.conv.conv_layer import ConvLayer
from headwater.kernels.delta.delta_arguments import DeltaLayer
from headwater.kernels.mamba.mamba_layer import MambaLayer
from headwater.kernels.quant.token_rounding import Rounding
from headwater.kernels.states.state_memory import StateMemory

from ..sampling.operations import SamplingOperations
from .batch import ForwardBatch
from .linear.linear import Linear, Product, ProductPair, Tokens
from .routing import ExpertProduct, ExpertStack, NormedRoutes, Router, Routes, SharedLinears


class Platform(Protocol):
    """Shapes as in `kernels`: T tokens, H hidden, Hq and Hk query and key heads, D head size."""

    device: torch.device
    sampling: SamplingOperations

    def plan_attention(self, batch: ForwardBatch, *, of_ends: bool = False) -> Any:
        """Plan of a batch for `attention`, made once for all layers; `of_ends`: for the last layer
        alone, where some tokens of a batch that has a plan already decode."""

    def linear(self, linear: Linear) -> Product:
        """The product with one weight: the platform's own for the weight's kind, else the
        kind's."""

    def gated_linear(self, linear: Linear, activation: str) -> Product | None:
        """x [T, K] → [T, I]: `gate` of the product with a weight [2 I, K], in one launch or nearly;
        None: the platform has no such kernel for the weight's kind, or for the activation."""

    def gate(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """x [T, 2 I], gates first → [T, I]: activation(gates) * ups. Activations: silu,
        gelu_tanh."""

    def activation(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """x → the same shape, element by element: gelu, gelu_tanh, relu, sigmoid, silu or tanh.
        Platforms with `activations` are asked for it, and for sigmoids those with `experts`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, H] → [T, H]; weight [H] of x's dtype or float32, here and below."""

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x in place; the norm of the sum."""

    def qk_norm_rope_store_kv(
        self,
        qkv: torch.Tensor,
        batch: ForwardBatch,
        cos_sin: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        pairs: RotaryPairs | None = None,
    ) -> torch.Tensor:
        """qkv [T, (Hq + 2 Hk) D] → q [T, Hq, D]; keys and values go to the layer's kv_cache
        [2, num_blocks, Hk, block_size, D]. The keys of a block lie together, as its values do; the
        other layers of the block lie between it and the next one. With `pairs`, which only
        platforms with `rotary_pairs` are given, queries and keys may leave in an order of their
        own."""

    def attention(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        attention_plan: Any,
        *,
        scale: float | None = None,
        window: int = 0,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, Hq, D] → [T, Hq D]; keys and values are read from the cache, those of this step
        included. `scale`: factor of scores, by default 1 / sqrt(D). `window`: 0, all keys, or the
        model's `sliding_window`, the last keys that a position attends to, its own included; a
        negative one, only for platforms with `chunks`, cuts sequences into chunks of that many
        positions, and a position attends to keys of its own chunk. `softcap`: scores are capped to
        it by tanh, only for platforms with `softcaps`; 0: not. `sinks` float32 [Hq], only for
        platforms with `sinks`: scores of keys whose values are zeros, which take a share of each
        softmax of their head."""


@runtime_checkable
class GatingPlatform(Protocol):
    """A platform that takes queries from between their gates; for others these are copied.
    `qk_norm_rope_store_kv` of it has the option `has_gates`: in qkv [T, (2 Hq + 2 Hk) D] the gates
    of a head follow its query."""

    def gate_heads(self, attended: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """attended [T, Hq D] times the sigmoid of gates [T, Hq, D], whose heads may lie apart."""


@runtime_checkable
class RowSumPlatform(Protocol):
    """A platform on which the order of torch's sums of rows depends on the number of rows."""

    def row_sum(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [T, N] → [T], each row added in an order that depends on N alone."""


def plans_of(platform: Platform, batch: ForwardBatch) -> Any:
    """The platform's attention plan of a batch, or a list of those of its page groups."""
    if not batch.page_groups:
        return platform.plan_attention(batch)
    return [platform.plan_attention(each) for each in batch.page_groups]


class TextAttention(Protocol):
    def __call__(
        self, x: torch.Tensor, texts: Any, distance_bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [T, H] and the plan of its texts → [T, Hq D]. distance_bias float32 [Hq, 2 L − 1] is
        added to the scores: column L − 1 + d is that of a key d positions behind its query."""


@dataclass(frozen=True, slots=True)
class BiasedLinear:
    """x [T, K] → [T, N]: activation(product + bias), bias [N]; activation as in
    `Platform.activation`, empty: none."""

    linear: Linear
    bias: torch.Tensor
    activation: str = ""


class SumNorm(Protocol):
    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x [T, K] and residual [T, H] → [T, H], which may lie where residual does; residual, which
        may be x, is of no use any more."""


class LayerNormWeights(Protocol):
    """A norm by mean and variance."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


class EncoderPlatform(Platform, Protocol):
    """A platform with the flag `encoders`."""

    def plan_texts(self, counts: Sequence[int], attended: Sequence[int] = ()) -> Any:
        """Plan of texts of so many tokens for `text_attention`, made once for all layers.
        `attended`: first tokens of each that its tokens attend to; empty: all."""

    def mutual_attention(
        self,
        qkv: torch.Tensor,
        texts: Any,
        head_dim: int,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """qkv [T, 3 Hq D] → [T, Hq D], as `text_attention` of what is projected already."""

    def text_attention(self, qkv: BiasedLinear, head_dim: int) -> TextAttention:
        """Attention in which each token attends to all tokens of its text, with scores scaled by
        1 / sqrt(D); qkv [3 Hq D, H]. A text has the same bits in any batch."""

    def sum_norm(self, linears: Sequence[BiasedLinear], norm: LayerNormWeights) -> SumNorm:
        """The norm of residual + the result of the linear layers, applied one after another to x.
        The last one has no activation."""

    def biased_linear(self, biased: BiasedLinear) -> Product:
        """The product of one linear layer."""


@runtime_checkable
class PoolingPlatform(Protocol):
    """A platform that pools all texts in one launch; for others each text is pooled by itself."""

    def span_means(self, states: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
        """states [T, H] and spans int32 [N, 2], the first row of each and the number of its rows →
        their means float32 [N, H]."""


class ExpertPlatform(Platform, Protocol):
    """A platform with the flag `experts`."""

    def route(self, logits: torch.Tensor, router: Router) -> Routes:
        """logits [T, E] of any floating type, read as float32 → the routes of T tokens."""

    def experts(self, gate_up: ExpertStack, down: ExpertStack, activation: str) -> ExpertProduct:
        """The product with the experts of a layer: down(gate(gate_up(x))) of each chosen one.
        gate_up of 2 I outputs an expert, gates first; down of I inputs; activation as in `gate`.
        Platforms with `expert_biases` are given stacks with biases, and the activation
        clamped_swiglu: g / (1 + exp(-1.702 g)) * (u + 1) of a gate g that is at most 7 and an up u
        between -7 and 7. Those with `plain_experts` are given stacks of I outputs without gates,
        and the activation relu2, the square of relu. Experts that no token chose are not read."""


@runtime_checkable
class SharingPlatform(Protocol):
    """A platform that adds a shared expert with fewer launches; on others it is composed of
    operations."""

    def gated_sum(
        self, out: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        """out + sigmoid(x · gate) shared, [T, H] each, for gate [1, H]."""


@runtime_checkable
class PairingPlatform(Protocol):
    """A platform that multiplies few tokens with two weights in one launch."""

    def linear_pair(self, first: Linear, second: Linear) -> ProductPair:
        """The products that `Platform.linear` returns, with their bits."""


@runtime_checkable
class NormingPlatform(Protocol):
    """A platform that norms few tokens and chooses their experts in one launch."""

    def normed_routes(
        self, norm: torch.Tensor, eps: float, weight: torch.Tensor, router: Router
    ) -> NormedRoutes | None:
        """norm [H] and weight [E, H] of the router; the bits are those of `add_rms_norm`, the
        router's product and `route`. None: no tokens are normed so."""


@runtime_checkable
class JoiningPlatform(Protocol):
    """A platform that makes a shared expert in the launches of the others."""

    def joint_experts(
        self,
        gate_up: ExpertStack,
        down: ExpertStack,
        shared: SharedLinears,
        activation: str,
        apart: ExpertProduct,
    ) -> ExpertProduct:
        """The product of `experts` with the shared expert added, which `apart` makes too; with the
        same bits."""


class StatePlatform(Platform, Protocol):
    """A platform with the flag `states`."""

    block_size: int
    """Tokens between borders of states."""

    def delta_net(
        self,
        wide: torch.Tensor,
        narrow: torch.Tensor,
        layer: DeltaLayer,
        memory: StateMemory,
    ) -> torch.Tensor:
        """Both projections [T, …] of a batch's tokens → gated and normed heads [T, value heads ·
        value_dim]. Reads the states of the rows' first blocks, appends to their tails, and writes
        those of their last blocks. A row may compute tokens again from any position of its first
        block: entries of the tail after that position are ignored."""


class ConvPlatform(Platform, Protocol):
    """A platform with the flag `short_convs`."""

    block_size: int
    """Tokens between borders of states."""

    def short_conv(
        self, parts: torch.Tensor, layer: ConvLayer, memory: StateMemory
    ) -> torch.Tensor:
        """The projection [T, 3 H] of a batch's tokens → gated sums [T, H]. States and rows as in
        `StatePlatform.delta_net`."""


class MambaPlatform(Platform, Protocol):
    """A platform with the flag `mamba`."""

    block_size: int
    """Tokens between borders of states."""

    def mamba(self, parts: torch.Tensor, layer: MambaLayer, memory: StateMemory) -> torch.Tensor:
        """The projection [T, …] of a batch's tokens → gated outputs [T, heads · head_dim], before
        their norm. States and rows as in `StatePlatform.delta_net`."""


class HeadsOverLatents(Protocol):
    """Attention of one layer over latents."""

    def __call__(self, q: torch.Tensor, cache: torch.Tensor, attention_plan: Any) -> torch.Tensor:
        """q [E, Hq, D], as `store_latents` leaves them, of the plan's tokens, and the layer's cache
        [num_blocks, block_size, width] → values of all heads [E, Hq · value_dim]"""


class LatentPlatform(Platform, Protocol):
    """A platform with the flag `latents`: all heads of a token read the same latent of each earlier
    token, in the order of sums of `kernels.latent`."""

    def store_latents(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        batch: ForwardBatch,
        cos_sin: torch.Tensor,
        cache: torch.Tensor,
        *,
        norm: torch.Tensor,
        eps: float,
        pairs: RotaryPairs,
    ) -> None:
        """Rotates the last numbers of each head of q [T, Hq, D] in place, and stores latents in the
        layer's cache [num_blocks, block_size, width]: kv [T, width], its first numbers normed by
        norm [rank], the others rotated. cos_sin float32 [positions, width - rank]. Rotated numbers
        of queries and latents may leave in an order of their own."""

    def latent_attention(self, kv_b: torch.Tensor, scale: float) -> HeadsOverLatents:
        """The attention of a layer. kv_b [Hq, plain_dim + value_dim, rank] makes of a latent's
        first numbers each head's own key, then its values. Every query is absorbed: its numbers
        without a position are multiplied by the first rows of its head, and meet latents. scale is
        that of the softmax."""


class IndexedQueries(NamedTuple):
    """Queries of tokens whose latents an indexer chooses."""

    heads: torch.Tensor
    """[E, Hq, D], as `store_latents` leaves them."""
    index_heads: torch.Tensor
    """[E, Hi, index D] of the indexer, as `store_index_keys` leaves them."""
    head_weights: torch.Tensor
    """float32 [E, Hi] of the indexer's heads."""


class HeadsOverChosen(Protocol):
    """Attention of one layer over the latents that an indexer chooses."""

    def __call__(
        self, queries: IndexedQueries, cache: torch.Tensor, attention_plan: Any
    ) -> torch.Tensor:
        """Queries of the plan's tokens, and the layer's cache [num_blocks, block_size, width +
        index D] of latents and keys of the indexer → values of all heads [E, Hq · value_dim]. The
        score of a position is the sum over the indexer's heads of their weight times the positive
        part of their query's product with its key; of equal scores the first position is higher.
        The latents chosen are attended to in the order of positions."""


class IndexPlatform(LatentPlatform, Protocol):
    """A platform with the flag `indexers`. A token whose latents are all chosen has the bits of
    `LatentPlatform.latent_attention`."""

    def store_index_keys(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        batch: ForwardBatch,
        cos_sin: torch.Tensor,
        keys: torch.Tensor,
        *,
        norm: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        pairs: RotaryPairs,
    ) -> None:
        """Rotates the first numbers of each head of q [T, Hi, D] in place, and stores the keys k
        [T, D], normed by mean and variance, norm and bias [D], their first numbers rotated, in keys
        [num_blocks, block_size, D], whose rows may lie apart. cos_sin float32 [positions, numbers
        that rotate]."""

    def indexed_attention(
        self, kv_b: torch.Tensor, scale: float, num_chosen: int
    ) -> HeadsOverChosen:
        """The attention of a layer to at most `num_chosen` latents; kv_b and scale as in
        `LatentPlatform.latent_attention`."""


class RoundingPlatform(Platform, Protocol):
    """A platform whose products can round activations to 8 bits; it can also round the result of
    the operation before, with the same bits as the two operations in sequence."""

    def rounded_rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, rounds_to: Rounding
    ) -> Tokens:
        """Like `rms_norm`."""

    def rounded_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        rounds_to: Rounding,
    ) -> Tokens:
        """Like `add_rms_norm`."""

    def rounded_gate(self, x: torch.Tensor, activation: str, rounds_to: Rounding) -> Tokens:
        """Like `gate`."""
