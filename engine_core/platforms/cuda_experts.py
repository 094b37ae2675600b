"""Mixtures of experts on a GPU: the router's choice and the products of chosen experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from headwater.kernels.attention.hopper_attention import is_hopper
from headwater.kernels.experts import expert_product as dense
from headwater.kernels.experts import packed_product as packed
from headwater.kernels.experts import rounded_product as rounded
from headwater.kernels.experts.clamped_gate import ExpertBiases
from headwater.kernels.experts.expert_sum import ExpertPart
from headwater.kernels.experts.gated_sum import gated_sum
from headwater.kernels.experts.normed_routes import NormedRouter, normed_routes
from headwater.kernels.experts.route import Choice, route
from headwater.kernels.experts.shared_expert import SharedExpert
from headwater.kernels.gemm.packed_words import PackedWords
from headwater.kernels.gemm.w8a8 import W8A8Weight

from ..config import ConfigError
from ..layers.linear.dense import DenseLinear
from ..layers.linear.int4 import Int4Linear
from ..layers.linear.linear import Linear
from ..layers.linear.mxfp4 import Mxfp4Linear
from ..layers.linear.ordered import OrderedLinear
from ..layers.linear.rounded import RoundedLinear
from ..layers.routing import (
    ExpertProduct,
    ExpertStack,
    NormedRoutes,
    Router,
    Routes,
    Scoring,
    SharedLinears,
)
from ..weights.model_config import CLAMPED_SWIGLU

SILU = "silu"
GELU = "gelu_tanh"
ALLOWED = (
    "dense, or of mxfp4, or 4 or 8 bits in groups that follow one another, in bfloat16 on a Hopper "
    "GPU"
)
"""Kinds of weights of experts that an error names."""


@dataclass(frozen=True, slots=True)
class _DenseLayer:
    """Experts of one layer whose matrices are in the model's dtype."""

    gate_up: torch.Tensor
    down: torch.Tensor
    is_gelu: bool
    biases: ExpertBiases | None
    part: ExpertPart

    def product(self, x: torch.Tensor, routes: Routes, *, is_early: bool) -> torch.Tensor:
        return dense.expert_product(
            x,
            routes.experts,
            routes.weights,
            self.gate_up,
            self.down,
            is_gelu=self.is_gelu,
            biases=self.biases,
            part=self.part,
            dependent=is_early,
        )

    def launch_all(self, num_chosen: int, early_rows: int) -> None:
        dense.launch_all_tiles(
            self.gate_up,
            self.down,
            num_chosen,
            is_gelu=self.is_gelu,
            biases=self.biases,
            part=self.part,
            early_tokens=early_rows,
        )


@dataclass(frozen=True, slots=True)
class _PackedLayer:
    """Like `_DenseLayer`, for weights of four or eight bits."""

    gate_up: PackedWords
    down: PackedWords
    num_experts: int
    is_gelu: bool
    biases: ExpertBiases | None
    part: ExpertPart

    def product(self, x: torch.Tensor, routes: Routes, *, is_early: bool) -> torch.Tensor:
        return packed.packed_expert_product(
            x,
            routes.experts,
            routes.weights,
            self.gate_up,
            self.down,
            self.num_experts,
            is_gelu=self.is_gelu,
            biases=self.biases,
            part=self.part,
            dependent=is_early,
        )

    def launch_all(self, num_chosen: int, early_rows: int) -> None:
        packed.launch_all_tiles(
            self.gate_up,
            self.down,
            self.num_experts,
            num_chosen,
            is_gelu=self.is_gelu,
            biases=self.biases,
            part=self.part,
            early_tokens=early_rows,
        )


@dataclass(frozen=True, slots=True)
class _RoundedLayer:
    """Like `_DenseLayer`, for weights of eight bits that are multiplied with tokens of eight
    bits."""

    gate_up: W8A8Weight
    down: W8A8Weight
    num_experts: int
    is_gelu: bool
    part: ExpertPart

    def product(self, x: torch.Tensor, routes: Routes, *, is_early: bool) -> torch.Tensor:
        return rounded.rounded_expert_product(
            x,
            routes.experts,
            routes.weights,
            self.gate_up,
            self.down,
            self.num_experts,
            is_gelu=self.is_gelu,
            part=self.part,
            dependent=is_early,
        )

    def launch_all(self, num_chosen: int, early_rows: int) -> None:
        rounded.launch_all_tiles(
            self.gate_up,
            self.down,
            self.num_experts,
            num_chosen,
            is_gelu=self.is_gelu,
            part=self.part,
            early_tokens=early_rows,
        )


