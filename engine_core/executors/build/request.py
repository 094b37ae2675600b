"""Checks the options of an executor and the model that they name against the capabilities of a
platform, and makes the request from which the executor is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...capabilities import (
    ENCODER,
    EXPERTS,
    FOREIGN,
    INT8_ACTIVATIONS,
    LATENT,
    ROUNDED_ACTIVATIONS,
    W8A8,
    Asked,
    Refusal,
    asked_of_options,
    refusals_of_engine,
)
from ...config import ConfigError, require
from ...heads.heads_config import HeadsConfig
from ...heads.registry import read_heads
from ...models import registry as models
from ...models.mtp import MTP_NAMES
from ...options import (
    ACTIVATION_DTYPES,
    INT8,
    MODEL,
    MTP,
    NUMERICS,
    OFF,
    PEER_ACCESS,
    TREE,
    BuildRequest,
    ExecutorOptions,
)
from ...platforms.capabilities import Capabilities
from ...weights.dummy import DUMMIES
from ...weights.formats.quantization import GGUF, NONE, check_quantization
from ...weights.model_config import ModelConfig
from ...weights.model_file import has_blocks, has_integers, stored_dtype
from ...weights.shards import NUM_LEAVES, check_layout
from .draft_layer import decided
from .expert_layout import with_expert_layout
from .pages import asked_of_layers

KV_CACHE_DTYPES = ("auto", "fp8")
WITHOUT = {
    "windows": "no window",
    "softcaps": "no cap of scores",
    "chunks": "sequences of one chunk (max_model_len)",
    "sinks": "no sinks",
    "rotary_pairs": "heads that rotate whole, by halves,",
    "activations": "silu or gelu_pytorch_tanh with a gate, and logits without a cap,",
    "odd_heads": "powers of two",
    "mixed_layers": "layers of one shape",
    "encoders": "decoders",
    "experts": "no experts",
    "expert_biases": "experts without biases",
    "plain_experts": "experts with a gate",
    "states": "no gated delta nets",
    "short_convs": "no short convolutions",
    "mamba": "no layers of Mamba-2",
    "latents": "no latent attention",
    "indexers": "no sparse indexers",
}
"""Values that a platform serves which lacks a flag of `ModelConfig.needs`, by flag."""


def checked(options: ExecutorOptions, device: str, flags: Capabilities) -> BuildRequest:
    """The options beside a model and a device's flags. Raises `ConfigError` for the first that they
    exclude."""
    assert options.model_folder is not None
    if options.load_format not in ("auto", *DUMMIES):
        raise ConfigError("load_format", options.load_format, " or ".join(("auto", *DUMMIES)))
    model = models.read_config(options.model_folder)
    model = model.up_to(options.max_model_len or model.max_position_embeddings)
    if flags.rotary_pairs and not flags.odd_heads:
        model = model.with_padded_heads()
    if flags.solved_states:
        model = model.with_solved_states()
    dtype = _dtype(options)
    model.check_dtype(dtype)
    check_quantization(options.quantization, _method(options, model), "the model folder")
    where = f"on the platform {device}"
    require(dtype in flags.dtypes, "dtype", dtype, f"{' or '.join(flags.dtypes)} {where}")
    _check_words(options)
    _check_block_size(options, flags.block_sizes, where)
    if model.states is not None:
        _check_block_size(options, flags.state_block_sizes, f"with states {where}")
    _check_sizes(options, model, flags, where)
    kv_format = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    if kv_format == "fp8":
        model = model.with_halved_pages()
    activations = INT8 if _has_int8_activations(options, model, flags, where) else dtype

    def refusals(given: ExecutorOptions) -> Iterator[Refusal]:
        return refusals_of_engine(asked_of(given, model, activations, flags), flags, device)

    options = decided(options, refusals)
    for refused in refusals(options):
        raise ConfigError(*refused)
    model = with_expert_layout(options, model, flags, where)
    check_layout(options.layout, model, size_multiple=flags.size_multiple)
    _check_sizes_of_ranks(options, model)
    draft = None if options.draft_model is None else _checked_draft(options, model, device, flags)
    heads = None if options.draft_heads is None else _checked_heads(options, model, device, flags)
    if options.speculation == MTP:
        heads = _draft_layer(model)
    return BuildRequest(
        options=options,
        model=model,
        dtype=dtype,
        kv_format=kv_format,
        activations=activations,
        rounds_tokens=flags.rounded_tokens and options.activation_dtype != MODEL,
        pulls_kinds=flags.pulled_kinds,
        is_tree=options.numerics == TREE,
        draft=draft,
        heads=heads,
    )


def _checked_draft(
    options: ExecutorOptions, model: ModelConfig, device: str, flags: Capabilities
) -> BuildRequest:
    """Build request of the draft model, checked against the served model. Raises `ConfigError`
    naming `draft_model`."""
    folder = options.draft_model
    require(options.max_draft_tokens, "draft_model", str(folder), "none where nothing is drafted")
    # Random weights have the served model's type; stored ones have their own.
    dtype = "auto" if options.load_format == "auto" else options.dtype
    alone = replace(
        options,
        model_folder=folder,
        draft_model=None,
        draft_heads=None,
        speculation=OFF,
        dtype=dtype,
        kv_cache_dtype="auto",
        quantization="auto",
        # The model only drafts, so its bits may depend on the number of ranks.
        numerics="default",
        # Ranks divide only its vocabulary, which is the served model's.
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        expert_parallel=False,
        stage_hosts=0,
        # A draft model whose weights are not packed allows `auto` alone, so int8 is not passed on.
        activation_dtype="auto" if options.activation_dtype == INT8 else options.activation_dtype,
        max_model_len=0,
    )
    try:
        draft = checked(alone, device, flags)
    except ConfigError as error:
        raise ConfigError(
            "draft_model", str(folder), f"a model that is served by itself; of this one {error}"
        ) from None
    for name in asked_of_layers(draft.model).keys() - {LATENT}:
        raise ConfigError("draft_model", str(folder), f"a model without {name}")
    if draft.model.vocab_size != model.vocab_size:
        allowed = (
            f"a model of {model.vocab_size} tokens, as the served one; this one has "
            f"{draft.model.vocab_size}"
        )
        raise ConfigError("draft_model", str(folder), allowed)
    max_model_len = options.max_model_len or model.max_position_embeddings
    if draft.model.max_position_embeddings < max_model_len:
        allowed = (
            f"a model of {max_model_len} positions (max_model_len); this one has "
            f"{draft.model.max_position_embeddings}"
        )
        raise ConfigError("draft_model", str(folder), allowed)
    return draft


def _checked_heads(
    options: ExecutorOptions, model: ModelConfig, device: str, flags: Capabilities
) -> HeadsConfig:
    """Config of the draft heads for the model whose hidden states they read. Raises `ConfigError`
    naming `draft_heads`."""
    folder = options.draft_heads
    assert folder is not None
    require(options.max_draft_tokens, "draft_heads", str(folder), "none where nothing is drafted")
    try:
        heads = read_heads(folder, model)
        if heads.layer is not None:
            _check_shapes(heads.layer, flags, f"on the platform {device}")
    except ConfigError as error:
        raise ConfigError(
            "draft_heads", str(folder), f"heads for the served model; of these {error}"
        ) from None
    return heads


def _draft_layer(model: ModelConfig) -> HeadsConfig:
    """The layer of the served model's checkpoint that drafts. Raises `ConfigError` naming
    `speculation` for a model of an architecture that has none."""
    allowed = f"auto or off with {model.architecture}, whose checkpoints have none that is used"
    require(model.architecture in MTP_NAMES, "speculation", MTP, allowed)
    return HeadsConfig.of_checkpoint(model)


def _check_block_size(options: ExecutorOptions, served: tuple[int, ...], where: str) -> None:
    if options.block_size not in served:
        allowed = f"{' or '.join(map(str, served))} {where}"
        raise ConfigError("block_size", options.block_size, allowed)


def _check_words(options: ExecutorOptions) -> None:
    for name, words in (
        ("kv_cache_dtype", KV_CACHE_DTYPES),
        ("numerics", NUMERICS),
        ("peer_access", PEER_ACCESS),
    ):
        value = getattr(options, name)
        require(value in words, name, value, " or ".join(words))


def _check_sizes_of_ranks(options: ExecutorOptions, model: ModelConfig) -> None:
    most = options.pipeline_parallel_size - 1
    if not 0 <= options.stage_hosts <= most:
        allowed = (
            f"0…{most}, fewer than pipeline_parallel_size"
            if most
            else "0 with pipeline_parallel_size 1"
        )
        raise ConfigError("stage_hosts", options.stage_hosts, allowed)
    if options.numerics == TREE and NUM_LEAVES % options.tensor_parallel_size:
        raise ConfigError(
            "tensor_parallel_size",
            options.tensor_parallel_size,
            "1 or 2 or 4 or 8 with numerics tree",
        )
    if options.numerics == TREE and options.tensor_parallel_size > model.num_kv_heads:
        allowed = f"at most {model.num_kv_heads}, the KV heads, with numerics tree"
        raise ConfigError("tensor_parallel_size", options.tensor_parallel_size, allowed)


def asked_of(
    options: ExecutorOptions, model: ModelConfig, activations: str, flags: Capabilities
) -> dict[str, Asked]:
    """Capabilities that the options ask for, and capabilities that the model needs."""
    asked = asked_of_options(options)
    if model.quantization is not None and model.quantization.rounds_whole_tokens:
        shown = "weights whose tokens are rounded to int8, each with one scale"
        asked[W8A8] = Asked("quantization", model.quantization.method, shown)
    if model.experts is not None:
        count = model.experts.num_experts
        asked[EXPERTS] = Asked("num_experts", count, f"a model with {count} experts")
    asked |= asked_of_layers(model)
    if model.foreign is not None:
        asked[FOREIGN] = Asked("model_code", models.TRANSFORMERS, f"the {FOREIGN}")
    if model.encoder is not None:
        asked[ENCODER] = Asked("architectures", model.architecture, f"the {ENCODER}")
    chosen = options.activation_dtype
    if activations == INT8:
        shown = "activations in int8, which activation_dtype says"
        asked[INT8_ACTIVATIONS] = Asked("activation_dtype", chosen, shown)
    if rounded := _rounded_tokens(options, model, flags):
        shown = f"activations in {rounded}, which activation_dtype says"
        asked[ROUNDED_ACTIVATIONS] = Asked("activation_dtype", chosen, shown)
    return asked


def _rounded_tokens(options: ExecutorOptions, model: ModelConfig, flags: Capabilities) -> str:
    """Number format to which activations are rounded for a checkpoint made for 8-bit activations,
    where the platform rounds them."""
    if not flags.rounded_tokens or options.activation_dtype == MODEL or model.quantization is None:
        return ""
    quantization = model.quantization
    return " and ".join(
        sorted(quantization.rounded_activations - quantization.unrounded_activations)
    )


def _check_sizes(
    options: ExecutorOptions, model: ModelConfig, flags: Capabilities, where: str
) -> None:
    _check_shapes(model, flags, where)
    if model.has_width_norms:
        _check_width_norms(options, flags, where)
    for flag, (field, value) in model.needs.items():
        require(getattr(flags, flag), field, value, f"{WITHOUT[flag]} {where}")
    if options.max_model_len > model.most_positions:
        raise ConfigError("max_model_len", options.max_model_len, f"at most {model.most_positions}")


def _check_width_norms(options: ExecutorOptions, flags: Capabilities, where: str) -> None:
    """Raises `ConfigError` where ranks divide norms over all heads, unless the platform sums the
    ranks' parts."""
    size = options.tensor_parallel_size
    allowed = f"1 with norms over all heads {where}"
    require(size == 1 or flags.rank_norms, "tensor_parallel_size", size, allowed)
    # The tree divides products into leaves, and sums of squares have none.
    is_tree = options.numerics == TREE
    require(not is_tree, "numerics", options.numerics, "default with norms over all heads")


