"""An engine that is driven and checked at every step: what it plans against the executor's
contract, what it says against what each stream should be, what it holds against what its rows hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.engine import Engine
from headwater.engine_core.executor import Int32Array
from headwater.engine_core.executors.simulated.hashes import UInt64Array
from headwater.engine_core.executors.simulated.model import expected_tokens
from headwater.engine_core.kv.block_source import BlockSource
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.scheduling.speculation.adaptive_speculator import AdaptiveSpeculator
from headwater.engine_core.scheduling.speculation.grammar_drafts import GrammarDrafts
from headwater.engine_core.scheduling.speculation.speculator import Speculator
from headwater.engine_core.scheduling.table.masks import RowIndices
from headwater.engine_core.scheduling.table.request_state import RequestState
from headwater.engine_core.scheduling.table.request_table import RequestTable
from headwater.engine_core.step_output import MaskReport, StepOutput
from tests.engine_core.checked_executor import MODEL, CheckedExecutor
from tests.engine_core.fixed_speculator import FixedSpeculator, Undrafted

NUM_WORDS = 2


def grammar(answer: list[int]) -> Int32Array:
    """A mask that depends on the tokens before it; now and then the end of sequence is in it."""
    ids = np.arange(MODEL.vocab_size)
    allowed = (ids * 7 + len(answer) * 3 + sum(answer[-2:])) % 5 != 0
    allowed[2] = len(answer) % 9 == 4
    return np.packbits(np.resize(allowed, 32 * NUM_WORDS), bitorder="little").view(np.int32)


@dataclass
class Stream:
    """What should come of a request, and what came."""

    new: NewRequest
    answer: list[int]
    tokens: list[int]
    granted: int
    is_cancelled: bool = False
    cached_tokens: int | None = None
    reason: FinishReason | None = None
    num_scored: int = 0
    """Prompt positions whose log probabilities came."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0


