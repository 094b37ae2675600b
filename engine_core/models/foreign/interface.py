"""Attention of a transformers module: the functions that its layers call instead of the library's,
and the masks that they pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from ...config import ConfigError, require

ATTENTION = "headwater"
"""Name of the attention in the library's registry."""
PROBED = "headwater-probe"
"""Name of an attention that records masks, with which a model is examined before it is served."""
PASS = "headwater_pass"
"""Attribute of every submodule: its `ForwardPass`."""
IDLE = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "use_cache", "layer_idx"}
    | {"output_attentions", "output_hidden_states", "return_dict", "logits_to_keep"}
)
"""Keywords without effect on attention."""
MASKS = "causal masks, and causal windows of the last keys"
MOST_PROBED = 1 << 20
"""Keys of the longest row of a mask that is looked at."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of a layer: a position sees the last `window` keys, its own included; 0: all of
    `num_keys`."""

    window: int
    num_keys: int

    def has_window(self, window: int) -> bool:
        """Whether a layer that names a window has this mask."""
        return window == self.window or (not self.window and window >= self.num_keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """Queries, keys and values [1, heads, T, D] of a layer, and its options of attention."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float
    window: int
    """Keys that a position sees by the layer's keyword; 0: the layer names none."""
    mask: object


class Attends(Protocol):
    """Implementation of attention for one forward pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[1, T, heads, D]"""


@dataclass(slots=True)
class ForwardPass:
    """The forward pass in progress, where attention of a module reads it."""

    attends: Attends | None = None

    def hand_to(self, module: nn.Module) -> None:
        """Sets it as the forward pass of every submodule."""
        for each in module.modules():
            setattr(each, PASS, self)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """See `AttentionInterface` of transformers. Raises `ConfigError` for keywords that change what
    is computed and are not implemented here."""
    layer = getattr(module, "layer_idx", None)
    allowed = "architectures whose attention has the number of its layer"
    require(layer is not None, "architectures", type(module).__name__, allowed)
    scale = keywords.pop("scaling", None)
    softcap = keywords.pop("softcap", None)
    window = keywords.pop("sliding_window", None)
    _check_rest(module, keywords)
    call = AttentionCall(
        layer=int(str(layer)),
        q=query,
        k=key,
        v=value,
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        softcap=float(softcap or 0),
        window=int(window or 0),
        mask=attention_mask,
    )
    attends = getattr(module, PASS).attends
    return attends.attend(call), None


def _check_rest(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raises `ConfigError`."""
    is_causal = keywords.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    require(is_causal, "is_causal", is_causal, "true: no token sees later ones")
    for name, value in keywords.items():
        is_idle = name in IDLE or name == "is_causal" or value is None or value is False
        is_idle = is_idle or (name == "dropout" and value == 0)
        require(is_idle, f"keyword {name} of attention", _shown(value), "none")


def _shown(value: object) -> object:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else value


def probed_mask(*, mask_function: Callable[..., Any], config: Any, **_: Any) -> Mask:
    """See `AttentionMaskInterface` of transformers: what a mask shows of the keys before a
    position. Raises `ConfigError` for masks that are neither causal nor causal windows."""
    with torch._C.DisableTorchFunction():
        return _probed(mask_function, min(max(config.max_position_embeddings, 2048), MOST_PROBED))


def _probed(mask_function: Callable[..., Any], num_keys: int) -> Mask:
    last = num_keys - 1
    window = int(_seen(mask_function, last, num_keys).sum())
    keys = torch.arange(num_keys, device="cpu")
    for position in (0, 1, 2, 3, 5, 11, 97, 1021, num_keys // 2, num_keys // 2 + 1, last - 1, last):
        wanted = (keys <= position) & (keys > position - window)
        if not torch.equal(_seen(mask_function, position, num_keys), wanted):
            raise ConfigError("mask", f"one with other keys of position {position}", MASKS)
    return Mask(0 if window == num_keys else window, num_keys)


def _seen(mask_function: Callable[..., Any], position: int, num_keys: int) -> torch.Tensor:
    """bool [num_keys]: whether a position sees each key."""
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    keys = torch.arange(num_keys, device="cpu")
    try:
        seen = mask_function(zero, zero, zero + position, keys)
    except (RuntimeError, NotImplementedError):
        # The function reads tensors of its own, which the probe made without contents.
        raise ConfigError("mask", "one that depends on a batch's tokens", MASKS) from None
    found: torch.Tensor = seen.expand(num_keys)
    return found


def register() -> None:
    """Makes the attention and its masks known to the library."""
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415

    AttentionInterface.register(ATTENTION, attention)
    AttentionInterface.register(PROBED, attention)
    AttentionMaskInterface.register(PROBED, probed_mask)
