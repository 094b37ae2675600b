"""Maps a checkpoint's names to those of a model's layout; projections that read the same input
become one matrix."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from headwater.kernels.quant.block_formats import BlockWeight
from headwater.kernels.quant.int4_layout import Int4Weight
from headwater.kernels.quant.mxfp4 import Mxfp4Weight

from ..config import ConfigError, require
from . import blocks
from .grouped import GroupedWeight, can_join, expanded, joined, named
from .layout import Layout, WeightSpec
from .model_config import ModelConfig
from .model_file import Tensors

Weight = torch.Tensor | GroupedWeight | BlockWeight
"""A tensor of a checkpoint, packed or not."""
NO_LAYOUT: Layout = MappingProxyType({})
Change = Callable[[torch.Tensor, ModelConfig], torch.Tensor]
PackedChange = Callable[[Mxfp4Weight, ModelConfig], Mxfp4Weight]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_ROOT = re.compile(
    r"(?:model\.language_model|language_model\.model|language_model|model\.text_model|model\.decoder"
    r"|transformer|backbone|gpt_neox|decoder|model|bert|nomic_bert|roberta|mpnet)\."
)
"""Prefixes of a model's tensors in checkpoints of various tools; some have none."""
LISTED = 8
"""Kinds of tensors that a line lists."""
_BLOCK = re.compile(r"^(?:h|blocks|encoder\.layers?)\.(?=\d+\.)")
_EXPERT = re.compile(r".+\.experts\.(\d{1,6})\.(.+)")
_UNUSED = re.compile(
    r"(?:model\.)?(?:visual|vision_tower|vision_model|vision_embed_tokens|vision_encoder|audio_tower"
    r"|embed_vision|embed_audio|multi_modal_projector|mm_projector|patch_merger|mtp)\..+"
    r"|.+\.(?:[kqv]|kv|prob_output)_scale"
)
"""Towers of image and audio models, heads that draft, and scales of caches of eight bits."""


def canonical(name: str) -> str:
    """A tensor's name as most checkpoints of causal models have it: under `model.`, layers under
    `model.layers.`, and `lm_head`."""
    rest = _ROOT.sub("", name, count=1) if _ROOT.match(name) else name
    return rest if rest.startswith("lm_head.") else "model." + _BLOCK.sub("layers.", rest)


def is_flat(name: str) -> bool:
    """Whether a checkpoint of a model without its head has such a name."""
    return _ROOT.match(name) is None and not name.startswith("lm_head.")


def in_one_line(names: list[str]) -> str:
    """The tensors that are not used, by the first parts of their names."""
    counts = Counter(re.sub(r"\.\d+\..*", "", name) for name in names)
    listed = ", ".join(f"{name} ({count})" for name, count in counts.most_common(LISTED))
    others = len(counts) - LISTED
    return listed + (f" and {others} more kinds" if others > 0 else "")


