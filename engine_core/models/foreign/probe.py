"""Facts of a transformers module, found by a pass without numbers: the shape of its cache, its
masks, its weights. Refuses by name whatever is not served."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ...config import ConfigError, require
from ...weights.layout import Layout, WeightSpec, bias, linear, norm, table
from ...weights.names import canonical
from .head import GivenStates
from .interface import PROBED, AttentionCall, ForwardPass, Mask
from .library import module_of
from .modules import Unjudged, is_rotary
from .row_wise import Judging, RowWise

NUM_TOKENS = 3
EMBED = "embed"
HEAD = "lm_head"
KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers by `layer_types`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts that the pass found."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    inner_size: int
    """The most outputs of a linear layer within the layers."""
    max_position_embeddings: int
    scale: float
    softcap: float
    windows: tuple[int, ...]
    """Number of keys that a position of each layer sees; 0: all."""
    is_tied: bool
    layout: Layout
    names: Mapping[str, str]
    """Our names by those of the module's tensors."""


@dataclass(slots=True)
class Probe:
    """See `Attends`: notes what layers ask for."""

    calls: list[AttentionCall] = field(default_factory=list)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return call.q.new_empty(1, call.q.shape[2], call.q.shape[1], call.v.shape[3])


class Sized(nn.Module):
    """Replaces a linear layer by outputs of its size."""

    def __init__(self, mode: RowWise, num_outputs: int) -> None:
        super().__init__()
        self._mode = mode
        self._num_outputs = num_outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self._mode.aside():
            return x.new_empty(*x.shape[:-1], self._num_outputs)


def facts_of(hf_config: Mapping[str, Any]) -> Facts:
    """Raises `ConfigError` naming what is not served."""
    return _facts(json.dumps(hf_config, sort_keys=True))


@lru_cache(maxsize=8)
def _facts(text: str) -> Facts:
    module: Any = module_of(json.loads(text), PROBED, torch.float32, "meta")
    config = module.config.get_text_config()
    layout, names = _layout_of(module, is_tied=bool(config.tie_word_embeddings))
    inner = [spec.shape[0] for name, spec in layout.items() if spec.is_linear and name != HEAD]
    _check_parts(module)
    hidden, calls = _probed(module)
    first = _checked(calls, config.num_hidden_layers)
    return Facts(
        num_layers=len(calls),
        num_heads=first.q.shape[1],
        num_kv_heads=first.k.shape[1],
        head_dim=first.q.shape[3],
        hidden_size=hidden.shape[2],
        vocab_size=layout[EMBED].shape[0],
        inner_size=max(inner),
        max_position_embeddings=config.max_position_embeddings,
        scale=first.scale,
        softcap=first.softcap,
        windows=tuple(_mask_of(call).window for call in calls),
        is_tied=bool(layout[HEAD].tied_to),
        layout=layout,
        names=names,
    )


def _check_parts(module: Any) -> None:
    """Raises `ConfigError` for layers that are known not to be served."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    allowed = f"{' and '.join(sorted(KINDS))}: others keep state outside of attention"
    require(kinds <= KINDS, "layer_types", sorted(kinds), allowed)
    experts = [name for name, _ in module.named_modules() if name.endswith("experts")]
    allowed = "layers without experts, whose routing reads numbers on the host"
    require(not experts, "modelling code", f"one with {', '.join(experts[:1])}", allowed)


def _probed(module: Any) -> tuple[torch.Tensor, list[AttentionCall]]:
    """Hidden states and calls of attention of a pass without numbers. Raises `ConfigError`."""
    mode = Judging()
    for name, linear_layer in linears_of(module).items():
        module.set_submodule(name, Sized(mode, linear_layer.out_features))
    for name, each in list(module.named_modules()):
        if is_rotary(each):
            module.set_submodule(name, Unjudged(each, mode))
    probe = Probe()
    ForwardPass(probe).hand_to(module)
    zeros = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    # An explicit mask keeps the library from looking for several sequences among the positions.
    where = {"position_ids": zeros, "attention_mask": torch.ones_like(zeros)}
    try:
        with torch.inference_mode(), mode:
            hidden: torch.Tensor = base_of(module)(zeros, use_cache=False, **where)[0]
            given = GivenStates()
            given.hidden = hidden
            given.put_in(module)
            module(zeros)
    except ConfigError:
        raise
    except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError) as error:
        allowed = "code that reads no numbers of a batch on the host, nor masks as tensors"
        raise ConfigError("modelling code", f"{type(module).__name__}: {error}", allowed) from None
    return hidden, probe.calls


def linears_of(module: nn.Module) -> dict[str, nn.Linear]:
    """A module's linear layers by their names."""
    return {name: each for name, each in module.named_modules() if type(each) is nn.Linear}


