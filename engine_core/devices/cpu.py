"""The CPU as a device: kernels compiled by numba, matrices packed as these or the CPU's library read them."""

from __future__ import annotations

from functools import partial

from headwater.kernels.cpu.qk_norm_rope_store_kv import MAX_HEAD_DIM
from headwater.kernels.cpu.simd_types import NUM_LANES
from headwater.kernels.environment import Environment

from ..config import EngineConfig
from ..executor import Executor
from ..executors.build_single import (
    engine_config_of,
    load_heads_weights,
    load_weights,
    single_executor,
)
from ..layers.kinds import Weights
from ..layers.packed import pack_linears
from ..options import INT8, BuildRequest, ExecutorOptions, Progress
from ..platforms.capabilities import Capabilities
from ..platforms.cpu import CPU_DTYPES, CpuPlatform, with_cpu_look_up
from ..weights.model_file import DTYPES

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
    draft_models=True,
    draft_heads=True,
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
    return single_executor(request, config, *served, draft=draft, heads=heads), config


def load_model(request: BuildRequest, config: EngineConfig, progress: Progress) -> tuple[CpuPlatform, Weights]:
    """A model's operations and its weights."""
    weights = with_cpu_look_up(load_weights(request, CpuPlatform.device, progress, keeps_packed=True))
    folder = request.options.model_folder if request.options.load_format == "auto" else None
    expanded_to = None if request.activations == INT8 else DTYPES[request.dtype]
    weights = pack_linears(weights, folder, partial(progress, "packing weights"), expanded_to)
    platform = CpuPlatform.of(request.model, config)
    platform.prepare(weights, partial(progress, "loading kernels"))
    return platform, weights


def _loaded_heads(request: BuildRequest, config: EngineConfig, progress: Progress) -> tuple[CpuPlatform, Weights]:
    """As `load_model`, for draft heads. Their kernels are those of the served model."""
    weights = pack_linears(load_heads_weights(request, CpuPlatform.device), None, partial(progress, "packing weights"))
    assert request.heads is not None
    return CpuPlatform.of(request.heads.layer or request.model, config), weights
