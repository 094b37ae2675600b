"""An NVIDIA GPU as a device. Triton and CUDA libraries are imported when an executor or a platform
is made, because a machine without a GPU may lack their dependencies."""

from __future__ import annotations

import os
import platform as machine
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headwater.kernels.launch.environment import Environment
from headwater.kernels.quant.byte_weights import ByteWeight

from ..config import ConfigError, EngineConfig
from ..executor import Executor
from ..executors.build.single import (
    engine_config_of,
    expert_names,
    load_heads_weights,
    load_weights,
)
from ..executors.model.block_bytes import KV_DTYPES
from ..executors.ranks import rank_devices
from ..executors.ranks.rank_place import RankPlace
from ..layers.leaf_matrix import keep_leaves
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear
from ..layers.staged import layer_of
from ..options import BuildRequest, ExecutorOptions, Progress
from ..platforms.capabilities import Capabilities
from ..weights.blocks import Parts
from ..weights.byte_weights import Keeps
from ..weights.model_file import DTYPES

api = 1
name = "cuda"
TREE_DTYPES = ("bfloat16", "float16")
ORDERED_STORES = ("x86_64", "AMD64")
"""Kinds of processors whose stores other devices see in their order."""
capabilities = Capabilities(
    dtypes=tuple(DTYPES),
    max_head_dim=256,
    size_multiple=8,
    windows=True,
    rotary_pairs=True,
    activations=True,
    experts=True,
    fp8_kv=True,
    rounded_tokens=True,
    host_blocks=True,
    disk_blocks=True,
    graphs=True,
    draft_models=True,
    draft_heads=True,
    parallel=True,
    rank_slots=True,
    stages=True,
    stage_hosts=True,
    tree_numerics=True,
    rank_drafts=True,
)


def __getattr__(attribute: str) -> Any:
    if attribute == "Platform":
        from ..platforms.cuda import CudaPlatform  # noqa: PLC0415

        return CudaPlatform
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")


def is_available() -> bool:
    return torch.cuda.is_available()


def environment() -> Environment:
    return Environment.of(torch.device("cuda"))


def kv_cache_memory(options: ExecutorOptions) -> int:
    """Bytes for the KV cache; 0: the rest of the memory, which is known when weights and the
    largest step are in it."""
    return 0


def prepare_products(platform: Any, linear: Linear, row_counts: Sequence[int]) -> None:
    """Compares the library's product of a weight with that of Headwater's kernels, as an engine
    does at its start."""
    platform.prepare(Weights(linears={"lm_head": linear}, tensors={}), row_counts, row_counts)


