"""An executor on the first GPU: weights, the memory that is left as KV blocks, graphs."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.executors.cuda import SCORED_AT_ONCE, CudaExecutor
from headwater.engine_core.executors.cuda_swapper import CudaSwapper, staged_blocks
from headwater.engine_core.executors.step_shapes import probed_rows
from headwater.engine_core.layers.batch import ForwardBatch
from headwater.engine_core.layers.kinds import Weights
from headwater.engine_core.model_config import ModelConfig
from headwater.engine_core.models import registry
from headwater.engine_core.models.model import Model
from headwater.engine_core.models.one_row import OneRow, serves
from headwater.engine_core.platforms.cuda import CudaPlatform
from headwater.kernels.compile_ahead import CompileAhead

log = logging.getLogger(__name__)
SPARE_BYTES = 2 << 30
"""For graphs, kernels and libraries."""
GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a GPU and who has them before there is a KV cache."""

    total: int
    others: int
    """Other processes, and what CUDA itself takes."""
    weights: int
    """With the request table, workspaces and what is staged for host memory."""
    step: int
    """Activations of the largest step; twice, since a graph has memory of its own."""

    def left(self, utilization: float) -> int:
        return int(self.total * utilization) - self.others - self.weights - 2 * self.step - SPARE_BYTES

    def __str__(self) -> str:
        parts = {"weights and tables": self.weights, "largest step": 2 * self.step, "others": self.others}
        said = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items())
        return f"{self.total / GB:.1f} GB in all: {said}, kept for graphs {SPARE_BYTES / GB:.1f}"


def build_cuda_executor(
    model: ModelConfig,
    weights: Weights,
    config: EngineConfig,
    device: torch.device,
    *,
    kv_dtype: torch.dtype,
    kv_cache_memory: int,
    gpu_memory_utilization: float,
    is_sized: bool,
    gemv: bool,
) -> tuple[CudaExecutor, EngineConfig]:
    """With `is_sized` the config's number of blocks stands; otherwise memory decides. Raises `ConfigError` with what
    would fit."""
    platform = CudaPlatform.of(model, config)
    most_rows = config.max_positions
    decoder = registry.model_class(model)(model, weights, platform, config.max_model_len)
    if gemv and not serves(decoder):
        raise ConfigError("gemv", gemv, f"False for {model.architecture} with these weights")
    block_bytes = model.kv_elements_per_token * config.block_size * kv_dtype.itemsize
    with CompileAhead(device) as ahead:
        ahead.note(partial(platform.launch_probe, weights))
        memory = _measure(decoder, platform, config, kv_dtype, ahead)
        if config.num_host_blocks:
            memory = replace(memory, weights=memory.weights + 2 * staged_blocks(block_bytes) * block_bytes)
        log.info("gpu memory: %s", memory)
        num_blocks = config.num_blocks
        if not is_sized:
            free = kv_cache_memory or memory.left(gpu_memory_utilization)
            num_blocks = max(free, 0) // block_bytes
        check_cache(num_blocks, config, memory, block_bytes, gpu_memory_utilization)
        config = replace(config, num_blocks=num_blocks)
        num_bytes, num_tokens = num_blocks * block_bytes, num_blocks * config.block_size
        log.info("kv cache: %d blocks, %d tokens of %s, %.1f GB", num_blocks, num_tokens, kv_dtype, num_bytes / GB)
        kv_cache = _kv_cache(model, num_blocks, config.block_size, kv_dtype, device)
        swapper = _swapper(kv_cache, config.num_host_blocks) if config.num_host_blocks else None
        row = OneRow(decoder, device, platform.kv_scale(kv_cache)) if gemv and serves(decoder) else None
        executor = CudaExecutor(decoder, platform, config, kv_cache, one_row=row, swapper=swapper)
        ahead.note(executor.launch_likely)
    # Now that kernels are there, which compiled side by side.
    step_rows = probed_rows(config.max_num_batched_tokens, most_rows)
    platform.prepare(weights, step_rows, probed_rows(max(most_rows, SCORED_AT_ONCE), most_rows))
    if platform.own_products:
        with CompileAhead(device) as ahead:
            ahead.note(partial(platform.launch_own_products, weights))
    executor.prepare_first()
    return executor, config


def check_cache(num_blocks: int, config: EngineConfig, memory: Memory, block_bytes: int, utilization: float) -> None:
    """Whether a cache of so many blocks serves the config and fits. Raises `ConfigError`."""
    needed = -(-config.max_model_len // config.block_size) + 1
    if num_blocks < needed:
        most_len = max(num_blocks - 1, 0) * config.block_size
        share = math.ceil(1000 * (utilization + (needed - num_blocks) * block_bytes / memory.total)) / 1000
        raise ConfigError(
            "max_model_len",
            config.max_model_len,
            f"at most {most_len} in a KV cache of {num_blocks * block_bytes / GB:.1f} GB"
            + (f", or gpu_memory_utilization from {share} on" if share < 1 else "")
            + f" ({memory})",
        )
    most = (memory.total - memory.others - memory.weights - 2 * memory.step - SPARE_BYTES) // block_bytes
    if num_blocks > most:
        raise ConfigError("num_blocks", num_blocks, f"at most {most} blocks of {block_bytes} bytes ({memory})")


def _kv_cache(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    shape = (model.num_layers, 2, num_blocks, model.num_kv_heads, block_size, model.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def _swapper(kv_cache: torch.Tensor, num_slots: int) -> CudaSwapper:
    begin = time.perf_counter()
    swapper = CudaSwapper(kv_cache, num_slots)
    num_tokens, seconds = num_slots * kv_cache.shape[4], time.perf_counter() - begin
    swapper.measure()
    said = "kv cache in host memory: %d blocks, %d tokens, locked in %.1f s, a block comes back in %.0f µs"
    log.info(said, num_slots, num_tokens, seconds, 1e6 * swapper.seconds_per_block)
    return swapper


@torch.inference_mode()
def _measure(
    decoder: Model, platform: CudaPlatform, config: EngineConfig, kv_dtype: torch.dtype, ahead: CompileAhead
) -> Memory:
    """Of the largest step, over a cache of one block; nothing is computed."""
    device, num_tokens = platform.device, min(config.max_num_batched_tokens, config.max_model_len)
    cache = _kv_cache(decoder.config, 1, config.block_size, kv_dtype, device)
    zeros = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        token_ids=zeros.long(),
        positions=zeros,
        slots=zeros - 1,
        starts=np.zeros(1, np.int32),
        counts=np.array([num_tokens], np.int32),
        block_tables=zeros[None, :],
        sampled=zeros[:0],
    )
    attention_plan = platform.plan_attention(batch)
    before = torch.cuda.memory_allocated(device)

    def most_allocated() -> int:
        torch.cuda.reset_peak_memory_stats(device)
        hidden = decoder.forward(batch, cache, attention_plan)
        decoder.logits(hidden[: config.max_positions]).float()
        return torch.cuda.max_memory_allocated(device)

    step = ahead.note(most_allocated) - before
    free, total = torch.cuda.mem_get_info(device)
    return Memory(total=total, others=total - free - torch.cuda.memory_reserved(device), weights=before, step=step)
