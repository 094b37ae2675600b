"""Options of an executor, and facts that its build finds. Imports no tensors, so that stages may
read it cheaply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .config import ConfigError, EngineConfig
from .heads.heads_config import HeadsConfig
from .weights.model_config import ModelConfig
from .weights.shards import ParallelLayout

INT8 = "int8"
MODEL = "model"
TREE = "tree"
NUMERICS = ("default", TREE)
OFF = "off"
AUTO = "auto"
MTP = "mtp"
PEER_ACCESS = (AUTO, OFF)
SPECULATIONS = (AUTO, MTP, OFF)
ACTIVATION_DTYPES = ("auto", INT8, MODEL)
DEFAULT_DISK_BYTES = 16 << 30
STAGED_BYTES = 64 << 20
"""Bytes of host memory through which blocks pass to a disk and back."""
STAGED_BLOCKS = range(16, 1025)
"""Allowed numbers of blocks."""
STAGED_SETS = 4
"""State sets at least."""
MIN_PEER_BLOCKS = 2
"""Two blocks: one for each direction."""
MOST_PEER_BLOCKS = 2048
"""More do not make a pull faster."""
Progress = Callable[[str, int, int], None]
"""(phase, done, total)"""


def ignore_progress(phase: str, done: int, total: int) -> None:
    """See `Progress`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions:
    """Options of an executor; 0 leaves the choice to the executor."""

    model_folder: Path | None
    """A converted model; None only for the simulated executor."""
    executor: str = "single"
    device: str = "cpu"
    dtype: str = "auto"
    load_format: str = "auto"
    """`auto`: the folder's weights; one of `dummy.DUMMIES`: random ones."""
    num_threads: int = 0
    block_size: int = 16
    num_blocks: int = 0
    kv_cache_memory: int = 0
    """Bytes."""
    kv_swap_memory: int = 0
    """Bytes of host memory for blocks that no request uses; 0: none."""
    kv_disk_dir: Path | None = None
    """Folder for blocks that no request uses, also after a restart; None: there is none."""
    kv_disk_memory: int = DEFAULT_DISK_BYTES
    """Most bytes of blocks on the disk."""
    kv_peer_memory: int = 0
    """Bytes of host memory for blocks on their way from and to other engines; 0: none are."""
    kv_peer_direct: str = "auto"
    """`auto`: engines of one host and one process each copy blocks out of each other's KV caches;
    `off`."""
    max_model_len: int = 0
    max_num_seqs: int = 256
    spare_rows: int = 0
    max_num_batched_tokens: int = 2048
    long_prefill_chunk: int = 0
    async_depth: int = 2
    max_draft_tokens: int = 0
    """Drafted tokens of one row and step at most; 0: none are drafted."""
    takes_turns: bool = False
    """Whether the engine may sleep, so that other engines can use its device's memory."""
    weights_holder: int = -1
    """Descriptor of a socket to a process that holds the weights' memory of a GPU when an engine of
    one rank dies; -1: none does."""
    draft_model: Path | None = None
    """A converted model that drafts tokens for the served one; None: none does."""
    draft_heads: Path | None = None
    """A folder of published heads (Medusa, EAGLE, EAGLE-3) that draft; None: none do. Not beside
    `draft_model`."""
    speculation: str = OFF
    """`mtp`: the layer for multi-token prediction of the served model's checkpoint drafts; `auto`:
    it does where the model's folder has one and all other options work beside it; `off`: it does
    not."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that weights, activations and KV cache may take."""
    kv_cache_dtype: str = "auto"
    """`auto`: the dtype of the weights; `fp8`, on a GPU."""
    adapter_memory: int = 0
    """Bytes of device memory for adapters; 0: requests have none."""
    activation_dtype: str = "auto"
    """Numbers that a CPU multiplies packed integers with: `int8`, or activations in the dtype of
    the `model`, for which the weights are expanded; `model` expands weights in e4m3, too. `auto`:
    int8 where there are packed integers. On a Hopper GPU weights that were made for activations in
    8 bits are multiplied with such, but with `model`."""
    quantization: str = "auto"
    """`auto`, or the method that the folder's weights must be packed by, or the kind that they must
    be rounded to."""
    numerics: str = "default"
    """`tree`: bits do not depend on the number of ranks, see `layers.leaves`; `default`: they
    may."""
    copies_ranks: bool = False
    """Whether ranks may be forked from this process, which has computed nothing so far."""
    tensor_parallel_size: int = 1
    """Ranks that divide every layer."""
    expert_parallel: bool = False
    """Each of these ranks has some experts whole, rather than a share of every expert."""
    pipeline_parallel_size: int = 1
    """Stages that divide the layers."""
    peer_access: str = "auto"
    """`auto`: ranks on GPUs write into one another's memory where the GPUs reach it, else into host
    memory; `off`: into host memory. Ranks on CPUs share memory either way."""
    stage_hosts: int = 0
    """Number of stages on other hosts, one a host: the last ones."""
    stage_listen: str = ""
    """host:port where these hosts join."""
    stage_secret_file: Path | None = None
    """A file of mode 0600 with the secret that both sides prove."""
    simulated_step_seconds: float = 0.0
    """Time of a simulated step, whatever is in it."""
    simulated_prefill_seconds: float = 0.0
    """Time that each prompt token adds to it."""
    simulated_draft_acceptance: float = 0.0
    """Share of the simulated executor's own drafts that are right; 0: it drafts nothing
    itself."""

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            tensor=self.tensor_parallel_size, pipeline=self.pipeline_parallel_size
        )

    def stages_beside(self, stage: int) -> range:
        """Stages that are computed on the host of this one."""
        num_first = self.pipeline_parallel_size - self.stage_hosts
        return range(num_first) if stage < num_first else range(stage, stage + 1)

    def ranks_beside(self, rank: int) -> range:
        """Ranks on the host of this one."""
        stages = self.stages_beside(self.layout.stage_index(rank))
        return range(
            stages.start * self.tensor_parallel_size, stages.stop * self.tensor_parallel_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """Options that passed the checks of a platform's capabilities, and their model."""

    options: ExecutorOptions
    model: ModelConfig
    dtype: str
    """Type of weights and activations."""
    kv_format: str
    """Type of keys and values: `dtype`, or fp8."""
    activations: str
    """`int8` where packed integers are multiplied as they are, else `dtype`."""
    rounds_tokens: bool = False
    """Whether weights that were made for activations in 8 bits may be multiplied with such."""
    pulls_kinds: bool = True
    """Whether pages of several kinds of layers move between engines."""
    is_tree: bool = False
    """Whether products are made of leaves, see `layers.leaves`."""
    numerics_id: str = ""
    """Equal ids give equal bits; empty for a rank, a draft model and a request that builds
    nothing."""
    draft: BuildRequest | None = None
    """The model that drafts, as if it were served by itself."""
    heads: HeadsConfig | None = None
    """The heads that draft, or the layer of the model's checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of the served model, as its build found them."""

    dtype: str
    kv_format: str
    vocab_size: int
    numerics_id: str
    """Equal ids give equal bits."""
    refused_fields: tuple[tuple[str, str], ...] = ()
    """Fields that requests may not have, each with the reason."""
    has_mtp: bool = False
    """Whether the layer for multi-token prediction of the model's checkpoint drafts."""
    most_device_drafts: int = 0
    """Drafts that heads draft for one row and step, at most; 0: as many as the engine drafts."""


def engine_config(
    options: ExecutorOptions,
    max_model_len: int,
    num_blocks: int,
    *,
    block_bytes: int,
    page_windows: tuple[int, ...] = (0,),
    state_pages: int = 0,
    attention_pivot: int = 0,
) -> EngineConfig:
    """`num_blocks` of all layers, `block_bytes` of one page group; the others: see `EngineConfig`.
    Raises `ConfigError`."""
    if 0 < options.kv_swap_memory < block_bytes:
        raise ConfigError(
            "kv_swap_memory",
            options.kv_swap_memory,
            f"0, or {block_bytes} bytes (a block) and more",
        )
    # A block that is being sent is in the swapper's memory and in the link's.
    num_peer_blocks = min(options.kv_peer_memory // (2 * block_bytes), MOST_PEER_BLOCKS)
    if options.kv_peer_memory and num_peer_blocks < MIN_PEER_BLOCKS:
        allowed = (
            f"0, or {2 * MIN_PEER_BLOCKS * block_bytes} bytes ({MIN_PEER_BLOCKS} blocks, "
            "twice) and more"
        )
        raise ConfigError("kv_peer_memory", options.kv_peer_memory, allowed)
    staged = min(max(STAGED_BYTES // block_bytes, STAGED_BLOCKS[0]), STAGED_BLOCKS[-1])
    # Half of the slots are for saves, and hold at least one whole state set: no sequence can
    # continue from a part of one.
    staged = max(staged, STAGED_SETS * state_pages)
    return EngineConfig(
        block_size=options.block_size,
        num_blocks=num_blocks * max(1, len(page_windows)),
        num_host_blocks=options.kv_swap_memory // block_bytes,
        num_staged_blocks=0 if options.kv_disk_dir is None else staged,
        num_peer_blocks=num_peer_blocks,
        # Each rank has a part of every block: such engines send blocks as records.
        shares_kv_cache=num_peer_blocks > 0
        and options.kv_peer_direct == "auto"
        and options.layout.num_ranks == 1,
        page_windows=page_windows,
        state_pages=state_pages,
        attention_pivot=attention_pivot,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        spare_rows=options.spare_rows,
        max_num_batched_tokens=options.max_num_batched_tokens,
        long_prefill_chunk=options.long_prefill_chunk,
        # Each stage has a step to compute.
        async_depth=max(options.async_depth, options.pipeline_parallel_size),
        num_groups=options.pipeline_parallel_size,
        max_draft_tokens=options.max_draft_tokens,
        enable_prefix_caching=bool(page_windows),
    )