def _unmoved(number: int, rest: str, layout: Layout) -> tuple[int, str]:
    return number, rest


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointNames:
    """Hugging Face's names of an architecture's tensors, each with ours."""

    model: Mapping[str, str]
    """Names of tensors outside the layers."""
    layer: Mapping[str, str]
    """Names after `model.layers.N.` to ours after `layers.N.`."""
    fused: Mapping[str, tuple[str, int]]
    """Like `layer`, for a part of a tensor: that tensor's name, and the index of the part among its
    rows."""
    joined: Mapping[str, str] = field(default_factory=dict)
    """Like `layer`, of tensors that other checkpoints have in parts."""
    experts: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Like `fused`, for a part that each expert has: names after `experts.M.`, M being the expert;
    the index is that among the parts of one expert. A tensor of all experts is in `layer`."""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Endings of names of tensors that are no weights."""
    spare: tuple[str, ...] = ()
    """Our names of tensors that checkpoints have for layers whose layout lacks them, or has fewer
    parts; these are left out."""
    changed: Mapping[str, Change] = field(default_factory=dict)
    """Keyed by our name: the function that reorders a checkpoint's tensor into our layout."""
    changed_packed: Mapping[str, PackedChange] = field(default_factory=dict)
    """Like `changed`, of weights in MXFP4."""
    located: Callable[[int, str, Layout], tuple[int, str]] = _unmoved
    """Maps the number of a layer and the name behind it in a checkpoint to the layer and name that
    the other fields use."""
    unchanged: Mapping[str, str] = field(default_factory=dict)
    """Like `layer`, for files whose tensors are ordered as ours are, where those of `layer` are
    `changed`."""

    def collect(
        self,
        tensors: Iterable[tuple[str, Weight]],
        dtype: torch.dtype,
        progress: Callable[[int], None],
        layout: Layout = NO_LAYOUT,
        *,
        config: ModelConfig | None = None,
        spare_layers: range = range(0),
        left_out: list[str] | None = None,
    ) -> Tensors:
        """The tensors under our names. Progress is reported in tensors read. `config`: for names
        that are `changed`; tensors of `spare_layers` are skipped. `left_out` collects names of
        unused tensors. Raises `ConfigError` for a tensor that the architecture does not have, for
        an incomplete set of parts, for parts that cannot be joined, and for outputs that do not
        match the layout."""
        collected: Tensors = {}
        parts: dict[str, dict[int, Weight]] = {}
        for done, (name, published) in enumerate(tensors):
            tensor = published
            if self._is_unused(name, spare_layers):
                if left_out is not None:
                    left_out.append(name)
            elif not self._is_idle_bias(name, tensor):
                prefix, ours, place, num_parts = self._place(name, layout)
                if ours in self.spare:
                    num_parts = _num_laid_out(layout.get(prefix + ours), num_parts)
                    if place >= num_parts:
                        if left_out is not None:
                            left_out.append(name)
                        continue
                if ours in self.changed and not self._is_unchanged(name):
                    assert config is not None
                    tensor = self._changed(name, ours, tensor, config)
                waiting = parts.setdefault(prefix + ours, {})
                if isinstance(tensor, Int4Weight) and not prefix:
                    raise ConfigError(
                        "checkpoint tensor", name, "embedding and head that are not packed"
                    )
                if isinstance(tensor, torch.Tensor) and not _has_values(tensor):
                    raise ConfigError(
                        f"dtype of tensor {name}", str(tensor.dtype), "weights in floating point"
                    )
                spec = layout.get(prefix + ours)
                if isinstance(tensor, torch.Tensor) and spec is not None:
                    tensor = _shaped(tensor, spec)
                # Embedding tables have no eight-bit kind, and those of layers no block format.
                is_dense = isinstance(tensor, torch.Tensor) or (
                    not spec.is_linear
                    if prefix and spec is not None
                    else not prefix and not isinstance(tensor, BlockWeight)
                )
                own_dtype = torch.float32 if spec is not None and spec.is_wide else dtype
                waiting[place] = _dense(tensor, own_dtype) if is_dense else tensor
                if len(waiting) == num_parts:
                    del parts[prefix + ours]
                    collected |= _whole(
                        prefix + ours, [waiting[i] for i in range(len(waiting))], own_dtype, layout
                    )
            progress(done)
        require(not parts, "checkpoint", sorted(parts), "every part of a fused projection")
        return collected

    def projection(self, name: str, layout: Layout) -> tuple[str, int | None]:
        """Our name of a published linear layer, without `.weight`, and its index among joined
        projections; None: it is not joined. Raises `ConfigError` where the model has no such linear
        layer, or its rows are in another order."""
        if not self._is_unused(name + ".weight", range(0)):
            prefix, ours, place, num_parts = self._place(name + ".weight", layout)
            spec = layout.get(prefix + ours)
            is_linear = spec is not None and spec.is_linear and not spec.num_experts
            if is_linear and prefix and ours not in self.changed:
                return prefix + ours, place if num_parts > 1 else None
        raise ConfigError("linear layer", name, "linear layers of the architecture")

    def _is_unused(self, name: str, spare_layers: range) -> bool:
        if name.endswith(self.ignored) or _UNUSED.fullmatch(name):
            return True
        match = _LAYER.fullmatch(canonical(name))
        return match is not None and int(match[1]) in spare_layers

    def _is_idle_bias(self, name: str, tensor: Weight) -> bool:
        """Whether it is an all-zero bias that the architecture does not have: some tools that pack
        layers write them."""
        if not (name.endswith(".bias") and isinstance(tensor, torch.Tensor)):
            return False
        name = canonical(name)
        match = _LAYER.fullmatch(name)
        is_known = name in self.model or (
            match is not None
            and match[2] in {**self.layer, **self.fused, **self.joined, **self.unchanged}
        )
        return not is_known and not bool(tensor.any())

    def _is_unchanged(self, name: str) -> bool:
        """Whether a tensor has our layout: one of `unchanged`, or that of one expert."""
        match = _LAYER.fullmatch(canonical(name))
        if match is None:
            return False
        return match[2] in self.unchanged or _EXPERT.fullmatch(match[2]) is not None

    def _changed(self, name: str, ours: str, weight: Weight, config: ModelConfig) -> Weight:
        """Raises `ConfigError` for a packed weight, whose rows or inputs share scales."""
        if isinstance(weight, torch.Tensor):
            return self.changed[ours](weight, config)
        if isinstance(weight, Mxfp4Weight) and ours in self.changed_packed:
            return self.changed_packed[ours](weight, config)
        allowed = f"weights of {config.architecture} that are not packed"
        raise ConfigError("checkpoint tensor", name, allowed)

    def _place(self, name: str, layout: Layout) -> tuple[str, str, int, int]:
        """Our prefix and name, the index among parts, and the number of parts."""
        known = name if name in self.model else canonical(name)
        if known in self.model:
            return "", self.model[known], 0, 1
        match = _LAYER.fullmatch(known)
        if match is not None:
            number, rest = self.located(int(match[1]), match[2], layout)
            prefix = f"layers.{number}."
            whole = {**self.layer, **self.joined, **self.unchanged}
            if rest in whole:
                return prefix, whole[rest], 0, 1
            if rest in self.fused:
                ours, place = self.fused[rest]
                return prefix, ours, place, _num_parts(ours, self.fused)
            if (found := self._place_of_expert(prefix, rest, layout)) is not None:
                return prefix, *found
        raise ConfigError("checkpoint tensor", name, "tensors of the architecture")

    def _place_of_expert(
        self, prefix: str, rest: str, layout: Layout
    ) -> tuple[str, int, int] | None:
        """Our name, the place among the parts of all experts, and how many these are; None: the
        model has no such expert."""
        match = _EXPERT.fullmatch(rest)
        if match is None or match[2] not in self.experts:
            return None
        ours, place = self.experts[match[2]]
        num_experts = layout[prefix + ours].num_experts if prefix + ours in layout else 0
        of_one = _num_parts(ours, self.experts)
        expert = int(match[1])
        if expert >= num_experts:
            return None
        return ours, expert * of_one + place, num_experts * of_one


