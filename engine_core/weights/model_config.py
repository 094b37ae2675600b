"""Architecture and sizes of a model, read from a Hugging Face `config.json`. Knows nothing about
weights or devices.

`models.registry` lists the architectures and which of these facts each of them has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config import ConfigError, require
from .encoders.config import EncoderConfig
from .experts_config import ExpertsConfig
from .formats.packing import Quantization
from .formats.quantization import read_quantization
from .latent_config import IndexConfig, LatentConfig
from .mixed_layers import MixedLayers
from .rope.config import DEFAULT_THETA, positive_of, rope_of, rotary_dim_of, scaling_of
from .state_layers import (
    DeltaConfig,
    MambaConfig,
    Multipliers,
    ShortConvConfig,
    StateLayers,
    StateSizes,
)

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
"""Largest values that a config may have, several times those of any published model."""
REQUIRED_SIZES = MAX_SIZES.keys() - {"num_key_value_heads", "head_dim"}
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "relu": "relu",
}
"""Activations by their names in a config; ours are those of `Platform`."""
GATES = ("silu", "gelu_tanh")
"""Activations of `Platform.gate`."""
CLAMPED_SWIGLU = "clamped_swiglu"
SQUARED_RELU = "relu2"
"""An activation without a gate: the square of relu, of MLPs and experts."""
EXPERT_GATES = (*GATES, CLAMPED_SWIGLU)
"""Activations of `ExpertPlatform.experts`."""
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
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each head of queries and keys has a norm."""
    width_norms: bool = False
    """Whether all queries and all keys of a token have a norm."""
    value_norm: bool = False
    """Whether each head of values has a norm, which has no factors."""
    num_kv_projections: int = 2
    """2: separate projections of keys and values; 1: one for both; 0: keys and values of another
    layer are used."""
    has_layer_norms: bool = False
    """Whether norms are by mean and variance, else by the root mean square."""
    norm_bias: bool = False
    norm_offset: float = 0.0
    """Added to the factors of norms."""
    activation: str = "silu"
    is_gated: bool = True
    """Whether MLPs and experts multiply their activation by a second product."""
    has_inner: tuple[bool, ...] = ()
    """Whether an MLP or experts follow a layer's mixer, by layer; empty: in all layers."""
    rotary_dim: int = 0
    """Number of leading values of a head that are rotated; 0: all."""
    is_interleaved: bool = False
    """Whether neighbours rotate with each other, else the halves of what rotates."""
    is_rotary: tuple[bool, ...] = ()
    """Whether positions rotate queries and keys of each layer; empty: in all layers."""
    local_rope_theta: float = 0.0
    """Base of rotary positions in layers with a window, which are not scaled; 0: as in others."""
    plain_qk_norm: bool = False
    """Whether each head of queries and keys has a norm without factors, in layers that rotate."""
    unrotated_scale_beta: float = 0.0
    unrotated_scale_length: int = 0
    """Growth of queries in layers that do not rotate, each time that so many positions are
    reached; 0: none."""
    query_scale_beta: float = 0.0
    """Growth of queries behind the original length of scaled positions; 0: none."""
    num_learned_positions: int = 0
    """Rows of a table of positions' vectors; 0: there is none."""
    position_offset: int = 0
    """Row of position 0 in that table."""
    attention_scale: float | None = None
    """Scale of scores; None: 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    """Caps of scores and of logits, by tanh; 0: none."""
    embedding_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    """Factors of embeddings, of what a layer adds to the residual stream, and of logits."""
    is_parallel: bool = False
    """Whether attention and MLP of a layer read the same residual stream."""
    sliding_window: int = 0
    """Keys that a position sees in layers with a window, its own included; 0: no layer has one."""
    is_windowed: tuple[bool, ...] = ()
    """Whether each layer has a window; empty: none has."""
    attends_in_chunks: bool = False
    """Whether windows are chunks of `sliding_window` positions, of which a position sees its own up
    to itself."""
    has_sinks: bool = False
    """Whether each query head has a sink, a learned score that takes a share of every softmax."""
    quantization: Quantization | None = None
    """How the linear layers are packed; None: they are not."""
    experts: ExpertsConfig | None = None
    """Experts in place of the MLPs of some layers, or of all; None: no layer has any."""
    latent: LatentConfig | None = None
    """Sizes of latent attention, which all layers have: `num_kv_heads` is 1 and `head_dim` is what
    a layer caches for a token; None: layers cache keys and values."""
    mixed: MixedLayers | None = None
    """Shapes of a model with layers of two kinds; None: all layers have those of the config."""
    states: StateLayers | None = None
    """Layers that keep a state in place of keys and values; None: there are none."""
    encoder: EncoderConfig | None = None
    """Fields of an encoder; None: it is a decoder."""
    labels: tuple[str, ...] = ()
    """Labels whose scores the pooled state of a text becomes; empty: the model has no such head."""
    has_output_gate: bool = False
    """Whether attention is multiplied by the sigmoid of gates that lie beside each query."""
    delta: DeltaConfig | None = None
    """Sizes of the gated delta nets that state layers are; None: there are none."""
    conv: ShortConvConfig | None = None
    """Sizes of the short convolutions that state layers are; None: there are none."""
    mamba: MambaConfig | None = None
    """Sizes of the Mamba-2 layers that state layers are; None: there are none."""
    multipliers: Multipliers | None = None
    """Multipliers of parts of layers; None: none."""
    unpadded_head_dim: int = 0
    """Numbers of a head in the checkpoint, where zeros pad heads to `head_dim`; 0: none do."""
    value_dim: int = 0
    """Numbers of a value's head where these are fewer than a key's: zeros pad heads to `head_dim`
    behind the layer's product; 0: as many."""
    value_scale: float = 1.0
    """Factor of values that zeros pad."""
    foreign: Mapping[str, Any] | None = None
    """`config.json` of a model that is computed by transformers' modelling code; None: by ours."""
    fits_float16: bool = True
    """Whether hidden states stay below 65,504, the largest number of float16."""

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def qkv_sizes(self) -> tuple[int, ...]:
        """Outputs of the projections to queries with their gates, keys and values."""
        num_queries = (2 if self.has_output_gate else 1) * self.num_heads
        key_dim, value_dim = self.projected_dims
        kv_sizes = self.num_kv_heads * key_dim, self.num_kv_heads * value_dim
        return (num_queries * key_dim, *kv_sizes[: self.num_kv_projections])

    @property
    def qkv_heads(self) -> tuple[int, ...]:
        """Heads of each of these projections."""
        return self.num_heads, *(self.num_kv_heads,) * self.num_kv_projections

    @property
    def projected_dims(self) -> tuple[int, int]:
        """Numbers of a head of queries and keys, and of one of values, as the products with a
        layer's weights have them."""
        if not self.value_dim:
            return self.head_dim, self.head_dim
        return self.unpadded_head_dim or self.head_dim, self.value_dim

    @property
    def kv_width(self) -> int:
        """Numbers of all keys of a token in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers that all layers together cache for a token."""
        if self.encoder is not None:
            return 0
        return self.kv_planes * sum(self.at(i).kv_width for i in self.caching_layers)

    @property
    def kv_planes(self) -> int:
        """Vectors of `kv_width` that a layer caches for a token: keys and values, or a latent."""
        return 2 if self.latent is None else 1

    @property
    def task(self) -> str:
        """Task of the model: `embed`, `classify`, or `generate` where its tokens are sampled
        too."""
        if self.labels:
            return "classify"
        return "generate" if self.encoder is None else "embed"

    @property
    def label_pooling(self) -> str:
        """Pooling that a head of labels reads: an encoder's own, else the last token's state;
        empty: the model has no such head."""
        if not self.labels:
            return ""
        return "last" if self.encoder is None else self.encoder.label_pooling

    @property
    def attention_work(self) -> float:
        """Multiplications of a token's attention to one position, relative to those with all
        weights of the layers that a token uses."""
        widths = [self._active_width(i) for i in range(self.num_layers)]
        inner = 3 * sum(widths) / len(widths)
        if self.latent is not None:
            products = self.latent.products(self.hidden_size, self.num_heads)
            attended = self.latent.attention_products(self.num_heads)
            return attended / (products + self.hidden_size * inner)
        queries = self.num_heads * self.head_dim
        return 2 * queries / (self.hidden_size * (self.qkv_size + queries + inner))

    @property
    def of_global_layers(self) -> ModelConfig:
        """The config of a model whose layers all have the shapes of those that see all keys."""
        mixed = self.mixed
        if mixed is None:
            return self
        return replace(
            self,
            mixed=None,
            head_dim=mixed.global_head_dim,
            num_kv_heads=mixed.global_kv_heads,
            num_kv_projections=1 if mixed.reuses_keys else 2,
            has_sinks=self.has_sinks and mixed.has_global_sinks,
        )

    @property
    def head_dims(self) -> tuple[int, ...]:
        """Sizes of heads, the largest last; empty: heads share latents."""
        if self.latent is not None:
            return ()
        sizes = () if self.mixed is None else (self.mixed.global_head_dim,)
        return tuple(sorted({self.head_dim, *sizes}))

    @property
    def inner_sizes(self) -> tuple[int, ...]:
        """Intermediate sizes of all MLPs and experts."""
        if self.mixed is not None:
            widths = () if self.experts is None else self.experts.widths
            sizes = (self.at(i).intermediate_size for i in range(self.num_layers))
            return tuple(sorted({*sizes, *widths}))
        if self.experts is None:
            return (self.intermediate_size,)
        return (*self._sizes_of_mlps, *self.experts.widths)

    @property
    def divided_sizes(self) -> tuple[int, ...]:
        """Sizes of `inner_sizes` that ranks divide."""
        if self.experts is None or not self.experts.are_whole:
            return self.inner_sizes
        return (*self._sizes_of_mlps, *self.experts.divided_widths)

    @property
    def _sizes_of_mlps(self) -> tuple[int, ...]:
        """Intermediate size of layers without experts; empty: there are none."""
        is_sparse = all(self.has_experts(i) for i in range(self.num_layers))
        return () if is_sparse else (self.intermediate_size,)

    @property
    def depends_on_length(self) -> bool:
        """Whether rotary positions depend on the longest sequence of an engine."""
        return (self.rope_scaling or {}).get("rope_type") in ("dynamic", "longrope")

    @property
    def most_positions(self) -> int:
        """The longest sequence that an engine can be started for."""
        if self.encoder is not None and self.num_learned_positions:
            return self.num_learned_positions - self.position_offset
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type") == "dynamic":
            return int(self.max_position_embeddings * scaling["factor"])
        return self.max_position_embeddings

    @property
    def needs(self) -> Mapping[str, tuple[str, object]]:
        """Flags of a platform that the model needs, each with the config's field that requires it
        and the field's value."""
        is_partial = self.rotary_dim not in (0, self.head_dim)
        plain = self.activation not in EXPERT_GATES or not self.is_gated
        has_biases = self.experts is not None and self.experts.has_biases
        wanted: dict[str, tuple[str, object]] = {
            "windows": ("sliding_window", self.sliding_window),
            "chunks": ("attention_chunk_size", self.attends_in_chunks and self.sliding_window),
            "sinks": ("attention sinks", self.has_sinks),
            "softcaps": ("attn_logit_softcapping", self.attention_softcap),
            "rotary_pairs": ("rotary_dim", is_partial or self.is_interleaved),
            "activations": ("hidden_act", self.activation if plain else ""),
            "odd_heads": ("head_dim", next((n for n in self.head_dims if n.bit_count() > 1), 0)),
            "mixed_layers": ("heads by layer", () if self.mixed is None else self.head_dims),
            "encoders": ("architectures", self.architecture if self.encoder else ""),
            "experts": ("num_experts", 0 if self.experts is None else self.experts.num_experts),
            "expert_biases": ("biases of experts", has_biases),
            "plain_experts": (
                "experts without a gate",
                self.experts is not None and not self.is_gated,
            ),
            "states": ("layers with states", self.states is not None and not self._has_scans),
            "short_convs": ("layers with convolutions", self.conv is not None),
            "mamba": ("layers of Mamba-2", self.mamba is not None),
            "latents": ("kv_lora_rank", 0 if self.latent is None else self.latent.kv_rank),
            "indexers": ("index_topk", 0 if self.index is None else self.index.num_chosen),
        }
        if self.logit_softcap:
            wanted.setdefault("activations", ("final_logit_softcapping", self.logit_softcap))
        return {flag: (field, value) for flag, (field, value) in wanted.items() if value}

    @property
    def index(self) -> IndexConfig | None:
        """The sparse indexer of each layer; None: there is none."""
        return None if self.latent is None else self.latent.index

    @property
    def _has_scans(self) -> bool:
        """Whether state layers are no gated delta nets."""
        return self.conv is not None or self.mamba is not None

    def with_padded_heads(self) -> ModelConfig:
        """The model with heads padded by zeros to a power of two. It is unchanged where heads have
        such a size, or norms that zeros would change."""
        size = self.head_dim
        has_norms = self.qk_norm or self.width_norms or self.plain_qk_norm
        has_heads = self.encoder is None and self.latent is None
        if not has_heads or size.bit_count() == 1 or has_norms:
            return self
        mixed = self.mixed
        if mixed is not None:
            assert mixed.global_head_dim == size
            mixed = replace(mixed, global_head_dim=1 << size.bit_length())
        return replace(
            self,
            mixed=mixed,
            head_dim=1 << size.bit_length(),
            unpadded_head_dim=size,
            rotary_dim=self.rotary_dim or size,
            attention_scale=self.attention_scale or size**-0.5,
        )

    def with_solved_states(self) -> ModelConfig:
        """The model with states that keep solved rows (see `DeltaUnit`), or keys and values in
        float32 (see `MambaUnit`). It is unchanged where it has neither gated delta nets nor
        Mamba-2."""
        sizes = self.state_sizes
        return self if sizes is None else self.with_state_sizes(sizes.solved())

    def with_halved_pages(self) -> ModelConfig:
        """The model with states in pages of an fp8 cache; unchanged where it has no states."""
        sizes = self.state_sizes
        if sizes is None:
            return self
        return self.with_state_sizes(replace(sizes, page_parts=2 * sizes.page_parts))

    def window_of(self, layer: int) -> int:
        """Most keys that a position sees in a layer; 0: all up to its own."""
        return self.sliding_window if self.is_windowed and self.is_windowed[layer] else 0

    def mask_of(self, layer: int) -> int:
        """The window of a layer as `Platform.attention` takes it."""
        return self.window_mask if self.window_of(layer) else 0

    @property
    def window_mask(self) -> int:
        """`mask_of` layers with windows."""
        return -self.sliding_window if self.attends_in_chunks else self.sliding_window

    def up_to(self, max_model_len: int) -> ModelConfig:
        """The config for sequences of at most `max_model_len` tokens, where a single chunk means
        full attention."""
        if not self.attends_in_chunks or max_model_len > self.sliding_window:
            return self
        return replace(self, sliding_window=0, is_windowed=(), attends_in_chunks=False)

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        num_own = self.num_layers - (0 if self.mixed is None else self.mixed.num_sharing)
        if layer < num_own:
            return layer
        window = self.window_of(layer)
        return max(i for i in range(num_own) if self.window_of(i) == window)

    @property
    def caching_layers(self) -> list[int]:
        """Layers with keys and values of their own."""
        layers = range(self.num_layers)
        return [i for i in layers if not self.has_state(i) and self.kv_layer(i) == i]

    def at(self, layer: int) -> ModelConfig:
        """The config of a model whose layers all have the shapes of this one."""
        if self.mixed is None:
            return self
        shaped = replace(self, mixed=None) if self.window_of(layer) else self.of_global_layers
        if self.kv_layer(layer) == layer:
            return shaped
        width = self.mixed.sharing_width
        return replace(shaped, num_kv_projections=0, intermediate_size=width)

    def has_state(self, layer: int) -> bool:
        """Whether a layer keeps a state in place of keys and values."""
        return self.states is not None and self.states.is_state[layer]

    @property
    def has_width_norms(self) -> bool:
        """Whether a norm is over all heads of a token."""
        return self.width_norms or (self.mamba is not None and self.mamba.has_width_norm)

    @property
    def state_sizes(self) -> StateSizes | None:
        """Sizes of the state layers; None: there are none."""
        return self.delta or self.mamba or self.conv

    def with_state_sizes(self, sizes: StateSizes) -> ModelConfig:
        """The model with other sizes of the same kind of state layers."""
        assert self.states is not None
        changed: dict[str, Any] = {sizes.field: sizes}
        return replace(self, states=sizes.states(self.states.is_state), **changed)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts, in place of an MLP or beside it."""
        return self.experts is not None and self.experts.has_experts(layer)

    def of_layers(self, first: int, stop: int) -> ModelConfig:
        """The config of a model of layers first … stop − 1 alone."""
        return replace(
            self,
            num_layers=stop - first,
            is_windowed=self.is_windowed[first:stop],
            is_rotary=self.is_rotary[first:stop],
            has_inner=self.has_inner[first:stop],
            experts=None if self.experts is None else self.experts.of_layers(first, stop),
            states=None if self.states is None else self.states.of_layers(first, stop),
            latent=None if self.latent is None else self.latent.of_layers(first, stop),
        )

    def follows_mixer(self, layer: int) -> bool:
        """Whether an MLP or experts follow the mixer of a layer."""
        return not self.has_inner or self.has_inner[layer]

    def _active_width(self, layer: int) -> int:
        """Intermediate size of what a token goes through in a layer."""
        if not self.follows_mixer(layer):
            return 0
        if self.experts is None or not self.experts.has_experts(layer):
            return self.intermediate_size
        is_beside = self.experts.are_beside_mlp
        return self.experts.active_size + (self.intermediate_size if is_beside else 0)

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
        cls,
        config: Mapping[str, Any],
        *,
        default_theta: float = DEFAULT_THETA,
        rotates_parts: bool = False,
        **traits: Any,
    ) -> ModelConfig:
        """Reads the fields that most architectures share. `traits`: fields that an architecture
        reads differently, or fixes; `rotates_parts`: whether a config may rotate only part of a
        head. Raises `ConfigError` naming what is not served."""
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
        head_dim = config.get("head_dim") or hidden_size // num_heads
        rope = rope_of(config, default_theta)
        common = {
            "architecture": config["architectures"][0],
            "vocab_size": config["vocab_size"],
            "hidden_size": hidden_size,
            "intermediate_size": config["intermediate_size"],
            "num_layers": config["num_hidden_layers"],
            "num_heads": num_heads,
            "num_kv_heads": config.get("num_key_value_heads") or num_heads,
            "head_dim": head_dim,
            "max_position_embeddings": config["max_position_embeddings"],
            "rope_theta": positive_of(rope, "rope_theta"),
            "rope_scaling": scaling_of(rope, config),
            "rotary_dim": rotary_dim_of(rope, head_dim, has_parts=rotates_parts),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            "quantization": quantization,
        }
        # Architectures with other norms name the field otherwise.
        if "rms_norm_eps" not in traits:
            common["rms_norm_eps"] = positive_of(config, "rms_norm_eps", NORM_EPS)
        if "activation" not in traits:
            common["activation"] = activation_of(config)
        return cls(**common | traits)


def activation_of(
    config: Mapping[str, Any], name: str = "hidden_act", default: str = "silu"
) -> str:
    """The activation that a field names. Raises `ConfigError`."""
    given = config.get(name, default)
    require(str(given) in ACTIVATIONS, name, given, ", ".join(ACTIVATIONS))
    return ACTIVATIONS[str(given)]


def size_of(config: Mapping[str, Any], name: str) -> int:
    """One of `MAX_SIZES`. Raises `ConfigError`."""
    size = config.get(name)
    most = MAX_SIZES[name]
    # True is no size.
    if not (type(size) is int and 1 <= size <= most):
        raise ConfigError(name, size, f"a whole number, 1…{most}")
    return size


def check_sizes(config: Mapping[str, Any]) -> None:
    """Checks the sizes of a config before anything of those sizes is made: a file may claim any
    number. Raises `ConfigError`."""
    for name in MAX_SIZES:
        if config.get(name) is not None or name in REQUIRED_SIZES:
            size_of(config, name)
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads")
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise ConfigError(
            "num_attention_heads", num_heads, f"multiples of num_key_value_heads ({num_kv_heads})"
        )
