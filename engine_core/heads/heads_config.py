"""Configuration of draft heads, read from the `config.json` beside them. Knows nothing about
weights or devices.

Sources: Cai et al., "Medusa", 2024; Li et al., "EAGLE", 2024, and "EAGLE-3", 2025; their published
code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import ConfigError, require
from ..weights.draft_layer import draft_layer_of
from ..weights.model_config import ModelConfig

MEDUSA = "medusa"
EAGLE = "eagle"
EAGLE3 = "eagle3"
MTP = "mtp"
MAX_SIZES = {"medusa_num_heads": 64, "medusa_num_layers": 64}
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
NUM_INPUTS = 3
"""Layers of the served model whose inputs EAGLE-3 reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsConfig:
    """Shapes of heads that fit a served model."""

    kind: str
    """`medusa`: heads each of which drafts one position. `eagle`, `eagle3`: a decoder layer that
    drafts one token after another. `mtp`: such a layer in the served model's own checkpoint."""
    num_heads: int = 0
    """Heads of Medusa."""
    num_blocks: int = 0
    """Residual blocks of each head of Medusa."""
    layer: ModelConfig | None = None
    """The decoder layer of EAGLE, or of the served model's checkpoint."""
    input_layers: tuple[int, ...] = ()
    """Layers of the served model whose inputs EAGLE-3 reads."""
    draft_vocab_size: int = 0
    """Tokens that EAGLE-3 drafts among."""

    @property
    def most(self) -> int:
        """Drafts for one row and step; 0: any number."""
        return self.num_heads

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that the heads cache for a token."""
        return 0 if self.layer is None else self.layer.kv_elements_per_token

    @classmethod
    def of_checkpoint(cls, served: ModelConfig) -> HeadsConfig:
        """The layer with which the served model's own checkpoint drafts."""
        return cls(kind=MTP, layer=draft_layer_of(served))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], served: ModelConfig) -> HeadsConfig:
        """Raises `ConfigError` naming the field that does not fit the served model."""
        if "medusa_num_heads" in config:
            for name, most in MAX_SIZES.items():
                if not (isinstance(size := config.get(name), int) and 1 <= size <= most):
                    raise ConfigError(name, size, f"a whole number, 1…{most}")
            return cls(
                kind=MEDUSA,
                num_heads=config["medusa_num_heads"],
                num_blocks=config["medusa_num_layers"],
            )
        layer = _layer(config, served)
        is_third = (
            EAGLE3_ARCHITECTURE in (config.get("architectures") or ())
            or "draft_vocab_size" in config
        )
        if not is_third:
            return cls(kind=EAGLE, layer=layer)
        draft_vocab_size = config.get("draft_vocab_size", served.vocab_size)
        if not (isinstance(draft_vocab_size, int) and 1 <= draft_vocab_size <= served.vocab_size):
            raise ConfigError("draft_vocab_size", draft_vocab_size, f"1…{served.vocab_size}")
        layers = _input_layers(config, served.num_layers)
        return cls(kind=EAGLE3, layer=layer, input_layers=layers, draft_vocab_size=draft_vocab_size)


def _layer(config: Mapping[str, Any], served: ModelConfig) -> ModelConfig:
    """One layer like Llama's, as wide as the served model, whose embedding it reads."""
    layer = ModelConfig.from_hf({**config, "architectures": ["LlamaForCausalLM"]})
    if layer.quantization is not None:
        raise ConfigError(
            "quantization_config.quant_method",
            layer.quantization.method,
            "heads of unpacked weights",
        )
    require(layer.num_layers == 1, "num_hidden_layers", layer.num_layers, "1")
    for name in ("hidden_size", "vocab_size"):
        if getattr(layer, name) != getattr(served, name):
            raise ConfigError(
                name, getattr(layer, name), f"{getattr(served, name)}, as the served model"
            )
    if (wanted := config.get("target_hidden_size", served.hidden_size)) != served.hidden_size:
        raise ConfigError(
            "target_hidden_size", wanted, f"{served.hidden_size}, as the served model"
        )
    return layer


def _input_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers that the config names, otherwise a low, a middle and a high one, as the published
    code takes them."""
    given = config.get(LAYERS_KEY)
    layers = sorted({2, num_layers // 2, num_layers - 3}) if given is None else given
    allowed = f"{NUM_INPUTS} ascending numbers of layers, 0…{num_layers - 1}"
    if not (isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)):
        raise ConfigError(LAYERS_KEY, layers, allowed)
    is_ascending = layers == sorted(set(layers)) and len(layers) == NUM_INPUTS
    require(is_ascending and 0 <= layers[0] <= layers[-1] < num_layers, LAYERS_KEY, layers, allowed)
    return tuple(layers)
