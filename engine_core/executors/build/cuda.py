"""An executor on the first GPU: weights, the memory that is left as KV blocks, graphs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from headwater.kernels.launch.compile_ahead import NO_PROCESSES, CompileAhead, NotAhead
from headwater.kernels.launch.compiler_processes import CompilerProcesses
from headwater.kernels.launch.kernel_list import KernelList

from ...config import ConfigError, EngineConfig, require
from ...layers.linear.kinds import Weights
from ...models.foreign.model import ForeignModel
from ...models.model import LayerInputs
from ...options import BuildRequest, Progress, ignore_progress
from ...platforms.cuda import CudaPlatform
from ...platforms.cuda_packed import has_rounded
from ...system.usable_cores import usable_cores
from ...weights.page_plan import PagePlan, one_group
from ..device.cuda_memory import CudaMemory
from ..device.step_shapes import StepShape, probed_rows
from ..device.weights_place import WeightsPlace
from ..entry.cuda_entry import SentStep
from ..exit.cuda_prompt_scores import SCORED_AT_ONCE
from ..model.block_bytes import set_layout
from ..model.kv_blocks import KvBlocks
from ..ranks.rank import Rank
from ..step_executor import StepExecutor
from ..tiers.cuda_swapper import CudaSwapper
from .cuda_drafting import drafting_of
from .cuda_model import LoadedHeads, LoadedModel, load_whole
from .cuda_rank import load_rank
from .engine_limits import engine_config_of, pages_of_request
from .gpu_memory import GB, SPARE_BYTES, Memory, measure, memory_beside
from .hooks import Hooks

log = logging.getLogger(__name__)


def build_cuda(
    request: BuildRequest,
    rank: Rank,
    progress: Progress,
    hooks: Hooks,
    processes: CompilerProcesses = NO_PROCESSES,
) -> tuple[StepExecutor[SentStep, StepShape], EngineConfig]:
    """Builds the executor of one rank of an engine on this process's first GPU. `processes`
    compile its kernels. Raises `ConfigError`."""
    device = torch.device("cuda")
    options = request.options
    pages = pages_of_request(request)
    config = engine_config_of(request, 0, pages)
    progress("opening the device", 0, 1)
    torch.cuda.synchronize()
    place = WeightsPlace(request, progress)
    kernels = KernelList(rank.named(request.numerics_id))
    kernels.begin()
    with kernels.loading(usable_cores()):
        if rank.is_whole:
            loaded = load_whole(request, device, progress, hooks, place.put)
        else:
            loaded = load_rank(request, rank, config, device, progress, hooks)
    if not (rank.stage.is_first and rank.stage.is_last):
        pages = one_group(loaded.served.config)
    draft = None if request.draft is None else (request.draft.model, request.draft.dtype)
    # What kernels and activations depend on, besides what the list's name covers.
    engine = repr((config, draft, request.heads, options.adapter_memory))
    # Ranks measure together.
    facts = kernels.kept_facts(engine) if rank.is_whole else None
    return build_cuda_executor(
        loaded.served,
        config,
        pages,
        device,
        draft=loaded.draft,
        heads=loaded.heads,
        kv_cache_memory=options.kv_cache_memory // options.layout.num_ranks,
        gpu_memory_utilization=options.gpu_memory_utilization,
        is_sized=bool(options.num_blocks),
        adapter_memory=options.adapter_memory,
        releasable=place.releasable,
        progress=progress,
        step_bytes=None if facts is None else facts["step_bytes"],
        on_compiled=lambda num_bytes: kernels.keep(engine, {"step_bytes": num_bytes}),
        processes=processes,
    )


def build_cuda_executor(
    served: LoadedModel,
    config: EngineConfig,
    pages: PagePlan,
    device: torch.device,
    *,
    draft: LoadedModel | None,
    heads: LoadedHeads | None,
    kv_cache_memory: int,
    gpu_memory_utilization: float,
    is_sized: bool,
    adapter_memory: int = 0,
    releasable: CudaMemory | None = None,
    progress: Progress = ignore_progress,
    step_bytes: int | None = None,
    on_compiled: Callable[[int], None] = lambda step_bytes: None,
    processes: CompilerProcesses = NO_PROCESSES,
) -> tuple[StepExecutor[SentStep, StepShape], EngineConfig]:
    """With `is_sized` the config's number of blocks stands; otherwise memory decides.
    `adapter_memory`: bytes for adapters; 0: rows have none. `releasable`: memory of the weights
    that sleep gives back, and then of the KV cache; None: it keeps all. `step_bytes`: the
    activations of the largest step, where they are known and all kernels are loaded; None: they
    are measured, and kernels compiled. `on_compiled` is called with them when the kernels of
    likely steps are compiled, and when no step compiles one any more. Raises `ConfigError` with
    what would fit."""
    progress("measuring memory", 0, 1)
    block_size = config.block_size
    weights = served.weights
    platform = served.platform(config)
    served, adapters = served.with_adapters(platform, adapter_memory)
    if adapters is not None:
        config = replace(config, num_adapter_ranks=adapters.num_ranks)
    decoder = served.on(platform, config.max_model_len)
    drafting = drafting_of(served, draft, heads, decoder, platform, config)
    served_layout = served.kv_layout(pages)
    layouts = [served_layout, *drafting.kv_layouts]
    block_bytes = sum(each.block_bytes(block_size) for each in layouts)
    sets = set_layout(served.config, block_bytes, block_size, decoder.dtype)
    block_bytes = block_bytes if sets is None else sets.page_bytes
    ahead: CompileAhead | NotAhead = NotAhead()
    with ExitStack() as stack:
        if step_bytes is not None:
            memory = memory_beside(step_bytes, torch.cuda.memory_allocated(device), device)
        else:
            ahead = stack.enter_context(CompileAhead(device, usable_cores(), processes))
            if platform.products.probes(weights):
                ahead.note(partial(platform.products.launch_probe, weights))
            inputs = LayerInputs(() if heads is None else heads.config.input_layers)
            memory = measure(
                decoder,
                platform,
                served_layout,
                config,
                ahead,
                pages,
                inputs,
                has_head=served.has_head,
            )
            # The served model and the drafter compute one after the other.
            memory = replace(memory, step=max(memory.step, drafting.measure(ahead)))
        log.info("gpu memory: %s", memory)
        num_blocks = config.num_blocks
        if not is_sized:
            free = kv_cache_memory or memory.left(gpu_memory_utilization)
            num_blocks = served.agreed(max(free, 0) // block_bytes)
        check_cache(num_blocks, config, memory, block_bytes, gpu_memory_utilization)
        config = replace(config, num_blocks=num_blocks)
        num_bytes = num_blocks * block_bytes
        num_whole = num_blocks // pages.num_groups
        log.info(
            "kv cache: %d blocks of all layers, %d tokens of %s, %.1f GB, %s%s",
            num_whole,
            num_whole * block_size,
            served.kv_dtype,
            num_bytes / GB,
            config.page_sizes.described(config.page_kinds, config.state_pages),
            pages.described,
        )
        if releasable is None:
            blocks = KvBlocks.allocated(
                layouts, num_blocks, block_size, device, least_bytes=block_bytes
            )
        else:
            shape = num_blocks, block_bytes
            blocks = KvBlocks(layouts, block_size, releasable.zeros(shape))
        swapper = _swapper(served, blocks, config) if config.num_swap_slots else None
        parts = served.parts(decoder, platform, config, pages, blocks, drafting, swapper)
        ahead.note(parts.rehearse)
    progress("choosing products", 0, 1)
    _choose_products(platform, weights, config, device, compiles=step_bytes is None)
    if isinstance(decoder, ForeignModel):
        decoder.check_rows()
    served.begin()
    progress("capturing graphs", 0, 1)
    executor = parts.executor(adapters, releasable, partial(on_compiled, memory.step))
    # Shapes without graphs of which the engine does not serve yet.
    for _ in range(parts.shapes.num_first):
        executor.prepare()
    parts.device.finish()
    on_compiled(memory.step)
    return executor, config


def _choose_products(
    platform: CudaPlatform,
    weights: Weights,
    config: EngineConfig,
    device: torch.device,
    *,
    compiles: bool,
) -> None:
    """Times the products of the weights, whose kernels have been compiled side by side, and, with
    `compiles`, compiles the chosen ones."""
    most_rows = config.max_positions
    step_rows = probed_rows(config.max_num_batched_tokens, most_rows)
    platform.products.prepare(
        weights, step_rows, probed_rows(max(most_rows, SCORED_AT_ONCE), most_rows)
    )
    if compiles and (platform.products.own or has_rounded(weights) or weights.experts):
        with CompileAhead(device, usable_cores()) as ahead:
            ahead.note(partial(platform.products.launch_own, weights))


def check_cache(
    num_blocks: int, config: EngineConfig, memory: Memory, block_bytes: int, utilization: float
) -> None:
    """Whether a cache of so many blocks serves the config and fits. Raises `ConfigError`."""
    needed = config.fewest_blocks
    if num_blocks < needed:
        most_len = config.longest(num_blocks)
        share = (
            math.ceil(1000 * (utilization + (needed - num_blocks) * block_bytes / memory.total))
            / 1000
        )
        raise ConfigError(
            "max_model_len",
            config.max_model_len,
            f"at most {most_len} in a KV cache of {num_blocks * block_bytes / GB:.1f} GB"
            + (f", or gpu_memory_utilization from {share} on" if share < 1 else "")
            + f", or more beside a max_num_seqs below {config.max_num_seqs}"
            + f" ({memory})",
        )
    most = (
        memory.total - memory.others - memory.weights - 2 * memory.step - SPARE_BYTES
    ) // block_bytes
    require(
        num_blocks <= most,
        "num_blocks",
        num_blocks // config.num_page_groups,
        f"at most {most // config.num_page_groups} blocks of "
        f"{block_bytes * config.num_page_groups} bytes ({memory})",
    )


def _swapper(served: LoadedModel, blocks: KvBlocks, config: EngineConfig) -> CudaSwapper:
    begin = time.perf_counter()
    num_slots = config.num_swap_slots
    swapper = served.swapper(blocks, config)
    num_tokens = num_slots * config.block_size
    seconds = time.perf_counter() - begin
    # Ranks copy at the same time, and share the host's memory: so they measure at the same time.
    # The slowest counts.
    served.agreed(0)
    swapper.measure()
    # Blocks in a million seconds: the least of whole numbers is agreed upon.
    rate = served.agreed(max(1, round(1e6 / max(swapper.seconds_per_block, 1e-9))))
    swapper.seconds_per_block = 1e6 / rate
    if config.shares_kv_cache:
        swapper.copy_directly()
    template = (
        "kv cache in host memory: %d blocks, %d tokens, locked in %.1f s, a block comes back "
        "in %.0f µs"
    )
    log.info(template, num_slots, num_tokens, seconds, 1e6 * swapper.seconds_per_block)
    return swapper
