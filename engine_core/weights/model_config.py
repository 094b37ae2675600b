"""Architecture and sizes of a model, read from a Hugging Face `config.json`. Knows nothing about
weights or devices.

Which architectures there are, and which of these facts each has, is said in `models.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import ConfigError, require
from .formats.packing import Quantization
from .formats.quantization import read_quantization

MAX_SIZES = {
    "num_hidden_layers": 1024,
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 28,
}
"""Several times those of any model."""
REQUIRED_SIZES = MAX_SIZES.keys() - {"num_key_value_heads", "head_dim"}
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Types of scaled rotary positions, each with the numbers that it needs."""
DEFAULT_THETA = 10_000.0
"""`rope_theta` of all architectures of `from_hf` where a config does not say."""
NORM_EPS = 1e-6
"""`rms_norm_eps` of all architectures where a config does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    tie_word_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    """Keys that a position sees in layers with a window, its own included; 0: no layer has one."""
    quantization: Quantization | None = None
    """How the linear layers are packed; None: they are not."""
    fits_float16: bool = True
    """Whether hidden states stay below 65,504, the largest number of float16."""

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Outputs of the projections to queries, keys and values."""
        return (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        )

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that all layers together cache for a token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_work(self) -> float:
        """Multiplications of a token's attention to one position, beside those of its products with
        all weights of the layers."""
        queries = self.num_heads * self.head_dim
        return (
            2
            * queries
            / (self.hidden_size * (self.qkv_size + queries + 3 * self.intermediate_size))
        )

    def of_layers(self, first: int, stop: int) -> ModelConfig:
        """The config of a model of layers first … stop − 1 alone."""
        return replace(self, num_layers=stop - first)

    def check_dtype(self, dtype: str) -> None:
        """Raises `ConfigError` for a dtype that does not hold the model's hidden states."""
        if dtype == "float16" and not self.fits_float16:
            allowed = (
                f"bfloat16 or float32 with {self.architecture}, whose hidden states exceed "
                "float16's 65504"
            )
            raise ConfigError("dtype", dtype, allowed)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, qkv_bias: bool = False, qk_norm: bool = False
    ) -> ModelConfig:
        """Reads the config of an architecture like Llama. `qk_norm` and `qkv_bias` are what the
        architecture adds; a config may say otherwise of the bias. Raises `ConfigError` naming what
        is not served."""
        if (activation := config.get("hidden_act", "silu")) != "silu":
            raise ConfigError("hidden_act", activation, "silu")
        require(
            config.get("is_causal", True),
            "is_causal",
            config.get("is_causal"),
            "true: no token sees later ones",
        )
        quantization = read_quantization(config)
        check_sizes(config)
        num_heads = config["num_attention_heads"]
        hidden_size = config["hidden_size"]
        rope = _rope_of(config)
        return cls(
            architecture=config["architectures"][0],
            vocab_size=config["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            max_position_embeddings=_served_positions(config),
            rms_norm_eps=positive_of(config, "rms_norm_eps", NORM_EPS),
            rope_theta=positive_of(rope, "rope_theta"),
            rope_scaling=checked_rope(rope),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", qkv_bias)),
            qk_norm=qk_norm,
            quantization=quantization,
        )


def check_sizes(config: Mapping[str, Any]) -> None:
    """Before anything is made of them: a file may claim any number. Raises `ConfigError`."""
    for name, most in MAX_SIZES.items():
        size = config.get(name)
        if size is None and name not in REQUIRED_SIZES:
            continue
        # True is no size.
        require(type(size) is int and 1 <= size <= most, name, size, f"a whole number, 1…{most}")
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads")
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ConfigError(
            "num_attention_heads", num_heads, f"multiples of num_key_value_heads ({num_kv_heads})"
        )


def mapping_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object of a field; empty where there is none. Raises `ConfigError`."""
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(name, value, "an object")
    return value


def positive_of(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """The number of a field. Raises `ConfigError`."""
    value = config.get(name, default)
    if not (isinstance(value, int | float) and 0 < value < float("inf")):
        raise ConfigError(name, value, "a positive number")
    return float(value)


def _rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parameters of rotary positions, which old configs have flat and beside `rope_scaling`. Raises
    `ConfigError` where a config says two things."""
    given = mapping_of(config, "rope_parameters")
    scaling = mapping_of(config, "rope_scaling")
    if given and scaling and given != scaling:
        raise ConfigError("rope_scaling", scaling, "none beside rope_parameters, or the same")
    rope = {"partial_rotary_factor": config.get("partial_rotary_factor"), **(given or scaling)}
    flat = config.get("rope_theta")
    theta = rope.setdefault("rope_theta", DEFAULT_THETA if flat is None else flat)
    require(flat in (None, theta), "rope_theta", flat, f"none, or {theta} as in rope_parameters")
    return rope


def _served_positions(config: Mapping[str, Any]) -> int:
    """With a sliding window, attention over more than the window would differ from the model's:
    serve no more."""
    positions: int = config["max_position_embeddings"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window is not None and not (type(window) is int and window >= 1):
        raise ConfigError("sliding_window", window, "a whole number, at least 1, or none")
    return min(positions, window) if window else positions


def checked_rope(rope: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The scaling of rotary positions; None: there is none. Raises `ConfigError`."""
    # A factor alone does not say how positions are scaled.
    kind = rope.get("rope_type", rope.get("type", None if "factor" in rope else "default"))
    require(str(kind) in ROPE_FIELDS, "rope_scaling.rope_type", kind, ", ".join(ROPE_FIELDS))
    if (factor := rope.get("partial_rotary_factor")) not in (None, 1):
        raise ConfigError("partial_rotary_factor", factor, "1: all of a head is rotated")
    try:
        scaling: dict[str, Any] = {name: positive_of(rope, name) for name in ROPE_FIELDS[kind]}
    except ConfigError as error:
        raise error.of("rope_scaling") from None
    return {"rope_type": kind, **scaling} if scaling else None
