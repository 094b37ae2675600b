"""The speculator of an engine, as its settings have it. Knows neither drafters' insides nor when drafting pays."""

from __future__ import annotations

import logging

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.drafter import Drafter
from headwater.engine_core.drafting.measured_costs import measured_costs, measured_passes
from headwater.engine_core.drafting.ngram import NGramDrafter
from headwater.engine_core.drafting.suffix import SuffixDrafter
from headwater.engine_core.executor import Executor
from headwater.engine_core.scheduling.adaptive_speculator import AdaptiveSpeculator
from headwater.engine_core.scheduling.grammar_drafts import GrammarDrafts
from headwater.engine_core.scheduling.model_speculator import ModelSpeculator
from headwater.engine_core.scheduling.speculator import Speculator
from headwater.services.engine.settings import EngineSettings
from headwater.services.speculation import DRAFT_MODEL

logger = logging.getLogger(__name__)


def drafters_of(settings: EngineSettings) -> tuple[str, ...]:
    """Names of the drafters that a request may ask for; none where the engine does not speculate."""
    if not settings.speculates:
        return ()
    return (*settings.drafters, DRAFT_MODEL) if has_draft_model(settings) else settings.drafters


def has_draft_model(settings: EngineSettings) -> bool:
    return settings.draft_model is not None or settings.simulated_draft_acceptance > 0


def build_speculator(
    settings: EngineSettings, config: EngineConfig, executor: Executor, vocab_size: int
) -> Speculator | None:
    """What drafts for the scheduler: `drafters_of(settings)`, up to config.max_draft_tokens a row and step. None:
    nothing is drafted. Measures steps of the executor, with nothing in flight."""
    if settings.gemv and not settings.speculation:
        logger.info("speculation is off: with --gemv a token's bits depend on the step that computes it")
    if not settings.speculates:
        return None
    costs = measured_costs(executor, config)
    for size, seconds in zip(costs.sizes.tolist(), costs.seconds.tolist(), strict=True):
        logger.debug("a decode step of %d positions: %.2f ms", size, 1000 * seconds)
    drafters = [_drafter(name, config) for name in settings.drafters]
    sizes = {"num_rows": config.max_num_seqs, "max_drafts": config.max_draft_tokens, "vocab_size": vocab_size}
    speculator: Speculator
    if has_draft_model(settings):
        passes = measured_passes(executor, config)
        logger.info("a pass of the draft model: %.2f ms for one row", 1000 * float(passes.of(1)))
        speculator = ModelSpeculator(drafters, costs, passes, **sizes)
    else:
        own = NGramDrafter.name if executor.can_draft else ""
        speculator = AdaptiveSpeculator(drafters, costs, **sizes, executor_drafts=own)
    return GrammarDrafts(speculator, num_rows=config.max_num_seqs, vocab_size=vocab_size)


def _drafter(name: str, config: EngineConfig) -> Drafter:
    if name == NGramDrafter.name:
        return NGramDrafter(config.max_num_seqs, config.max_model_len, config.max_draft_tokens)
    assert name == SuffixDrafter.name
    return SuffixDrafter(config.max_num_seqs, config.max_draft_tokens)
