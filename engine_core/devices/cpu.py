"""The CPU as a device: kernels compiled by numba, matrices packed as these or the CPU's library
read them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from headwater.kernels.cpu.compiler.simd_types import NUM_LANES
from headwater.kernels.cpu.qk_norm_rope_store_kv import MAX_HEAD_DIM
from headwater.kernels.launch.environment import Environment

from ..config import EngineConfig
from ..executor import Executor
from ..executors.build.rank import load_rank_weights, rank_executor
from ..executors.build.rank_drafts import HEAD, load_draft_weights
from ..executors.build.single import (
    engine_config_of,
    load_heads_weights,
    load_weights,
    single_executor,
)
from ..executors.ranks.rank_place import RankPlace
from ..layers.linear.kinds import Weights
from ..layers.linear.packed import pack_linears
from ..options import INT8, MODEL, BuildRequest, ExecutorOptions, Progress
from ..platforms.capabilities import Capabilities
from ..platforms.cpu import CPU_DTYPES, CpuPlatform, with_cpu_look_up
from ..system.usable_cores import usable_cores
from ..weights.model_file import DTYPES
from ..weights.shards import WHOLE, Shard

api = 1
name = "cpu"
Platform = CpuPlatform
capabilities = Capabilities(
    dtypes=tuple(name for name, dtype in DTYPES.items() if dtype in CPU_DTYPES),
    max_head_dim=MAX_HEAD_DIM,
    size_multiple=NUM_LANES,
    linear_kinds=("dense", "packed"),
    int8_activations=True,
    windows=True,
    rotary_pairs=True,
    activations=True,
    experts=True,
    softcaps=True,
    odd_heads=True,
    disk_blocks=True,
    draft_models=True,
    draft_heads=True,
    parallel=True,
    copied_ranks=True,
    rank_slots=True,
    rank_norms=True,
    rank_drafts=True,
    rank_draft_slots=True,
    stages=True,
    stage_hosts=True,
    tree_numerics=True,
)
KV_CACHE_BYTES = 512 << 20


def is_available() -> bool:
    return True


def environment() -> Environment:
    return Environment.of(CpuPlatform.device)


def kv_cache_memory(options: ExecutorOptions) -> int:
    return KV_CACHE_BYTES


def build_executor(request: BuildRequest, progress: Progress) -> tuple[Executor, EngineConfig]:
    config = engine_config_of(request, kv_cache_memory(request.options))
    draft = None if request.draft is None else load_model(request.draft, config, progress)
    served = load_model(request, config, progress)
    heads = None if request.heads is None else _loaded_heads(request, config, progress)
    return single_executor(request, config, *served, draft=draft, heads=heads, replays=True), config


def max_ranks(options: ExecutorOptions) -> int:
    """A core each, or as many as threads are asked for."""
    return max(usable_cores(), options.num_threads)


def rank_variables(options: ExecutorOptions, rank: int) -> dict[str, str]:
    return {}


def build_rank(
    request: BuildRequest, place: RankPlace, progress: Progress
) -> tuple[Executor, EngineConfig]:
    config = engine_config_of(request, kv_cache_memory(request.options))
    weights = load_rank_weights(request, place, CpuPlatform.device, progress, keeps_packed=True)
    platform = CpuPlatform.of(place.local_config(request.model), config)
    part = f"{place.part}, in leaves" if request.is_tree else place.part
    packed = _prepared(request, platform, weights, progress, part=part)
    draft = None
    if request.draft is not None:
        draft = _rank_draft(request.draft, place.shard, config, progress)
    heads = None
    if request.heads is not None:
        heads = _loaded_heads(request, config, progress, place.shard)
    return rank_executor(request, place, config, platform, packed, draft=draft, heads=heads), config


def _rank_draft(
    request: BuildRequest, shard: Shard, config: EngineConfig, progress: Progress
) -> tuple[CpuPlatform, Weights]:
    """As `load_model`, for a rank's draft model. All ranks map the same file of packed layers."""
    weights = load_draft_weights(request, shard, CpuPlatform.device, progress, keeps_packed=True)
    platform = CpuPlatform.of(request.model, config)
    head = {HEAD: weights.linears[HEAD]}
    layers = {name: each for name, each in weights.linears.items() if name != HEAD}
    part = f"rows of the vocabulary of shard {shard.index} of {shard.size}"
    own = _packed(request, replace(weights, linears=head, experts={}), progress, part)
    shared = _packed(
        request, replace(weights, linears=layers), progress, "all but the vocabulary head"
    )
    packed = replace(shared, linears={**shared.linears, **own.linears})
    platform.prepare(packed, partial(progress, "loading kernels"))
    return platform, packed


def load_model(
    request: BuildRequest, config: EngineConfig, progress: Progress
) -> tuple[CpuPlatform, Weights]:
    """A model's operations and its weights."""
    weights = load_weights(request, CpuPlatform.device, progress, keeps_packed=True)
    platform = CpuPlatform.of(request.model, config)
    return platform, _prepared(
        request, platform, weights, progress, part="leaves" if request.is_tree else ""
    )


def _prepared(
    request: BuildRequest,
    platform: CpuPlatform,
    weights: Weights,
    progress: Progress,
    part: str = "",
) -> Weights:
    """The weights as the platform multiplies them. `part` names the part of the model that they
    are."""
    packed = _packed(request, weights, progress, part)
    platform.prepare(packed, partial(progress, "loading kernels"))
    return packed


def _packed(request: BuildRequest, weights: Weights, progress: Progress, part: str) -> Weights:
    folder = request.options.model_folder if request.options.load_format == "auto" else None
    expanded_to = None if request.activations == INT8 else DTYPES[request.dtype]
    looked_up = with_cpu_look_up(weights)
    packing = partial(progress, "packing weights")
    expands_fp8 = request.options.activation_dtype == MODEL
    return pack_linears(looked_up, folder, packing, expanded_to, part, expands_fp8=expands_fp8)


def _loaded_heads(
    request: BuildRequest, config: EngineConfig, progress: Progress, shard: Shard = WHOLE
) -> tuple[CpuPlatform, Weights]:
    """As `load_model`, for draft heads. Their kernels are those of the served model."""
    loaded = load_heads_weights(request, CpuPlatform.device, shard)
    weights = pack_linears(loaded, None, partial(progress, "packing weights"))
    assert request.heads is not None
    return CpuPlatform.of(request.heads.layer or request.model, config), weights
