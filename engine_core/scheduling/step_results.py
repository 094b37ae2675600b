"""Turns the result of a retired step into the engine's output, and ends requests that are
complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..config import MOST_DRAFTS
from ..executor import Int32Array, StepResult
from ..ragged import places
from ..request import FinishReason, TokenLogprobs
from ..step_output import EngineLoad, Finished, MaskReport, PromptLogprobsPart, Started, StepOutput
from .scheduler import Scheduler
from .step_builder import Chunk, PlannedStep
from .table.masks import RowIndices
from .table.request_state import NO_ROW, RequestState


class Sampled(NamedTuple):
    """Tokens that a step brought the rows that are alive."""

    rows: RowIndices
    tokens: Int32Array
    """[S, n]"""
    num_tokens: Int32Array
    """[S]"""
    reserved: Int32Array | None
    """[S] most tokens that the rows could have gained; None: as many as they gained."""
    num_drafts: Int32Array | None
    """[S] of them; None where none had any."""
    are_device_drafts: bool
    """Whether the executor drafted them."""
    logprobs: dict[int, TokenLogprobs]
    """Keyed by place in `tokens`."""


class DraftCounts:
    """Numbers of drafted and of accepted tokens so far."""

    def __init__(self) -> None:
        self.num_drafts = self.num_tokens = self.num_accepted = 0
        self._by_position = np.zeros(MOST_DRAFTS, np.int64)

    def note(self, num_drafts: Int32Array, num_accepted: Int32Array) -> None:
        """Counts the drafts of the rows of a step."""
        self.num_drafts += int(np.count_nonzero(num_drafts))
        self.num_tokens += int(num_drafts.sum())
        self.num_accepted += int(num_accepted.sum())
        self._by_position += np.bincount(num_accepted, minlength=MOST_DRAFTS + 1)[:0:-1].cumsum()[
            ::-1
        ]

    @property
    def by_position(self) -> list[int]:
        """Number of drafts of which at least i + 1 tokens were accepted, by i, without zeros at the
        end."""
        if not self.num_accepted:
            return []
        counts: list[int] = self._by_position.tolist()
        return counts[: int(np.count_nonzero(self._by_position))]


class ResultHandler:
    """Writes known tokens into the table and speaks through a StepOutput. Tokens that were drawn
    under masks are reported at once, before the rest of their step is settled."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float],
        report_masks: Callable[[MaskReport], None],
    ) -> None:
        self._num_generated_tokens = 0
        self._drafts = DraftCounts()
        self._scheduler = scheduler
        self._rows = scheduler.rows
        self._blocks = scheduler.blocks
        self._table = scheduler.rows.table
        self._clock = clock
        self.report_masks = report_masks

    def settle(self, planned: PlannedStep, result: StepResult, output: StepOutput) -> None:
        """Steps are settled in the order in which they were planned."""
        self._blocks.announce(planned.stored)
        for chunk in planned.chunks:
            if not chunk.request.has_finished:
                self._settle_chunk(chunk, result, output)
        sampled = self._alive(planned, result)
        if not sampled.rows.size:
            return
        if sampled.tokens.shape[1] == 1:
            self._settle_tokens(sampled, output, is_draw=planned.is_draw)
        else:
            self._settle_runs(sampled, output, is_draw=planned.is_draw)

    def finish(
        self,
        request: RequestState,
        reason: FinishReason,
        output: StepOutput,
        *,
        stop_token_id: int | None = None,
        error: str = "",
        retry_seconds: float = 0.0,
    ) -> None:
        num_known = (
            request.num_tokens if request.row == NO_ROW else int(self._table.num_known[request.row])
        )
        request.chain.turn = request.chain.turn.ended(stop_token_id)
        has_row = request.row != NO_ROW
        kv_bytes = self._scheduler.blocks.kv_bytes_of(request.row) if has_row else {}
        self._scheduler.finish(request)
        output.finishes.append(
            Finished(
                key=request.key,
                reason=reason,
                num_output_tokens=num_known - request.num_prompt_tokens,
                stop_token_id=stop_token_id,
                error=error,
                retry_seconds=retry_seconds,
                work=request.work(kv_bytes),
            )
        )

    def describe(self, load: EngineLoad) -> None:
        """Fills in how many tokens and drafts there were."""
        load.num_generated_tokens = self._num_generated_tokens
        load.num_drafts = self._drafts.num_drafts
        load.num_draft_tokens = self._drafts.num_tokens
        load.num_accepted_tokens = self._drafts.num_accepted
        load.num_accepted_by_position = self._drafts.by_position

    def _alive(self, planned: PlannedStep, result: StepResult) -> Sampled:
        """The result without rows whose request ended while the step was in flight."""
        rows = planned.sampled_rows
        reserved = planned.reserved
        num_drafts = result.num_drafts
        are_device_drafts = num_drafts is not None
        if reserved is not None and num_drafts is None:
            num_drafts = reserved - 1
        if not self._rows.has_leaving or (is_alive := self._table.is_alive[rows]).all():
            return Sampled(
                rows,
                result.token_ids,
                result.num_tokens,
                reserved,
                num_drafts,
                are_device_drafts,
                result.logprobs,
            )
        most = result.token_ids.shape[1]
        moves = most * (np.arange(rows.size) - np.cumsum(is_alive) + 1)
        logprobs = {
            at - int(moves[at // most]): entry
            for at, entry in result.logprobs.items()
            if is_alive[at // most]
        }
        if reserved is not None and num_drafts is not None:
            reserved = reserved[is_alive]
            num_drafts = num_drafts[is_alive]
        tokens = result.token_ids[is_alive]
        num_tokens = result.num_tokens[is_alive]
        return Sampled(
            rows[is_alive], tokens, num_tokens, reserved, num_drafts, are_device_drafts, logprobs
        )

    def _settle_tokens(self, sampled: Sampled, output: StepOutput, *, is_draw: bool) -> None:
        table = self._table
        rows = sampled.rows
        tokens = sampled.tokens[:, 0]
        # The token's position is also how many tokens have their KV computed by retired steps.
        positions = table.num_known[rows]
        ends = positions + 1
        table.write_tokens(rows, positions, tokens)
        table.num_known[rows] = ends
        is_stop = table.stops.are_stops(rows, positions, tokens)
        ended = (is_stop | (ends == table.max_len[rows])).nonzero()[0].tolist()
        self._report(rows, positions, [1] * rows.size, tokens, sampled.logprobs, output)
        if is_draw:
            self._report_drawn(output, ended)
        self._settle_speculation(sampled, positions)
        self._blocks.cache_filled(rows, positions, table)
        self._scheduler.release_unseen(rows, positions)
        for i in ended:
            self._end(rows[i], int(tokens[i]) if is_stop[i] else None, output)

    def _settle_runs(self, sampled: Sampled, output: StepOutput, *, is_draw: bool) -> None:
        """Settles the tokens that each row gained, up to the first one that ends its answer."""
        table = self._table
        rows = sampled.rows
        counts = sampled.num_tokens
        first = table.num_known[rows]
        of = np.repeat(np.arange(rows.size), counts)
        columns = places(counts)
        rows_of = rows[of]
        known = sampled.tokens[of, columns]
        positions = first[of] + columns
        is_stop = table.stops.are_stops(rows_of, positions, known)
        last = (is_stop | (positions + 1 == table.max_len[rows_of])).nonzero()[0]
        ended = list[int]()
        stops = list[int | None]()
        if last.size:
            done, at = np.unique(of[last], return_index=True)
            last = last[at]
            ended = done.tolist()
            stops = [int(known[i]) if is_stop[i] else None for i in last.tolist()]
            counts = counts.copy()
            counts[done] = columns[last] + 1
            is_counted = columns < counts[of]
            rows_of = rows_of[is_counted]
            known = known[is_counted]
            positions = positions[is_counted]
        ends_at = first + counts
        table.write_tokens(rows_of, positions, known)
        table.num_known[rows] = ends_at
        logprobs = _counted(sampled.logprobs, sampled.tokens.shape[1], counts)
        self._report(rows, first, counts.tolist(), known, logprobs, output)
        if is_draw:
            self._report_drawn(output, ended)
        self._settle_speculation(sampled, first)
        self._blocks.cache_filled(rows, ends_at - 1, table)
        self._scheduler.release_unseen(rows, ends_at - 1)
        for i, stop_token_id in zip(ended, stops, strict=True):
            self._end(rows[i], stop_token_id, output)

    def _report_drawn(self, output: StepOutput, ended: list[int]) -> None:
        """Reports the sampled tokens, except of rows that end with them."""
        keys = output.keys
        num_tokens = output.num_tokens
        token_ids = output.token_ids
        if ended:
            left = [i for i in range(len(keys)) if i not in ended]
            starts = np.cumsum(num_tokens) - num_tokens
            token_ids = [
                token for i in left for token in token_ids[starts[i] : starts[i] + num_tokens[i]]
            ]
            keys = [keys[i] for i in left]
            num_tokens = [num_tokens[i] for i in left]
        if keys:
            self.report_masks(MaskReport(keys=keys, num_tokens=num_tokens, token_ids=token_ids))

    def _settle_speculation(self, sampled: Sampled, first: Int32Array) -> None:
        """Takes back what drafts of the rows reserved in vain, and shows the speculator tokens from
        `first` on."""
        rows = sampled.rows
        speculator = self._rows.speculator
        if sampled.reserved is not None and sampled.num_drafts is not None:
            num_accepted = sampled.num_tokens - 1
            self._drafts.note(sampled.num_drafts, num_accepted)
            self._table.drafts.note_result(rows, sampled.num_drafts, num_accepted)
            self._scheduler.roll_back(rows, sampled.reserved, sampled.num_tokens)
            if sampled.are_device_drafts:
                speculator.settle_drafts(
                    rows, sampled.reserved - 1, sampled.num_drafts, num_accepted
                )
        speculator.settle(self._table, rows, first)

    def _end(self, row: int, stop_token_id: int | None, output: StepOutput) -> None:
        request = self._table.requests[row]
        assert request is not None
        reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
        self.finish(request, reason, output, stop_token_id=stop_token_id)

    def _report(
        self,
        rows: RowIndices,
        first_positions: Int32Array,
        num_tokens: list[int],
        tokens: Int32Array,
        logprobs: dict[int, TokenLogprobs],
        output: StepOutput,
    ) -> None:
        assert not output.keys, "one step an output"
        output.keys = self._table.keys[rows].tolist()
        output.first_index = (first_positions - self._table.num_prompt[rows]).tolist()
        output.num_tokens = num_tokens
        output.token_ids = tokens.tolist()
        self._num_generated_tokens += tokens.size
        output.logprobs = logprobs

    def _settle_chunk(self, chunk: Chunk, result: StepResult, output: StepOutput) -> None:
        request = chunk.request
        end = chunk.start + chunk.count
        self._scheduler.release_unseen(np.array([chunk.row]), np.array([end], np.int32))
        if chunk.scores_prompt:
            self._report_prompt_logprobs(chunk, result.prompt_logprobs[chunk.row], output)
        if chunk.is_last and not request.has_started:
            request.has_started = True
            self._report_start(request, output)
            if request.sampling.num_prompt_logprobs is not None and request.num_prompt_tokens == 1:
                output.prompt_logprobs.append(
                    PromptLogprobsPart(key=request.key, first_position=1, entries=[], last=True)
                )
        if chunk.is_last and chunk.pools:
            output.embeddings[request.key] = result.embeddings[chunk.row]
        if chunk.is_last and not chunk.samples:
            self.finish(request, FinishReason.LENGTH, output)

    def _report_start(self, request: RequestState, output: StepOutput) -> None:
        assert request.scheduled_at is not None
        output.starts.append(
            Started(
                key=request.key,
                cached_tokens=request.num_cached_tokens,
                cached_by_tier=request.num_cached_by_tier,
                queue_seconds=request.scheduled_at - request.added_at,
                prefill_seconds=self._clock() - request.scheduled_at,
                policy=self._scheduler.seating.policy_name(request),
                fcfs_queue_seconds=request.fcfs_queue_seconds,
            )
        )

    def _report_prompt_logprobs(
        self, chunk: Chunk, entries: list[TokenLogprobs], output: StepOutput
    ) -> None:
        """Entry i scores the prompt token at position start + i + 1; those out before a preemption
        are left away."""
        request = chunk.request
        end = chunk.start + len(entries)
        if end <= request.num_scored_tokens:
            return
        fresh = entries[request.num_scored_tokens - chunk.start :]
        first_position = request.num_scored_tokens + 1
        request.num_scored_tokens = end
        is_last = end == request.num_prompt_tokens - 1
        output.prompt_logprobs.append(
            PromptLogprobsPart(
                key=request.key, first_position=first_position, entries=fresh, last=is_last
            )
        )


def _counted(
    logprobs: dict[int, TokenLogprobs], num_columns: int, counts: Int32Array
) -> dict[int, TokenLogprobs]:
    """Log probabilities of each row's first counts[i] tokens, by place among these tokens.
    `logprobs`: by place in a table of `num_columns` columns."""
    if not logprobs:
        return logprobs
    starts = np.cumsum(counts) - counts
    found = ((*divmod(at, num_columns), entry) for at, entry in logprobs.items())
    return {
        int(starts[row]) + column: entry for row, column, entry in found if column < counts[row]
    }
