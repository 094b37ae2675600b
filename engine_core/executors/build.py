"""From options to an executor that computes a model, with the facts that the outside needs of it."""

from __future__ import annotations

from functools import partial

import torch

from headwater.engine_core.config import ConfigError, EngineConfig
from headwater.engine_core.executor import Executor
from headwater.engine_core.executors.options import ExecutorOptions, ModelFacts, Progress, engine_config
from headwater.engine_core.executors.runner import Runner
from headwater.engine_core.executors.single import SingleExecutor
from headwater.engine_core.layers.kinds import load_weights
from headwater.engine_core.layers.packed import pack_linears
from headwater.engine_core.model_config import ModelConfig
from headwater.engine_core.models import registry
from headwater.engine_core.numerics_id import numerics_id
from headwater.engine_core.platforms.cpu import CPU_DTYPES, CpuPlatform
from headwater.engine_core.weights import model_file
from headwater.engine_core.weights.dummy import DUMMIES, dummy
from headwater.engine_core.weights.model_file import DTYPES
from headwater.kernels.environment import Environment

CPU_KV_CACHE_BYTES = 512 << 20
"""KV cache on a CPU when neither its size nor its blocks are given."""
KV_DTYPES = DTYPES | {"fp8": torch.float8_e4m3fn}


def build_executor(options: ExecutorOptions, progress: Progress) -> tuple[Executor, EngineConfig, ModelFacts]:
    """Raises `ConfigError` naming what cannot be served."""
    if options.num_threads:
        torch.set_num_threads(options.num_threads)
    assert options.model_folder is not None
    if options.load_format not in ("auto", *DUMMIES):
        raise ConfigError("load_format", options.load_format, " or ".join(("auto", *DUMMIES)))
    model = registry.read_config(options.model_folder)
    device = _device(options.device)
    stored = model_file.stored_dtype(options.model_folder) if options.load_format == "auto" else "bfloat16"
    dtype = stored if options.dtype == "auto" else options.dtype
    if options.load_format == "auto" and dtype != stored:
        raise ConfigError("dtype", dtype, f"{stored}, as the model folder was converted")
    if device.type == "cpu" and DTYPES[dtype] not in CPU_DTYPES:
        raise ConfigError("dtype", dtype, "float32 or bfloat16 on a CPU")
    if device.type == "cpu" and options.gemv:
        raise ConfigError("gemv", options.gemv, "False on a CPU")
    if device.type == "cpu" and options.kv_swap_memory:
        raise ConfigError("kv_swap_memory", options.kv_swap_memory, "0 on a CPU, whose KV cache is in host memory")
    kv_format = _kv_format(options.kv_cache_dtype, dtype, device)
    config = _engine_config(options, model, KV_DTYPES[kv_format], device)
    layout = registry.model_class(model).layout(model)
    loading = partial(progress, "loading weights")
    if options.load_format != "auto":
        tensors = dummy(layout, DTYPES[dtype], device, uniform=DUMMIES[options.load_format])
        loading(1, 1)
    else:
        tensors = model_file.load(options.model_folder, device, loading)
    weights = load_weights(layout, tensors, DTYPES[dtype])
    source = options.model_folder.name if options.load_format == "auto" else options.load_format
    facts = ModelFacts(
        dtype=dtype,
        kv_format=kv_format,
        vocab_size=model.vocab_size,
        # By gemv a token's bits depend on whether its request was alone, which nobody can repeat elsewhere.
        numerics_id="" if options.gemv else numerics_id(Environment.of(device), source, model, dtype, kv_format),
    )
    if device.type == "cuda":
        # Imported here: a machine without a GPU may lack what it needs.
        from headwater.engine_core.executors.build_cuda import build_cuda_executor  # noqa: PLC0415

        on_gpu, config = build_cuda_executor(
            model,
            weights,
            config,
            device,
            kv_dtype=KV_DTYPES[kv_format],
            kv_cache_memory=options.kv_cache_memory,
            gpu_memory_utilization=options.gpu_memory_utilization,
            is_sized=bool(options.num_blocks),
            gemv=options.gemv,
        )
        return on_gpu, config, facts
    if config.decode_steps > 1:
        raise ConfigError("decode_steps", config.decode_steps, "1 on a CPU")
    folder = options.model_folder if options.load_format == "auto" else None
    weights = pack_linears(weights, folder, partial(progress, "packing weights"))
    on_cpu = CpuPlatform(model, config.block_size)
    on_cpu.prepare(weights, partial(progress, "loading kernels"))
    decoder = registry.model_class(model)(model, weights, on_cpu, config.max_model_len)
    return SingleExecutor(Runner(decoder, config, DTYPES[dtype])), config, facts


def _engine_config(
    options: ExecutorOptions, model: ModelConfig, kv_dtype: torch.dtype, device: torch.device
) -> EngineConfig:
    max_model_len = options.max_model_len or model.max_position_embeddings
    if max_model_len > model.max_position_embeddings:
        raise ConfigError("max_model_len", max_model_len, f"at most {model.max_position_embeddings}")
    block_bytes = model.kv_elements_per_token * options.block_size * kv_dtype.itemsize
    num_blocks = options.num_blocks or (options.kv_cache_memory or CPU_KV_CACHE_BYTES) // block_bytes
    if device.type == "cuda" and not options.num_blocks:
        # The least that will do; how many there are is known when weights and the largest step are in memory.
        num_blocks = -(-max_model_len // options.block_size) + 1
    return engine_config(options, max_model_len, num_blocks, block_bytes=block_bytes)


def _device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError("device", name, "cpu or auto on a machine without a GPU")
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError("device", name, "cpu, cuda or auto")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def _kv_format(kv_cache_dtype: str, dtype: str, device: torch.device) -> str:
    if kv_cache_dtype not in ("auto", "fp8"):
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, "auto or fp8")
    if kv_cache_dtype == "fp8" and device.type != "cuda":
        raise ConfigError("kv_cache_dtype", kv_cache_dtype, "auto on a CPU")
    return dtype if kv_cache_dtype == "auto" else kv_cache_dtype