def _check_shapes(model: ModelConfig, flags: Capabilities, where: str) -> None:
    sizes = [("head_dim", size) for size in model.head_dims]
    sizes.append(("hidden_size", model.hidden_size))
    if model.mixed is not None and model.mixed.input_size:
        sizes.append(("hidden_size_per_layer_input", model.mixed.input_size))
    sizes += [("intermediate_size", size) for size in model.inner_sizes]
    if model.latent is not None:
        sizes += [(name, size) for name, (size, _) in model.latent.sizes.items()]
    for name, size in sizes:
        is_multiple = size % flags.size_multiple == 0
        require(is_multiple, name, size, f"multiples of {flags.size_multiple} {where}")
    largest = max(model.head_dims, default=0)
    is_served = largest <= flags.max_head_dim
    require(is_served, "head_dim", largest, f"at most {flags.max_head_dim} {where}")


def _dtype(options: ExecutorOptions) -> str:
    """The dtype of the folder's weights, chosen when they were converted, or that of random
    weights."""
    if options.load_format != "auto":
        return "bfloat16" if options.dtype == "auto" else options.dtype
    assert options.model_folder is not None
    stored = stored_dtype(options.model_folder)
    require(
        options.dtype in ("auto", stored),
        "dtype",
        options.dtype,
        f"{stored}, as the model folder was converted",
    )
    return stored


def _method(options: ExecutorOptions, model: ModelConfig) -> str:
    """Method by which the folder's weights are packed."""
    if model.quantization is not None:
        return model.quantization.method
    assert options.model_folder is not None
    return GGUF if options.load_format == "auto" and has_blocks(options.model_folder) else NONE


def _has_int8_activations(
    options: ExecutorOptions, model: ModelConfig, flags: Capabilities, where: str
) -> bool:
    """Whether tokens are rounded to int8. Raises `ConfigError` if that is asked for and has no
    effect."""
    chosen = options.activation_dtype
    folder = options.model_folder
    assert folder is not None
    require(chosen in ACTIVATION_DTYPES, "activation_dtype", chosen, " or ".join(ACTIVATION_DTYPES))
    require(
        flags.int8_activations or chosen != INT8,
        "activation_dtype",
        chosen,
        f"auto or model {where}",
    )
    if options.load_format == "auto":
        is_packed = has_integers(folder)
    else:
        is_packed = model.quantization is not None and model.quantization.has_integers
    if chosen == INT8 and not is_packed:
        raise ConfigError(
            "activation_dtype",
            chosen,
            "auto or model, for a model whose weights are no packed integers",
        )
    return is_packed and flags.int8_activations and chosen != MODEL
