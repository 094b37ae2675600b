"""Runs of one engine with speculation off and on, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from headwater.engine_core.executor import Executor
from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.options import OFF, ExecutorOptions
from headwater.engine_core.scheduling.speculation.speculator import Speculator
from headwater.services.engine.core.speculation import build_speculator, drafters_of
from headwater.services.engine.settings import EngineSettings
from headwater.services.models.manifest import MANIFEST_NAME, ModelManifest
from headwater.services.runtime.progress import silent

from .forced_answers import ForcedAnswers
from .speculated_run import EDITS, FIRST_SEED, NO_EDITS, SpeculatedRun, run_exchanges
from .speculation_figures import Case, Measurement, Pair
from .whole_drafts import WholeDrafts

WARM_UP_LEN = 24
"""Number of tokens of answers before the first measured run."""


class Bench:
    """One executor, and engines that use it. An executor with a draft model or heads has a second
    one without: a drafter computes prompts also in a run without drafts."""

    def __init__(
        self,
        options: ExecutorOptions,
        drafters: Sequence[str],
        forced: ForcedAnswers | None,
        *,
        whole_drafts: bool = False,
    ) -> None:
        """`whole_drafts`: an executor that drafts by itself makes the most drafts in each step,
        whatever they gain."""
        with nullcontext() if forced is None else forced.installed():
            self.executor, self.config, self._facts = build_executor(options, silent)
            self._plain = self.executor
            if options.draft_model or options.draft_heads or options.speculation != OFF:
                alone = replace(options, draft_model=None, draft_heads=None, speculation=OFF)
                self._plain, _, _ = build_executor(alone, silent)
        self._forced = forced
        self._is_whole = whole_drafts
        folder = options.model_folder
        assert folder is not None
        # The forced answer determines the length.
        has_ends = forced is None and (folder / MANIFEST_NAME).is_file()
        self._stop_token_ids = ModelManifest.read(folder).eos_token_ids if has_ends else ()
        self._settings = EngineSettings(
            model_folder=options.model_folder,
            block_size=options.block_size,
            drafters=tuple(drafters),
            max_draft_tokens=options.max_draft_tokens,
            draft_model=options.draft_model,
            draft_heads=options.draft_heads,
        )
        for executor in dict.fromkeys((self.executor, self._plain)):
            executor.warm_up()
            while executor.prepare():
                pass

    @property
    def drafters(self) -> tuple[str, ...]:
        return drafters_of(self._settings, self._facts)

    def close(self) -> None:
        for executor in dict.fromkeys((self.executor, self._plain)):
            executor.close()

    def measure(self, case: Case, *, runs: int) -> Measurement:
        """Measures runs with speculation off and on, in turn."""
        exchanges = case.exchanges
        short = [
            replace(each, answer_ids=each.answer_ids[:WARM_UP_LEN])
            for each in exchanges[: case.rows]
        ]
        self._pair(replace(case, exchanges=short))
        pairs = [self._pair(case) for _ in range(runs)]
        expected = (
            pairs[0][0].token_ids
            if self._forced is None
            else [each.answer_ids for each in exchanges]
        )
        num_different = sum(
            _num_different(expected, run.token_ids) for pair in pairs for run in pair
        )
        return Measurement.of(
            case, pairs, is_forced=self._forced is not None, different_tokens=num_different
        )

    def _pair(self, case: Case) -> Pair:
        off = self._run(self._plain, None, case)
        return off, self._run(self.executor, self._speculator(), case)

    def _speculator(self) -> Speculator | None:
        if self._is_whole:
            config = self.config
            most = self._facts.most_device_drafts
            return WholeDrafts(
                config.num_rows, min(most or config.max_draft_tokens, config.max_draft_tokens)
            )
        return build_speculator(self._settings, self.config, self.executor, self._facts)

    def _run(self, executor: Executor, speculator: Speculator | None, case: Case) -> SpeculatedRun:
        if self._forced is not None:
            self._forced.expect(
                {FIRST_SEED + i: each.answer_ids for i, each in enumerate(case.exchanges)}
            )
        return run_exchanges(
            *(executor, self.config, speculator, case.exchanges),
            rows=case.rows,
            temperature=case.temperature,
            stop_token_ids=self._stop_token_ids,
            edits=EDITS if case.is_edited else NO_EDITS,
        )


def _num_different(expected: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> int:
    return sum(
        sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))
        for one, other in zip(expected, got, strict=True)
    )