class HalfRightSpeculator(FixedSpeculator):
    """Knows the answers, and drafts by lot: so many tokens, of which each may be wrong. Serves
    some requests only."""

    def __init__(self, seed: int, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self.streams: dict[int, Stream] = {}
        self._rng = np.random.default_rng(seed)

    def serves(self, request: RequestState) -> bool:
        return request.key % 3 != 0

    def draft(
        self, table: RequestTable, rows: RowIndices, most: Int32Array, total: int
    ) -> tuple[Int32Array, Int32Array]:
        num_drafts = np.zeros(len(rows), np.int32)
        draft_ids = np.zeros((len(rows), self.max_drafts), np.int32)
        for i, row in enumerate(rows.tolist()):
            assert most[i] >= 0
            if not most[i]:
                continue
            request = table.requests[row]
            assert request is not None
            assert self.serves(request), "drafts are wanted for a row that it does not serve"
            known = table.known_ids(row).tolist()
            assert len(known) == table.num_computed[row] + 1, "something of the row is in flight"
            stream = self.streams[request.key]
            answer = stream.answer[len(known) - request.num_prompt_tokens :][
                : self._rng.integers(0, most[i] + 1)
            ]
            drafts = [
                token if self._rng.random() < 0.8 else int(self._rng.integers(3, 40))
                for token in answer
            ]
            num_drafts[i] = len(drafts)
            draft_ids[i, : len(drafts)] = drafts
        return num_drafts, draft_ids


@dataclass
class Want:
    """The next mask of a row, and the step at which it is there."""

    key: int
    ticket: int
    index: int
    due: int
    draft_ids: list[int]
    """Behind which masks are wanted too."""


Sources = Callable[[UInt64Array], Sequence[BlockSource]]
"""Block sources beside a KV cache [num_blocks, block_size]."""


@dataclass
class Driver:
    """Talks to an engine and compares all it says."""

    config: EngineConfig
    late_polls: int
    mask_delay: int = 0
    """Steps that a mask takes, at most."""
    streams: dict[int, Stream] = field(default_factory=dict)
    cached: set[bytes] = field(default_factory=set)
    speculator: HalfRightSpeculator | AdaptiveSpeculator | Undrafted | None = None
    foretold: Callable[[Stream], list[int]] | None = None
    """What is said to be forced behind a stream's tokens, with their mask; needs a speculator."""
    sources: Sources | None = None
    """With them a step takes a second: some loads are given up. Without, it takes a millisecond."""

    def __post_init__(self) -> None:
        if self.speculator is not None:
            self.config = replace(self.config, max_draft_tokens=self.speculator.max_drafts)
        if isinstance(self.speculator, HalfRightSpeculator):
            self.speculator.streams = self.streams
        if isinstance(self.speculator, FixedSpeculator):
            self.speculator.beside(self.config)
        self.executor = CheckedExecutor(self.config, self.late_polls)
        self.num_steps = 0
        num_positions = self.config.max_draft_tokens + 1
        self.masks = np.zeros((num_positions, self.config.num_rows, NUM_WORDS), np.int32)
        self.engine = Engine(
            self.config,
            self.executor,
            clock=lambda: self.num_steps * (1e-3 if self.sources is None else 1.0),
            masks=self.masks,
            speculator=self._beside_grammars(),
            sources=() if self.sources is None else self.sources(self.executor.kv_blocks),
            report_masks=self._receive_wanted,
        )
        self.wanted: dict[int, Want] = {}
        """By row."""

    def _beside_grammars(self) -> Speculator | None:
        if self.speculator is None or self.foretold is None:
            return self.speculator
        return GrammarDrafts(
            self.speculator, num_rows=self.config.num_rows, vocab_size=MODEL.vocab_size
        )

    def add(self, new: NewRequest) -> None:
        answer = expected_tokens(
            self.executor.model,
            new.prompt_ids,
            new.sampling,
            choice_index=new.choice_index,
            output_ids=new.output_ids,
            max_model_len=self.config.max_model_len,
            mask=grammar if new.has_grammar else None,
        )
        self.streams[new.key] = Stream(
            new, answer, list(new.output_ids), len(new.output_ids) + new.credit
        )
        self.engine.add(new)

    def cancel(self, key: int) -> None:
        if self.streams[key].reason is None:
            self.streams[key].is_cancelled = True
        self.engine.cancel(key)

    def add_credit(self, key: int, tokens: int) -> None:
        self.streams[key].granted += tokens
        self.engine.add_credit(key, tokens)

    def stall(self, key: int) -> None:
        self.engine.stall(key)

    def fill_masks(self, *, at_once: bool = False) -> None:
        """As the server would: also for requests that have ended, and again what is there."""
        filled = []
        foretold = []
        for row, want in self.wanted.items():
            tokens = self.streams[want.key].tokens
            if len(tokens) >= want.index and (at_once or want.due <= self.num_steps):
                drafts = want.draft_ids if len(tokens) == want.index else []
                for i in range(len(drafts) + 1):
                    self.masks[i, row] = grammar([*tokens, *drafts[:i]])
                filled.append((row, want.ticket, len(tokens), len(drafts) + 1))
                if self.foretold is not None:
                    foretold.append(
                        (row, want.ticket, len(tokens), self.foretold(self.streams[want.key]))
                    )
                want.index = len(tokens) + 1
                want.draft_ids = []
                want.due = self.num_steps + (want.key + want.index) % (self.mask_delay + 1)
        if filled:
            self.engine.masks_filled(*map(list, zip(*filled, strict=True)))
        if foretold:
            self.engine.foresee(*map(list, zip(*foretold, strict=True)))

    @property
    def awaits_masks(self) -> bool:
        return self.engine._scheduler.rows.held.await_masks

    def step(self) -> None:
        self.num_steps += 1
        self.fill_masks()
        if (output := self.engine.step()) is not None:
            self._receive(output)
        assert set(self.engine.cached_block_hashes()) == self.cached
        self._check_holds()

    def run(self) -> None:
        steps = iter(repeat(None, 5000))
        while self.engine.has_work() or self.awaits_masks:
            next(steps)
            # Nobody else may be there to wait for.
            self.fill_masks(at_once=not self.engine.has_work())
            self.step()

    def _receive(self, output: StepOutput) -> None:
        assert len(set(output.keys)) == len(output.keys)
        tokens = iter(output.token_ids)
        for start in output.starts:
            stream = self.streams[start.key]
            assert stream.cached_tokens is None
            stream.cached_tokens = start.cached_tokens
        for key, first_index, num_tokens in zip(
            output.keys, output.first_index, output.num_tokens, strict=True
        ):
            stream = self.streams[key]
            assert stream.reason is None, "tokens after the end"
            assert not stream.is_cancelled
            assert stream.cached_tokens is not None, "tokens before the start"
            assert first_index == len(stream.tokens)
            stream.tokens += [next(tokens) for _ in range(num_tokens)]
            assert len(stream.tokens) <= stream.granted
            assert stream.tokens == stream.answer[: len(stream.tokens)]
        assert not list(tokens)
        self._receive_logprobs(output)
        for finish in output.finishes:
            stream = self.streams[finish.key]
            assert stream.reason is None, "two ends"
            stream.reason = finish.reason
            # A cancel may come too late.
            stream.is_cancelled &= finish.reason is FinishReason.CANCELLED
            assert finish.num_output_tokens == len(stream.tokens)
            if finish.work is not None:
                stream.num_draft_tokens = finish.work.num_draft_tokens
                stream.num_accepted_tokens = finish.work.num_accepted_tokens
                stream.num_steps = finish.work.num_steps
        if (events := output.cache_events) is not None:
            assert self.cached >= set(events.removed)
            self.cached -= set(events.removed)
            stored = [block_hash for chain in events.stored for block_hash in chain.hashes]
            assert len(set(stored)) == len(stored)
            assert self.cached.isdisjoint(stored)
            self.cached |= set(stored)

    def _receive_wanted(self, report: MaskReport) -> None:
        if (wanted := report.wanted) is not None:
            columns = (
                wanted.keys,
                wanted.rows,
                wanted.tickets,
                wanted.output_indices,
                wanted.draft_ids,
            )
            for key, row, ticket, index, draft_ids in zip(*columns, strict=True):
                self.wanted[row] = Want(
                    key, ticket, index, self.num_steps + key % (self.mask_delay + 1), draft_ids
                )

    def _receive_logprobs(self, output: StepOutput) -> None:
        """The simulated model finds each token the likeliest."""
        keys = [
            key
            for key, num_tokens in zip(output.keys, output.num_tokens, strict=True)
            for _ in range(num_tokens)
        ]
        asking = [
            i
            for i, key in enumerate(keys)
            if self.streams[key].new.sampling.num_logprobs is not None
        ]
        assert sorted(output.logprobs) == asking
        for i, entry in output.logprobs.items():
            assert entry.top_ids[0] == output.token_ids[i]
            assert len(entry.top_ids) == self.streams[keys[i]].new.sampling.num_logprobs
        for part in output.prompt_logprobs:
            stream = self.streams[part.key]
            assert part.first_position == stream.num_scored + 1
            stream.num_scored += len(part.entries)
            scored = stream.new.prompt_ids[part.first_position : stream.num_scored + 1]
            assert [entry.top_ids[0] for entry in part.entries] == scored
            assert part.last == (stream.num_scored == len(stream.new.prompt_ids) - 1)

    def _check_holds(self) -> None:
        """Reference counts are what the rows of the table hold."""
        scheduler = self.engine._scheduler
        blocks = scheduler.blocks
        held = Counter[int]()
        for row, request in enumerate(scheduler.rows.table.requests):
            if request is not None:
                held.update(blocks.pages_of(row))
        held.update(blocks._forks.held_pages)
        for load in blocks._loads._open.values():
            held.update(load.held.pages + load.here + load.blocks)
        assert [held[block] for block in range(self.config.num_blocks)] == blocks._pool.ref_counts

    def check_ends(self) -> None:
        for key, stream in self.streams.items():
            if stream.is_cancelled:
                assert stream.reason is FinishReason.CANCELLED
                continue
            if stream.reason is FinishReason.LATE:
                assert "slo" in self.config.policy
                assert stream.new.first_token_seconds
                assert stream.cached_tokens is None
                continue
            assert stream.tokens == stream.answer, key
            sampling = stream.new.sampling
            scores_prompt = (
                sampling.num_prompt_logprobs is not None and stream.cached_tokens is not None
            )
            assert stream.num_scored == (len(stream.new.prompt_ids) - 1 if scores_prompt else 0)
            min_tokens = 0 if stream.new.has_grammar else sampling.min_tokens
            stops = len(stream.tokens) > min_tokens and stream.tokens[-1] in sampling.stop_token_ids
            assert stream.reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
        load = self.engine.load()
        assert (
            load.num_running,
            load.num_waiting,
            load.num_prefill_tokens,
            load.num_used_blocks,
        ) == (0, 0, 0, 0)
        assert self.engine.step() is None
