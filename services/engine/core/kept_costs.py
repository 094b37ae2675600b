"""Costs of decode steps that an earlier start of the same engine measured, in files beside the
compiled kernels."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.drafting.step_costs import StepCosts
from headwater.engine_core.options import ModelFacts
from headwater.engine_core.system.usable_cores import usable_cores

from ...runtime.owner_file import write_owner_file
from ..settings import EngineSettings
from .variables import COSTS_VARIABLE

KEPT_SECONDS = 7 * 24 * 3600.0
"""Age from which costs are measured again: clocks and cooling of a machine change without a change
of its name."""
KEPT_BUSY_SECONDS = 3600.0
"""Like the time above, for costs that were measured on a busy machine: a restarted engine reuses
its earlier ones."""
DIGEST_BYTES = 16


class _Record(msgspec.Struct, frozen=True):
    sizes: list[int]
    seconds: list[float]
    gap: float
    is_steady: bool


class KeptCosts:
    """Costs of one engine's steps, by what was measured. Without a folder everything is measured
    anew."""

    def __init__(
        self, folder: Path | None, key: str = "", *, clock: Callable[[], float] = time.time
    ) -> None:
        """`key`: equal for engines whose steps take equally long."""
        self._folder = folder
        self._key = key
        self._clock = clock

    @classmethod
    def of_engine(
        cls,
        env: Mapping[str, str],
        settings: EngineSettings,
        config: EngineConfig,
        facts: ModelFacts,
    ) -> KeptCosts:
        """Stored costs of an engine on this machine; none for a simulated executor, whose step
        times are settings."""
        folder = env.get(COSTS_VARIABLE)
        is_kept = folder is not None and settings.executor != "simulated"
        return cls(
            Path(folder) if folder is not None and is_kept else None, _key(settings, config, facts)
        )

    def get(self, what: str, measure: Callable[[], StepCosts]) -> StepCosts:
        """Stored costs of `what`, else newly measured ones, which are then stored."""
        if self._folder is None:
            return measure()
        path = self._folder / f"{self._key}-{what}.json"
        if (kept := self._read(path)) is not None:
            return kept
        costs = measure()
        record = _Record(costs.sizes.tolist(), costs.seconds.tolist(), costs.gap, costs.is_steady)
        # Without the file the next start measures again.
        with suppress(OSError):
            write_owner_file(path, msgspec.json.encode(record))
        return costs

    def _read(self, path: Path) -> StepCosts | None:
        """Costs that a file holds; None where there is no such file, or an old or damaged one."""
        with suppress(OSError, msgspec.DecodeError):
            age = self._clock() - path.stat().st_mtime
            record = msgspec.json.decode(path.read_bytes(), type=_Record)
            is_fresh = age < (KEPT_SECONDS if record.is_steady else KEPT_BUSY_SECONDS)
            if is_fresh and record.sizes and len(record.sizes) == len(record.seconds):
                return StepCosts.measured(
                    record.sizes, record.seconds, record.gap, is_steady=record.is_steady
                )
        return None


def _key(settings: EngineSettings, config: EngineConfig, facts: ModelFacts) -> str:
    """Hash of what the time of a step depends on: the numerics id covers the processor, libraries,
    code and model."""
    of_steps = (
        config.block_size,
        config.max_model_len,
        config.max_num_seqs,
        config.max_num_batched_tokens,
    )
    of_plans = (config.async_depth, config.num_groups, config.max_draft_tokens)
    sizes = settings.tensor_parallel_size, settings.pipeline_parallel_size, settings.stage_hosts
    ranks = *sizes, settings.peer_access
    drafts = str(settings.draft_model), str(settings.draft_heads), facts.has_mtp
    what = facts.numerics_id, of_steps, of_plans, ranks, drafts, settings.threads, usable_cores()
    return hashlib.blake2b(repr(what).encode(), digest_size=DIGEST_BYTES).hexdigest()
