"""The speculator of an engine, as its settings have it. Knows neither drafters' insides nor when drafting pays."""

from __future__ import annotations

import logging

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import Executor
from headwater.engine_core.scheduling.drafter import Drafter
from headwater.services.engine.settings import EngineSettings

logger = logging.getLogger(__name__)


def drafters_of(settings: EngineSettings) -> tuple[str, ...]:
    """Names of the drafters that a request may ask for; none where the engine does not speculate."""
    return settings.drafters if settings.speculates else ()


def build_speculator(settings: EngineSettings, config: EngineConfig, executor: Executor) -> Drafter | None:
    """What drafts for the scheduler: by `drafters_of(settings)`, up to settings.max_draft_tokens a row and step. None:
    nothing is drafted."""
    if settings.gemv and not settings.speculation:
        logger.info("speculation is off: with --gemv a token's bits depend on the step that computes it")
    return None