_Layer = _DenseLayer | _PackedLayer | _RoundedLayer


@dataclass(frozen=True, slots=True)
class _JointLayer:
    """Experts of one layer with a shared one of their sizes: two launches for few tokens."""

    gate_up: torch.Tensor
    down: torch.Tensor
    shared: SharedExpert
    is_gelu: bool

    def product(self, x: torch.Tensor, routes: Routes, *, is_early: bool) -> torch.Tensor:
        return dense.few_product(
            x,
            routes.experts,
            routes.weights,
            self.gate_up,
            self.down,
            is_gelu=self.is_gelu,
            shared=self.shared,
            dependent=is_early,
        )

    def launch_all(self, num_chosen: int, early_rows: int) -> None:
        dense.launch_few_tiles(
            self.gate_up,
            self.down,
            num_chosen,
            is_gelu=self.is_gelu,
            shared=self.shared,
            early_tokens=early_rows,
        )


class CudaExperts:
    """The experts of a model's layers. Up to `early_rows` tokens kernels start while those before
    them end."""

    def __init__(self, early_rows: int) -> None:
        self._early_rows = early_rows
        self._layers: dict[tuple[object, ...], _Layer | _JointLayer] = {}
        """A layer of each kind, size and activation."""

    def route(self, logits: torch.Tensor, router: Router) -> Routes:
        """See `Platform.route`."""
        choice = _choice_of(router)
        is_early = self._is_early(logits)
        added = router.correction, router.bias, router.counts
        return Routes(*route(logits, choice, *added, dependent=is_early))

    def normed_routes(
        self, norm: torch.Tensor, eps: float, weight: torch.Tensor, router: Router
    ) -> NormedRoutes | None:
        """See `NormingPlatform`."""
        normed = NormedRouter(
            norm=norm,
            eps=eps,
            weight=weight,
            choice=_choice_of(router),
            correction=router.correction,
            bias=router.bias,
            counts=router.counts,
            num_done=torch.zeros(1, dtype=torch.int32, device=weight.device),
        )
        return partial(_normed_routes, normed) if normed.is_served else None

    def gated_sum(
        self, out: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        """See `SharingPlatform`."""
        return gated_sum(out, shared, x, gate, dependent=self._is_early(x))

    def product(self, gate_up: ExpertStack, down: ExpertStack, activation: str) -> ExpertProduct:
        """See `Platform.experts`. Raises `ConfigError` for weights of a kind without kernels."""
        layer = _layer_of(gate_up, down, activation)
        sizes = gate_up.out_features, gate_up.in_features
        self._layers[gate_up.kind, down.kind, sizes, activation] = layer
        return partial(self._product, layer)

    def joint(
        self,
        gate_up: ExpertStack,
        down: ExpertStack,
        shared: SharedLinears,
        activation: str,
        apart: ExpertProduct,
    ) -> ExpertProduct:
        """See `SharingPlatform`."""
        layer = _joint_layer_of(gate_up, down, shared, activation)
        if layer is None:
            return apart
        sizes = gate_up.out_features, gate_up.in_features
        self._layers["joint", shared.gate is None, sizes, activation] = layer
        return partial(self._joint, layer, apart)

    def launch_all(self, num_chosen: int) -> None:
        """Launches each kernel of the experts' products once, so that no step compiles it."""
        for layer in self._layers.values():
            layer.launch_all(num_chosen, self._early_rows)

    def _product(self, layer: _Layer, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        return layer.product(x, routes, is_early=self._is_early(x))

    def _joint(
        self, layer: _JointLayer, apart: ExpertProduct, x: torch.Tensor, routes: Routes
    ) -> torch.Tensor:
        num_pairs = routes.experts.numel()
        if not num_pairs or not dense.are_few(num_pairs):
            return apart(x, routes)
        return layer.product(x, routes, is_early=self._is_early(x))

    def _is_early(self, x: torch.Tensor) -> bool:
        return x.shape[0] <= self._early_rows


class CudaMixtures:
    """See `ExpertPlatform`, `NormingPlatform` and `SharingPlatform`."""

    mixtures: CudaExperts

    def route(self, logits: torch.Tensor, router: Router) -> Routes:
        return self.mixtures.route(logits, router)

    def normed_routes(
        self, norm: torch.Tensor, eps: float, weight: torch.Tensor, router: Router
    ) -> NormedRoutes | None:
        return self.mixtures.normed_routes(norm, eps, weight, router)

    def experts(self, gate_up: ExpertStack, down: ExpertStack, activation: str) -> ExpertProduct:
        return self.mixtures.product(gate_up, down, activation)

    def gated_sum(
        self, out: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        return self.mixtures.gated_sum(out, shared, x, gate)

    def joint_experts(
        self,
        gate_up: ExpertStack,
        down: ExpertStack,
        shared: SharedLinears,
        activation: str,
        apart: ExpertProduct,
    ) -> ExpertProduct:
        return self.mixtures.joint(gate_up, down, shared, activation, apart)


def _normed_routes(
    router: NormedRouter, x: torch.Tensor, residual: torch.Tensor
) -> tuple[torch.Tensor, Routes] | None:
    """See `NormedRoutes`."""
    if x.shape[0] != 1:
        return None
    normed, *routes = normed_routes(x, residual, router, dependent=True)
    return normed, Routes(*routes)


def _choice_of(router: Router) -> Choice:
    return Choice(
        num_chosen=router.num_chosen,
        is_sigmoid=router.scoring is Scoring.SIGMOID,
        is_normalized=router.is_normalized,
        scale=router.scale,
        num_groups=router.num_groups,
        num_chosen_groups=router.num_chosen_groups,
        num_group_scores=router.num_group_scores,
        own=router.own,
    )


def _layer_of(gate_up: ExpertStack, down: ExpertStack, activation: str) -> _Layer:
    biases = None
    if gate_up.bias is not None and down.bias is not None:
        biases = ExpertBiases(gate_up.bias, down.bias)
    # Kernels have one of two gates without biases, and a third one with biases.
    assert (biases is not None) == (activation == CLAMPED_SWIGLU)
    part = ExpertPart(down.is_share, down.num_leaves)
    gate = activation == GELU, biases, part
    if isinstance(gate_up.linear, RoundedLinear) and isinstance(down.linear, RoundedLinear):
        own = gate_up.linear.weight, down.linear.weight, gate_up.num_experts
        if biases is None:
            return _RoundedLayer(*own, activation == GELU, part)
    if gate_up.kind == down.kind == DenseLinear.kind:
        return _DenseLayer(gate_up.weight, down.weight, *gate)
    return _PackedLayer(_words_of(gate_up), _words_of(down), gate_up.num_experts, *gate)


def _joint_layer_of(
    gate_up: ExpertStack, down: ExpertStack, shared: SharedLinears, activation: str
) -> _JointLayer | None:
    """Layer that makes the shared expert in the launches of the others. None: the shared expert has
    other sizes, or some weights are not in the model's dtype, or are float32: products of experts
    read all digits of it, those of other layers ten bits."""
    pairs = ((gate_up, shared.gate_up), (down, shared.down))
    have_sizes = all(
        (one.out_features, one.in_features) == (of_all.out_features, of_all.in_features)
        for of_all, one in pairs
    )
    linears = [shared.gate_up, shared.down, *([] if shared.gate is None else [shared.gate])]
    are_dense = {gate_up.kind, down.kind, *(each.kind for each in linears)} == {DenseLinear.kind}
    if not (have_sizes and are_dense) or activation not in (SILU, GELU):
        return None
    if gate_up.weight.dtype == torch.float32:
        return None
    gate = None if shared.gate is None else _matrix(shared.gate)
    expert = SharedExpert(_matrix(shared.gate_up), _matrix(shared.down), gate)
    return _JointLayer(gate_up.weight, down.weight, expert, activation == GELU)


def _matrix(linear: Linear) -> torch.Tensor:
    assert isinstance(linear, DenseLinear)
    return linear.weight


def _words_of(stack: ExpertStack) -> PackedWords:
    """The weights [E N, K] of all experts as the kernel reads them. Raises `ConfigError`."""
    linear = stack.linear
    words: PackedWords | None = None
    if isinstance(linear, OrderedLinear) and linear.dtype == torch.bfloat16:
        words = linear.weight
    elif isinstance(linear, Int4Linear) and linear.dtype == torch.bfloat16:
        own = linear.weight
        if own.groups is None:
            words = PackedWords(words=own.words, scales=own.scales, zeros=own.zeros, bits=4)
    elif isinstance(linear, Mxfp4Linear) and linear.dtype == torch.bfloat16:
        floats = linear.weight
        words = PackedWords(words=floats.words, scales=floats.scales, zeros=None, bits=4)
    if words is None or not (
        is_hopper(words.words.device) and packed.fits(words, stack.num_experts)
    ):
        raise ConfigError("kind of weights of experts", stack.kind, ALLOWED)
    return words
