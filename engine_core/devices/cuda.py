"""An NVIDIA GPU as a device. Triton and CUDA libraries are imported when an executor or a platform
is made, because a machine without a GPU may lack their dependencies."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from headwater.kernels.launch.environment import Environment

from ..config import ConfigError, EngineConfig
from ..executor import Executor
from ..executors.build.hooks import Hooks
from ..executors.device.text_device import CudaTextDevice
from ..executors.model.text_layers import TextLayers
from ..executors.ranks import rank_devices
from ..executors.ranks.rank import Rank
from ..layers.linear.kinds import Weights
from ..layers.linear.linear import Linear
from ..layers.platform import EncoderPlatform
from ..models.encoders.encoder import Encoder
from ..options import BuildRequest, ExecutorOptions, Progress
from ..platforms.capabilities import Capabilities
from ..platforms.cuda_weights import prepare_weights, stored_forms
from ..weights.model_file import DTYPES

api = 2
name = "cuda"
TREE_DTYPES = ("bfloat16", "float16")
capabilities = Capabilities(
    dtypes=tuple(DTYPES),
    max_head_dim=512,
    size_multiple=8,
    windows=True,
    softcaps=True,
    chunks=True,
    rotary_pairs=True,
    activations=True,
    encoders=True,
    experts=True,
    expert_biases=True,
    expert_parallel=True,
    sinks=True,
    states=True,
    short_convs=True,
    mamba=True,
    latents=True,
    indexers=True,
    state_block_sizes=(16, 32, 64),
    adapters=True,
    mixed_layers=True,
    fp8_kv=True,
    rounded_tokens=True,
    host_blocks=True,
    disk_blocks=True,
    graphs=True,
    draft_models=True,
    draft_heads=True,
    mtp=True,
    parallel=True,
    rank_slots=True,
    rank_norms=True,
    stages=True,
    stage_states=True,
    stage_hosts=True,
    tree_numerics=True,
    rank_drafts=True,
    rank_adapters=True,
    rank_latents=True,
    rank_states=True,
    sleep=True,
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
    platform.products.prepare(
        Weights(linears={"lm_head": linear}, tensors={}), row_counts, row_counts
    )


def encoder_steps(
    encoder: Encoder, platform: EncoderPlatform, config: EngineConfig
) -> tuple[CudaTextDevice, TextLayers]:
    """Steps of an encoder on a stream of their own, of which small ones are graphs."""
    from ..executors.model.text_graphs import TextGraphs  # noqa: PLC0415

    layers = TextGraphs(encoder, platform, config)
    device = CudaTextDevice(platform.device, config, encoder.config.vocab_size)
    device.begin()
    return device, layers


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


def build_executor(
    request: BuildRequest, rank: Rank, progress: Progress
) -> tuple[Executor, EngineConfig]:
    _check_tree(request)
    from headwater.kernels.launch import compilers_ahead  # noqa: PLC0415

    from ..executors.build.cuda import build_cuda  # noqa: PLC0415
    from ..executors.device.compiler_copies import compiler_processes  # noqa: PLC0415

    name = rank.named(request.numerics_id)
    with compiler_processes(name, is_alone=rank.is_whole) as processes:
        compilers_ahead.hash_triton()
        if request.options.max_draft_tokens and rank.is_whole:
            compilers_ahead.start_numba()
        hooks = Hooks(stored_forms=stored_forms, prepare_weights=prepare_weights)
        return build_cuda(request, rank, progress, hooks, processes)


def _check_tree(request: BuildRequest) -> None:
    """Raises `ConfigError` for a type whose products are not known to have the same bits for any
    number of outputs."""
    if request.is_tree and request.dtype not in TREE_DTYPES:
        allowed = f"{' or '.join(TREE_DTYPES)} with numerics tree on the platform {name}"
        raise ConfigError("dtype", request.dtype, allowed)


def max_ranks(options: ExecutorOptions) -> int:
    """Most ranks of an engine: each takes a GPU of its own."""
    return rank_devices.most_ranks(os.environ, torch.cuda.device_count())


def rank_variables(options: ExecutorOptions, rank: int) -> dict[str, str]:
    here = options.ranks_beside(rank)
    variables = rank_devices.rank_variables(
        os.environ, torch.cuda.device_count(), rank - here.start, len(here)
    )
    return variables | (rank_devices.NCCL_VARIABLES if options.stage_hosts else {})
