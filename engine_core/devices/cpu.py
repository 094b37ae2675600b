"""The CPU as a device: kernels compiled by numba, matrices packed as these or the CPU's library
read them."""

from __future__ import annotations

from functools import partial

from headwater.kernels.cpu.compiler.simd_types import NUM_LANES
from headwater.kernels.cpu.qk_norm_rope_store_kv import MAX_HEAD_DIM
from headwater.kernels.launch.environment import Environment

from ..executors.device.mapped_weights import SMAPS
from ..executors.device.replayed_steps import ReplayedSteps
from ..layers.linear.kinds import Weights
from ..layers.linear.packed import pack_linears
from ..models.model import Model
from ..options import INT8, MODEL, BuildRequest, ExecutorOptions, Progress
from ..platforms.capabilities import Capabilities
from ..platforms.cpu import CPU_DTYPES, CpuPlatform
from ..platforms.cpu_kernels import with_cpu_look_up
from ..platforms.stored_weights import StoredForms, StoredWeights
from ..system.usable_cores import usable_cores
from ..weights.model_file import DTYPES

api = 2
name = "cpu"
Platform = CpuPlatform
capabilities = Capabilities(
    dtypes=tuple(name for name, dtype in DTYPES.items() if dtype in CPU_DTYPES),
    max_head_dim=MAX_HEAD_DIM,
    size_multiple=NUM_LANES,
    int8_activations=True,
    windows=True,
    rotary_pairs=True,
    activations=True,
    experts=True,
    expert_biases=True,
    plain_experts=True,
    expert_parallel=True,
    sinks=True,
    states=True,
    short_convs=True,
    mamba=True,
    latents=True,
    indexers=True,
    solved_states=True,
    adapters=True,
    softcaps=True,
    chunks=True,
    odd_heads=True,
    mixed_layers=True,
    encoders=True,
    disk_blocks=True,
    draft_models=True,
    draft_heads=True,
    mtp=True,
    parallel=True,
    copied_ranks=True,
    rank_slots=True,
    rank_norms=True,
    rank_drafts=True,
    rank_adapters=True,
    rank_latents=True,
    rank_states=True,
    rank_draft_slots=True,
    stages=True,
    stage_states=True,
    pulled_kinds=True,
    stage_hosts=True,
    tree_numerics=True,
    sleep=SMAPS.exists(),
)
KV_CACHE_BYTES = 512 << 20


def is_available() -> bool:
    return True


def environment() -> Environment:
    return Environment.of(CpuPlatform.device)


def kv_cache_memory(options: ExecutorOptions) -> int:
    return KV_CACHE_BYTES


def max_ranks(options: ExecutorOptions) -> int:
    """Most ranks of an engine: one for each usable core, or for each requested thread."""
    return max(usable_cores(), options.num_threads)


def rank_variables(options: ExecutorOptions, rank: int) -> dict[str, str]:
    return {}


def stored_forms(request: BuildRequest) -> StoredForms:
    return StoredForms(keeps_packed=True)


def prepare_weights(stored: StoredWeights, progress: Progress) -> Weights:
    """Packs every matrix. Weights in block formats and integers are expanded before, unless they
    are multiplied with activations in int8."""
    request = stored.request
    return pack_linears(
        with_cpu_look_up(stored.weights),
        stored.folder,
        partial(progress, "packing weights"),
        None if request.activations == INT8 else DTYPES[request.dtype],
        stored.part,
        expands_fp8=request.options.activation_dtype == MODEL,
    )


def prepare_kernels(platform: CpuPlatform, weights: Weights, progress: Progress) -> None:
    platform.prepare(weights, partial(progress, "loading kernels"))


def forward_pass(model: Model, platform: CpuPlatform, max_blocks: int) -> ReplayedSteps:
    """Forward pass of a model. Steps of few tokens are recorded once and replayed."""
    return ReplayedSteps(model, platform, max_blocks)
