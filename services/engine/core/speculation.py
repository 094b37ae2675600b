"""The speculator of an engine, as its settings have it. Knows neither drafters' insides nor when
drafting pays."""

from __future__ import annotations

import logging
import time
from functools import partial

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.measured_costs import measured_costs, measured_passes
from headwater.engine_core.drafting.ngram import NGramProposer
from headwater.engine_core.drafting.proposer import Proposer
from headwater.engine_core.drafting.suffix import SuffixProposer
from headwater.engine_core.executor import Executor
from headwater.engine_core.options import ModelFacts
from headwater.engine_core.scheduling.speculation.adaptive_speculator import (
    AdaptiveSpeculator,
    stopped_clock,
)
from headwater.engine_core.scheduling.speculation.ahead_model_speculator import AheadModelSpeculator
from headwater.engine_core.scheduling.speculation.grammar_drafts import GrammarDrafts
from headwater.engine_core.scheduling.speculation.model_speculator import ModelSpeculator
from headwater.engine_core.scheduling.speculation.speculator import Speculator

from ...runtime.speculation import DRAFT_HEADS, DRAFT_MODEL, MTP
from ..settings import EngineSettings
from .kept_costs import KeptCosts

logger = logging.getLogger(__name__)
WORTHWHILE_GAP = 0.05
"""Share of a step from which on rows had better not wait for results."""
NOTHING_KEPT = KeptCosts(None)


def drafters_of(settings: EngineSettings, facts: ModelFacts) -> tuple[str, ...]:
    """Names of the drafters that a request may ask for; none where the engine does not
    speculate."""
    if not settings.speculates:
        return ()
    name = _model_of(settings, facts)
    return (*settings.drafters, name) if name else settings.drafters


def _model_of(settings: EngineSettings, facts: ModelFacts) -> str:
    """The drafter that the executor computes; empty: none."""
    if facts.has_mtp:
        return MTP
    if settings.draft_heads is not None:
        return DRAFT_HEADS
    return (
        DRAFT_MODEL
        if settings.draft_model is not None or settings.simulated_draft_acceptance > 0
        else ""
    )


def build_speculator(
    settings: EngineSettings,
    config: EngineConfig,
    executor: Executor,
    facts: ModelFacts,
    kept: KeptCosts = NOTHING_KEPT,
) -> Speculator | None:
    """Builds the scheduler's speculator: `drafters_of` the settings, up to config.max_draft_tokens
    a row and step. None: nothing is drafted. Measures steps of the executor, with nothing in
    flight, unless their costs are kept."""
    if not settings.speculates:
        return None
    vocab_size = facts.vocab_size
    steps = partial(measured_costs, executor, config, vocab_size=vocab_size)
    costs = kept.get("steps", steps)
    for size, seconds in zip(costs.sizes.tolist(), costs.seconds.tolist(), strict=True):
        logger.debug("a decode step of %d positions: %.2f ms", size, 1000 * seconds)
    drafters = [_drafter(name, config) for name in settings.drafters]
    sizes = {
        "num_rows": config.num_rows,
        "max_drafts": config.max_draft_tokens,
        "vocab_size": vocab_size,
    }
    speculator: Speculator
    if name := _model_of(settings, facts):
        most = facts.most_device_drafts
        measure = partial(measured_passes, executor, config, vocab_size=vocab_size)
        passes = kept.get("passes", partial(measure, most_drafts=most))
        logger.info("a pass of %s: %.2f ms for one row", name, 1000 * float(passes.of(1)))
        is_ahead = executor.can_draft and costs.gap > WORTHWHILE_GAP * float(costs.of(1))
        kind = AheadModelSpeculator if is_ahead else ModelSpeculator
        speculator = kind(drafters, costs, passes, **sizes, name=name, most=most)
    else:
        own = NGramProposer.name if executor.can_draft else ""
        # The step times of a simulated executor are settings, and so are its costs.
        clock = stopped_clock if settings.executor == "simulated" else time.perf_counter
        speculator = AdaptiveSpeculator(drafters, costs, **sizes, executor_drafts=own, clock=clock)
    return GrammarDrafts(speculator, num_rows=config.num_rows, vocab_size=vocab_size)


def _drafter(name: str, config: EngineConfig) -> Proposer:
    if name == NGramProposer.name:
        return NGramProposer(config.num_rows, config.max_model_len, config.max_draft_tokens)
    assert name == SuffixProposer.name
    return SuffixProposer(config.num_rows, config.max_draft_tokens)