def _num_parts(ours: str, places: Mapping[str, tuple[str, int]]) -> int:
    """Number of parts of one of our tensors; a part may have several published names."""
    return len({place for name, place in places.values() if name == ours})


def _num_laid_out(spec: WeightSpec | None, num_parts: int) -> int:
    """Number of parts of a tensor in the layout, at most `num_parts`."""
    if spec is None:
        return 0
    return len(spec.parts) if spec.parts else num_parts


def _shaped(tensor: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
    """A tensor with the dimensions of its weight: checkpoints hold weights of all experts in three,
    and one row of numbers with one dimension or with two."""
    if spec.num_experts and tensor.dim() == 3:
        return tensor.flatten(0, 1)
    is_row = spec.is_routing and tensor.numel() == math.prod(spec.shape)
    return tensor.reshape(spec.shape) if is_row else tensor


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether each element is a number of floating point; those of four bits are pairs, which torch
    does not read."""
    return tensor.is_floating_point() and tensor.dtype is not torch.float4_e2m1fn_x2


def _whole(name: str, parts: Sequence[Weight], dtype: torch.dtype, layout: Layout) -> Tensors:
    """The tensors of a weight made of parts. Parts of several kinds are expanded to the dtype.
    Raises `ConfigError` where parts cannot be joined, or have other outputs than the layout
    says."""
    if name in layout and layout[name].shape == ():
        return {name: _dense(parts[0], dtype)}
    shapes = [tuple(part.shape) for part in parts]
    if len({(len(shape), *shape[1:]) for shape in shapes}) > 1 or () in shapes:
        raise ConfigError(f"shapes of the parts of {name}", shapes, "one number of inputs")
    outputs = tuple(shape[0] for shape in shapes)
    is_joined = len(parts) == 1 and name in layout and outputs == (sum(layout[name].parts),)
    if name in layout and layout[name].parts not in ((), outputs) and not is_joined:
        # Their sum may be right all the same.
        raise ConfigError(f"outputs of the parts of {name}", outputs, str(layout[name].parts))
    in_blocks = [part for part in parts if isinstance(part, BlockWeight)]
    if len(in_blocks) == len(parts):
        return blocks.named(in_blocks, name)
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(grouped) == len(parts) and can_join(grouped):
        return named(joined(name, grouped), name)
    plain = [_dense(part, dtype) for part in parts]
    return {name: torch.cat(plain) if len(plain) > 1 else plain[0].contiguous()}


def _dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The weight in the dtype."""
    if isinstance(weight, BlockWeight):
        return blocks.dense([weight], dtype)
    return expanded(weight, dtype) if isinstance(weight, GroupedWeight) else weight.to(dtype)