def capture(launch: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Runs the launch once, then as a CUDA graph; a replay writes its result anew, in the same
    place."""
    from ..executors.device.cuda_graphs import Graphs  # noqa: PLC0415

    graphs = Graphs()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch ships it so

    def replay() -> torch.Tensor:
        with torch.cuda.stream(stream):
            result = graphs.replay("launch", launch, launch)
        torch.cuda.synchronize()
        return result

    replay()
    return replay


def copy_blocks(
    source: torch.Tensor,
    target: torch.Tensor,
    source_blocks: torch.Tensor,
    target_blocks: torch.Tensor,
) -> None:
    from headwater.kernels.blocks import copy_blocks as kernel  # noqa: PLC0415

    kernel.copy_blocks(source, target, source_blocks, target_blocks)


def _kept(request: BuildRequest, device: torch.device) -> Keeps:
    """Which weights of eight bits, or of a GGUF file, stay packed: of experts, not the latter."""
    experts = expert_names(request)

    def keeps(name: str, weight: ByteWeight | Parts) -> bool:
        is_served = name not in experts or not isinstance(weight, tuple)
        return is_served and _keeps(request, device, name, weight)

    return keeps


def _keeps(
    request: BuildRequest, device: torch.device, name: str, weight: ByteWeight | Parts
) -> bool:
    """As `_kept`, of a weight that is not of experts. Of those of eight bits, embedding and head
    are read by kernels of their own."""
    from headwater.kernels.attention import hopper_attention  # noqa: PLC0415
    from headwater.kernels.gemm import byte_gemm, int4_gemm, w8a8  # noqa: PLC0415

    if isinstance(weight, tuple):
        return DTYPES[request.dtype] in int4_gemm.DTYPES
    if layer_of(name) is None:
        return False
    is_served = hopper_attention.is_hopper(device) and DTYPES[request.dtype] == torch.bfloat16
    return is_served and (
        byte_gemm.fits(weight)
        or (request.rounds_tokens and weight.rounds_tokens and w8a8.fits(weight))
    )


def load_model(
    request: BuildRequest, config: EngineConfig, progress: Progress
) -> tuple[Any, Weights]:
    """A model's operations and its weights."""
    from ..platforms.cuda import CudaPlatform  # noqa: PLC0415

    return CudaPlatform.of(request.model, config), _loaded(request, torch.device("cuda"), progress)


def _loaded(request: BuildRequest, device: torch.device, progress: Progress) -> Weights:
    """The weights as the platform multiplies them."""
    from ..layers.linear.ordered import order_linears  # noqa: PLC0415
    from ..platforms.cuda_packed import with_look_up  # noqa: PLC0415

    keeps = _kept(request, device)
    weights = load_weights(
        request, device, progress, keeps=keeps, in_planes=True, with_leaves=keep_leaves
    )
    return order_linears(with_look_up(weights), rounds_tokens=request.rounds_tokens)


def build_executor(request: BuildRequest, progress: Progress) -> tuple[Executor, EngineConfig]:
    _check_tree(request)
    from headwater.kernels.launch import compilers_ahead  # noqa: PLC0415

    from ..executors.build.cuda import build_cuda_executor  # noqa: PLC0415
    from ..executors.build.cuda_drafting import LoadedHeads, LoadedModel  # noqa: PLC0415

    device = torch.device("cuda")
    options = request.options
    compilers_ahead.hash_triton()
    if options.max_draft_tokens:
        compilers_ahead.start_numba()

    def loaded(each: BuildRequest) -> LoadedModel:
        weights = _loaded(each, device, progress)
        return LoadedModel(each.model, weights, KV_DTYPES[each.kv_format], each.is_tree)

    return build_cuda_executor(
        loaded(request),
        engine_config_of(request, kv_cache_memory(options)),
        device,
        draft=None if request.draft is None else loaded(request.draft),
        heads=None
        if request.heads is None
        else LoadedHeads(request.heads, load_heads_weights(request, device)),
        kv_cache_memory=options.kv_cache_memory,
        gpu_memory_utilization=options.gpu_memory_utilization,
        is_sized=bool(options.num_blocks),
    )


def _check_tree(request: BuildRequest) -> None:
    """Raises `ConfigError` for a type whose products are not known to have the same bits for any
    number of outputs."""
    if request.is_tree and request.dtype not in TREE_DTYPES:
        allowed = f"{' or '.join(TREE_DTYPES)} with numerics tree on the platform {name}"
        raise ConfigError("dtype", request.dtype, allowed)


def _check_stage_hosts(request: BuildRequest) -> None:
    """Raises `ConfigError` where a processor may store the word that announces data before the
    data, see `stage_pieces`."""
    options = request.options
    if options.stage_hosts and machine.machine() not in ORDERED_STORES:
        allowed = f"0 on the platform {name} beside processors of kind {machine.machine()}"
        raise ConfigError(
            "stage_hosts", options.stage_hosts, f"{allowed}, which may not keep the order of stores"
        )


def max_ranks(options: ExecutorOptions) -> int:
    """A GPU each."""
    return rank_devices.most_ranks(os.environ, torch.cuda.device_count())


def rank_variables(options: ExecutorOptions, rank: int) -> dict[str, str]:
    here = options.ranks_beside(rank)
    return rank_devices.rank_variables(
        os.environ, torch.cuda.device_count(), rank - here.start, len(here)
    )


def build_rank(
    request: BuildRequest, place: RankPlace, progress: Progress
) -> tuple[Executor, EngineConfig]:
    _check_tree(request)
    _check_stage_hosts(request)
    from headwater.kernels.launch import compilers_ahead  # noqa: PLC0415

    from ..executors.build.cuda_rank import build_cuda_rank  # noqa: PLC0415

    compilers_ahead.hash_triton()
    return build_cuda_rank(request, place, progress, _kept(request, torch.device("cuda")))