def base_of(module: Any) -> Any:
    """The part of a module that makes hidden states. Raises `ConfigError`."""
    base = module.base_model
    allowed = "a decoder whose head reads what its base model makes"
    require(base is not module, "architectures", type(module).__name__, allowed)
    return base


def _layout_of(module: Any, *, is_tied: bool) -> tuple[Layout, dict[str, str]]:
    """The module's weights, and our names by theirs. Raises `ConfigError`."""
    embedding = module.get_input_embeddings()
    head = module.get_output_embeddings()
    is_plain = isinstance(embedding, nn.Embedding) and type(head) is nn.Linear
    allowed = "a decoder with an embedding and a head"
    require(is_plain, "architectures", type(module).__name__, allowed)
    layout: dict[str, WeightSpec] = {}
    names: dict[str, str] = {}
    for prefix, each in module.named_modules():
        for own, tensor in _tensors_of(each):
            name = f"{prefix}.{own}".lstrip(".")
            is_weight = own == "weight"
            if is_weight and each is embedding:
                ours, spec = EMBED, table(*tensor.shape)
            elif is_weight and each is head:
                tied_to = EMBED if is_tied else ""
                ours, spec = HEAD, linear(*tensor.shape, tied_to=tied_to)
            elif is_weight and type(each) is nn.Linear:
                ours, spec = our_name(name.removesuffix(".weight")), linear(*tensor.shape)
            else:
                ours, spec = our_name(name), _plain(own, tensor)
            layout[ours] = spec
            names[name] = ours
    return layout, names


def our_name(name: str) -> str:
    """Our name of a module's tensor: that of most checkpoints without `model.`."""
    return canonical(name).removeprefix("model.")


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters and stored buffers."""
    parameters = [(name, each) for name, each in module._parameters.items() if each is not None]
    hidden = module._non_persistent_buffers_set
    buffers = [
        (name, each)
        for name, each in module._buffers.items()
        if each is not None and name not in hidden
    ]
    return [*parameters, *buffers]


def _plain(name: str, tensor: torch.Tensor) -> WeightSpec:
    """A weight that is no matrix of a linear layer."""
    if tensor.dim() != 1:
        return table(*tensor.shape)
    return norm(tensor.shape[0]) if name == "weight" else bias(tensor.shape[0])


def _checked(calls: list[AttentionCall], num_layers: int) -> AttentionCall:
    """The first of the calls. Raises `ConfigError` unless there is one call a layer, all of one
    shape."""
    layers = [call.layer for call in calls]
    wanted = list(range(num_layers))
    allowed = f"{num_layers} layers, each with attention: others keep state of another kind"
    require(layers == wanted, "layers with attention", layers, allowed)
    first = calls[0]
    for call in calls:
        shapes = [tuple(each.shape) for each in (call.q, call.k, call.v)]
        allowed = "equal ones in all layers, of keys and values alike"
        is_equal = shapes == [tuple(each.shape) for each in (first.q, first.k, first.k)]
        require(is_equal, "shapes of queries, keys and values", shapes, allowed)
        alike = (call.scale, call.softcap) == (first.scale, first.softcap)
        require(alike, "scale of scores", call.scale, f"{first.scale}, as in the first layer")
        mask = _mask_of(call)
        is_known = not call.window or mask.has_window(call.window)
        allowed = f"{mask.window}, as the layer's mask has it"
        require(is_known, "sliding_window", call.window, allowed)
    return first


def _mask_of(call: AttentionCall) -> Mask:
    """Raises `ConfigError`."""
    if not isinstance(call.mask, Mask):
        allowed = "those of transformers' mask interface"
        raise ConfigError("mask", type(call.mask).__name__, allowed)
    return call.mask
