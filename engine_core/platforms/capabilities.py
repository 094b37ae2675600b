"""Flags of a platform for what it can do beyond the operations that every platform has. They are
compared with an engine's options before any weight is read; an unsupported model or option is
refused by name."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import BLOCK_SIZES


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Flags of one platform. The defaults are the least that a platform may serve."""

    dtypes: tuple[str, ...]
    """Types of weights and activations: some of float32, bfloat16 and float16."""
    max_head_dim: int
    """The largest head size of attention."""
    size_multiple: int = 1
    """Divides head, hidden and intermediate sizes."""
    block_sizes: tuple[int, ...] = BLOCK_SIZES
    """Tokens a KV block."""
    int8_activations: bool = False
    """Products of weights in block formats with activations in 8 bits (`--activation-dtype
    int8`)."""
    rounded_tokens: bool = False
    """Products of weights made for activations in 8 bits with tokens in 8 bits, each with one
    scale."""
    windows: bool = False
    """Attention over a window of the last keys."""
    chunks: bool = False
    """Attention within chunks of positions."""
    rotary_pairs: bool = False
    """Rotation of a part of a head, and of neighbouring numbers (`RotaryPairs`)."""
    activations: bool = False
    """Activations without a gate (`Platform.activation`)."""
    experts: bool = False
    """Mixtures of experts (`ExpertPlatform`)."""
    plain_experts: bool = False
    """Experts without gates, of the square of relu (`ExpertPlatform.experts`)."""
    expert_biases: bool = False
    """Experts with biases and a clamped gate, and biases of routers."""
    expert_parallel: bool = False
    """Routes leave out experts of other ranks (`Router.own`; `--expert-parallel`)."""
    states: bool = False
    """Gated delta nets, which keep states (`StatePlatform`)."""
    short_convs: bool = False
    """Short convolutions, which keep states too (`ConvPlatform`)."""
    mamba: bool = False
    """Layers of Mamba-2, which keep states too (`MambaPlatform`)."""
    latents: bool = False
    """Attention over latents that all heads share (`LatentPlatform`)."""
    indexers: bool = False
    """Attention over latents that sparse indexers choose (`IndexPlatform`)."""
    state_block_sizes: tuple[int, ...] = BLOCK_SIZES
    """Tokens a KV block of models with states, some of `block_sizes`."""
    solved_states: bool = False
    """States keep solved rows of their blocks, so that a token is computed without its block, or
    float32 rows where these are not solved."""
    sinks: bool = False
    """Attention whose softmax has a sink for each head."""
    adapters: bool = False
    """Low-rank adapters behind linear layers (`AdapterPlatform`; `--adapter-memory`)."""
    softcaps: bool = False
    """Attention whose scores are capped."""
    encoders: bool = False
    """Layers whose tokens see each other both ways (`EncoderPlatform`)."""
    odd_heads: bool = False
    """Head sizes that are no power of two."""
    mixed_layers: bool = False
    """Layers with heads of two sizes, and layers that read the keys and values of others."""
    fp8_kv: bool = False
    """Keys and values in float8_e4m3fn (`--kv-cache-dtype fp8`)."""
    host_blocks: bool = False
    """KV blocks in host memory (`--kv-swap-memory`); needs `copy_blocks`."""
    disk_blocks: bool = False
    """KV blocks on a disk (`--kv-disk-dir`) and from other engines (`--kv-peer-memory`)."""
    graphs: bool = False
    """Launches can be captured and replayed; needs `capture`."""
    draft_models: bool = False
    """A smaller model drafts tokens (`--draft-model`)."""
    draft_heads: bool = False
    """Heads over the served model's hidden states draft tokens (`--draft-heads`)."""
    mtp: bool = False
    """The layer for multi-token prediction of a checkpoint drafts tokens (`--speculation mtp`)."""
    parallel: bool = False
    """Several ranks compute one model (`--tensor-parallel-size`); needs `max_ranks` and
    `rank_variables`."""
    copied_ranks: bool = False
    """Ranks may be copies (`fork`) of a process that has loaded the platform and computed
    nothing."""
    rank_slots: bool = False
    """Ranks keep KV blocks in host memory that they share: `--kv-swap-memory`, `--kv-disk-dir` and
    `--kv-peer-memory` need it where there are several ranks."""
    rank_drafts: bool = False
    """Models and heads draft where ranks divide layers: `--draft-model` and `--draft-heads` need it
    there."""
    rank_adapters: bool = False
    """Adapters with several ranks, each of which holds its part of them: `--adapter-memory` needs
    it there."""
    rank_latents: bool = False
    """Latent attention with several ranks: each has some of the heads, and all latents."""
    rank_states: bool = False
    """Ranks divide the heads of states, each with those of its heads, and their products have
    leaves."""
    rank_draft_slots: bool = False
    """Ranks that draft keep blocks in host memory too: needed for `rank_slots` and `rank_drafts`
    together."""
    rank_norms: bool = False
    """Ranks sum norms over all heads of a token, of which each has some."""
    stages: bool = False
    """Ranks may be pipeline stages (`--pipeline-parallel-size`)."""
    stage_states: bool = False
    """Stages keep the states of their layers, each in pages of its own size."""
    pulled_kinds: bool = False
    """Pages of several kinds of layers, and snapshots of states, move between engines."""
    stage_hosts: bool = False
    """Stages may be on other hosts (`--stage-hosts`)."""
    tree_numerics: bool = False
    """Products of fixed leaves, for bits that do not depend on the number of ranks (`--numerics
    tree`)."""
    sleep: bool = False
    """Memory goes back while an engine sleeps (`--takes-turns`)."""
    prompt_logprobs: bool = True
    """Log probabilities of prompts."""
