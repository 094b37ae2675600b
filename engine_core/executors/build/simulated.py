"""Builds the simulated executor from options. A core with it starts without torch."""

from __future__ import annotations

from dataclasses import replace

from ...capabilities import asked_of_options, refusals_of_engine
from ...config import ConfigError, EngineConfig
from ...executor import Executor
from ...models import registry
from ...options import ExecutorOptions, ModelFacts, Progress, engine_config
from ..simulated.adapters import RANK_UNIT
from ..simulated.cache import ENTRY_BYTES
from ..simulated.executor import SimulatedExecutor, SimulatedTiming
from ..simulated.model import SimulatedModel
from ..simulated.states import PAGES_OF_UNIT, num_units
from .pages import asked_of_layers, pages_of


def build_executor(
    options: ExecutorOptions, progress: Progress
) -> tuple[Executor, EngineConfig, ModelFacts]:
    vocab_size = 49_152
    page_windows: tuple[int, ...] = (0,)
    state_pages = 0
    has_latents = False
    asked = asked_of_options(options)
    max_model_len = options.max_model_len or 8_192
    if options.model_folder is not None:
        model = registry.read_config(options.model_folder)
        vocab_size = model.vocab_size
        max_model_len = options.max_model_len or model.max_position_embeddings
        page_windows = pages_of(options, model, max_model_len).windows
        state_pages = 0 if model.states is None else PAGES_OF_UNIT
        has_latents = model.latent is not None
        asked |= asked_of_layers(model)
    for refused in refusals_of_engine(asked):
        raise ConfigError(*refused)
    options = replace(options, max_model_len=max_model_len, num_blocks=options.num_blocks or 4_096)
    config = engine_config(
        options,
        max_model_len,
        options.num_blocks,
        block_bytes=ENTRY_BYTES * options.block_size,
        page_windows=page_windows,
        state_pages=state_pages,
    )
    config = replace(config, num_adapter_ranks=options.adapter_memory // RANK_UNIT * RANK_UNIT)
    timing = SimulatedTiming(
        step_seconds=options.simulated_step_seconds,
        seconds_per_prefill_token=options.simulated_prefill_seconds,
    )
    acceptance = options.simulated_draft_acceptance
    executor = SimulatedExecutor(
        config,
        replace(simulated_model(vocab_size, config), has_latents=has_latents),
        timing,
        draft_acceptance=acceptance,
    )
    facts = ModelFacts(
        dtype="simulated", kv_format="simulated", vocab_size=vocab_size, numerics_id="simulated"
    )
    return executor, config, facts


def simulated_model(vocab_size: int, config: EngineConfig | None = None) -> SimulatedModel:
    """Model of a simulated engine: it never samples the lowest ids, which are special tokens.
    `config`: None: its layers attend to all keys and have no states."""
    model = SimulatedModel(vocab_size=vocab_size, first_token_id=min(256, vocab_size // 2))
    if config is None:
        return model
    units = num_units(config.state_pages)
    return replace(model, windows=config.page_windows, num_state_units=units)
