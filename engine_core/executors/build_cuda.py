"""An executor on the first GPU: weights, the memory that is left as KV blocks, graphs."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch

from headwater.engine_core import weights
from headwater.engine_core.batch import ForwardBatch
from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.executors.cuda import CudaExecutor
from headwater.engine_core.model_config import ModelConfig
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.platforms.cuda import AttentionPlan, CudaPlatform
from headwater.kernels.prefill_attention import prefill_tiles

log = logging.getLogger(__name__)
SPARE_BYTES = 2 << 30
"""For graphs, kernels and libraries."""


def build_cuda_executor(
    model: ModelConfig,
    tensors: weights.Weights,
    config: EngineConfig,
    device: torch.device,
    *,
    kv_cache_memory: int,
    gpu_memory_utilization: float,
    is_sized: bool,
) -> tuple[CudaExecutor, EngineConfig]:
    """With `is_sized` the config's number of blocks stands; otherwise memory decides."""
    dtype = tensors["final_norm"].dtype
    platform = CudaPlatform(
        model, config.block_size, max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len, device=device
    )
    decoder = Decoder(model, tensors, platform, config.max_model_len)
    if not is_sized:
        block_bytes = model.kv_elements_per_token * config.block_size * dtype.itemsize
        free = kv_cache_memory or _free_bytes(decoder, platform, config, dtype, gpu_memory_utilization)
        needed = -(-config.max_model_len // config.block_size) + 1
        if free < needed * block_bytes:
            allowed = f"at most {free // block_bytes * config.block_size} with the memory there is"
            raise ConfigError("max_model_len", config.max_model_len, allowed)
        config = replace(config, num_blocks=free // block_bytes)
        log.info("kv cache: %d blocks of %d tokens, %.1f GB", config.num_blocks, config.block_size, free / 1e9)
    kv_cache = _kv_cache(model, config.num_blocks, config.block_size, dtype, device)
    return CudaExecutor(decoder, platform, config, kv_cache, graphs=True), config


def _kv_cache(
    model: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    shape = (model.num_layers, 2, num_blocks, model.num_kv_heads, block_size, model.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


@torch.inference_mode()
def _free_bytes(
    decoder: Decoder, platform: CudaPlatform, config: EngineConfig, dtype: torch.dtype, utilization: float
) -> int:
    """What the largest step leaves: it is run once, over a cache of one block."""
    device, num_tokens = platform.device, min(config.max_num_batched_tokens, config.max_model_len)
    cache = _kv_cache(decoder.config, 1, config.block_size, dtype, device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    zeros = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    counts = np.array([num_tokens], np.int32)
    group = decoder.config.num_heads // decoder.config.num_kv_heads
    attention = AttentionPlan(
        num_decodes=0,
        seq_lens=ints(num_tokens),
        table_rows=ints(0),
        block_tables=zeros[None, :],
        decode=platform.decode_plan(0),
        shares=False,
        query_starts=ints(0, num_tokens),
        tiles=prefill_tiles([num_tokens], [0], group, device),
        dependent=False,
    )
    batch = ForwardBatch(
        token_ids=zeros,
        positions=zeros,
        slots=zeros - 1,
        starts=counts * 0,
        counts=counts,
        block_tables=zeros[None, :],
        sampled=zeros[:0],
    )
    hidden = decoder.forward(batch, cache, attention)
    decoder.logits(hidden[: config.max_num_seqs]).float()
    torch.cuda.synchronize(device)
    reserved = torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - reserved
    left = int(total * utilization) - others - reserved - SPARE_BYTES
    log.info("gpu memory: %.1f GB, %.1f with weights and the largest step", total / 1e9, (others + reserved) / 1e9)
    return left
