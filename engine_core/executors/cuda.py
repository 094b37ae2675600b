"""Computes plans on one GPU: submit launches and never waits, retire waits for the event of its step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from headwater.engine_core.batch import ForwardBatch
from headwater.engine_core.config import EngineConfig
from headwater.engine_core.cuda_graphs import DecodeGraphs
from headwater.engine_core.device_sampler import DeviceSampler, Scores, score
from headwater.engine_core.device_table import DeviceTable, upload
from headwater.engine_core.executors.executor import StepPlan, StepResult
from headwater.engine_core.models.decoder import Decoder
from headwater.engine_core.platforms.cuda import DEPENDENT_ROWS, SHARING_ROWS, AttentionPlan, CudaPlatform
from headwater.engine_core.request import TokenLogprobs
from headwater.kernels.prefill_attention import prefill_tiles
from headwater.kernels.step_rows import load_lengths, load_tokens, store_tokens

SCORED_AT_ONCE = 256
"""Prompt positions whose logits exist at the same time."""


@dataclass(slots=True, kw_only=True)
class Flight:
    """A step that is launched."""

    step: int
    tokens: torch.Tensor
    """Pinned; filled when `done`."""
    done: torch.cuda.Event
    scored: dict[int, int] = field(default_factory=dict)
    """From the index of a sampled row to its row of `scores`."""
    scores: Scores | None = None
    num_tops: dict[int, int] = field(default_factory=dict)
    prompt_scores: dict[int, tuple[list[Scores], int]] = field(default_factory=dict)


class CudaExecutor:
    """See `Executor`. The token of a decode row is read from the table on the device, where sampling wrote it, so a
    plan is launched before the tokens of the one before it are known here."""

    def __init__(
        self, decoder: Decoder, platform: CudaPlatform, config: EngineConfig, kv_cache: torch.Tensor, *, graphs: bool
    ) -> None:
        self._decoder, self._platform, self._config, self._kv_cache = decoder, platform, config, kv_cache
        device = self._device = platform.device
        self._table = DeviceTable(config, device)
        self._sampler = DeviceSampler(decoder, config.max_num_seqs, device)
        self._num_prompt = np.zeros(config.max_num_seqs, np.int32)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch ships it so
        self._flights: deque[Flight] = deque()
        self._results = [
            torch.zeros(config.max_num_seqs, dtype=torch.int32, pin_memory=True) for _ in range(config.async_depth + 1)
        ]
        # What a decode graph reads: rows, positions and output indices, and what it derives from them.
        self._inbox = torch.zeros(3, config.max_num_seqs, dtype=torch.int32, device=device)
        self._inbox[0] = -1
        self._derived = torch.zeros(4, config.max_num_seqs, dtype=torch.int32, device=device)
        self._graphs = DecodeGraphs(config.max_num_seqs, self._decode, self._draw, self._stream)
        if graphs:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._graphs.capture_all()
        torch.cuda.synchronize(device)

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> int:
        with torch.cuda.stream(self._stream):
            for admitted in plan.admitted:
                self._sampler.admit(admitted)
                self._num_prompt[admitted.row] = admitted.num_prompt_tokens
            self._table.update(plan)
            flight = Flight(
                step=plan.step,
                tokens=self._results[plan.step % len(self._results)][: int(plan.samples.sum())],
                done=torch.cuda.Event(),  # type: ignore[no-untyped-call]  # torch ships it so
            )
            if (plan.counts == 1).all() and plan.samples.all() and not plan.prompt_logprob_rows:
                self._run_decode(plan, flight)
            else:
                self._run_mixed(plan, flight)
            flight.done.record(self._stream)
        self._flights.append(flight)
        return plan.step

    def retire(self, handle: int) -> StepResult:
        flight = self._flights.popleft()
        assert flight.step == handle
        flight.done.synchronize()
        logprobs: dict[int, TokenLogprobs] = {}
        if flight.scores is not None:
            entries = _entries(flight.scores)
            logprobs = {j: _cut(entries[i], flight.num_tops[j]) for j, i in flight.scored.items()}
        prompt_logprobs = {
            row: [_cut(entry, num_top) for scores in parts for entry in _entries(scores)]
            for row, (parts, num_top) in flight.prompt_scores.items()
        }
        return StepResult(token_ids=flight.tokens.numpy().copy(), logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def is_ready(self, handle: int) -> bool:
        assert self._flights[0].step == handle
        return bool(self._flights[0].done.query())  # type: ignore[no-untyped-call]  # torch ships it so

    def close(self) -> None:
        torch.cuda.synchronize(self._device)
        self._flights.clear()

    # Decode steps.

    def _run_decode(self, plan: StepPlan, flight: Flight) -> None:
        num_rows = len(plan.rows)
        size = self._graphs.size_for(num_rows)
        staged = np.zeros((3, size), np.int32)
        staged[0, num_rows:] = -1
        staged[:, :num_rows] = plan.rows, plan.starts, plan.output_indices
        self._inbox[:, :size].copy_(torch.from_numpy(staged).pin_memory(), non_blocking=True)
        graph = self._graphs.of(size)
        graph.forward.replay()
        if self._sampler.is_plain(plan.rows):
            graph.draw.replay()
            flight.tokens.copy_(self._sampler.tokens[:num_rows], non_blocking=True)
        else:
            rows, positions, outputs = self._inbox[:, :num_rows].unbind()
            self._sample(plan, flight, graph.hidden[:num_rows], rows, positions, outputs)

    def _decode(self, size: int) -> torch.Tensor:
        rows, positions = self._inbox[0, :size], self._inbox[1, :size]
        token_ids, slots, seq_lens, table_rows = self._derived[:, :size].unbind()
        load_lengths(rows, positions, seq_lens, table_rows)
        attention = AttentionPlan(
            num_decodes=size,
            seq_lens=seq_lens,
            table_rows=table_rows,
            block_tables=self._table.block_ids,
            decode=self._platform.decode_plan(size),
            shares=size >= SHARING_ROWS,
            query_starts=seq_lens[:0],
            tiles=seq_lens[:0],
            dependent=size <= DEPENDENT_ROWS,
        )
        self._platform.refresh(attention)
        ones = np.ones(size, np.int32)
        return self._forward(rows, positions, token_ids, slots, attention, ones)

    def _draw(self, size: int, hidden: torch.Tensor) -> None:
        rows, positions, outputs = self._inbox[:, :size].unbind()
        tokens = self._sampler.draw(hidden, self._table.params, rows, outputs)
        store_tokens(rows, positions, tokens, self._table.token_ids)

    # Steps with prompt chunks.

    def _run_mixed(self, plan: StepPlan, flight: Flight) -> None:
        ends = plan.starts + plan.counts
        last = np.cumsum(plan.counts)
        first = last - plan.counts
        longer = np.flatnonzero(plan.counts != 1)
        num_decodes = int(longer[0]) if len(longer) else len(plan.rows)
        bounds = np.concatenate((first[num_decodes:], last[-1:])) - num_decodes
        sampled = plan.samples
        parts = (
            np.repeat(plan.rows, plan.counts),
            np.arange(last[-1]) + np.repeat(plan.starts - first, plan.counts),
            plan.rows,
            ends,
            bounds,
            plan.rows[sampled],
            ends[sampled] - 1,
            plan.output_indices[sampled],
            last[sampled] - 1,
        )
        staged = upload(np.concatenate(parts).astype(np.int32), self._device)
        rows, positions, table_rows, seq_lens, query_starts, *drawn, at = torch.split(
            staged, [len(part) for part in parts]
        )
        token_ids, slots = torch.empty_like(rows), torch.empty_like(rows)
        attention = AttentionPlan(
            num_decodes=num_decodes,
            seq_lens=seq_lens,
            table_rows=table_rows,
            block_tables=self._table.block_ids,
            decode=self._platform.decode_plan(num_decodes),
            shares=num_decodes >= SHARING_ROWS,
            query_starts=query_starts,
            tiles=prefill_tiles(
                plan.counts[num_decodes:].tolist(),
                plan.starts[num_decodes:].tolist(),
                self._decoder.config.num_heads // self._decoder.config.num_kv_heads,
                self._device,
            ),
            dependent=len(rows) <= DEPENDENT_ROWS,
        )
        self._platform.refresh(attention)
        hidden = self._forward(rows, positions, token_ids, slots, attention, plan.counts)
        for row in plan.prompt_logprob_rows:
            self._score_prompt(plan, flight, hidden, row)
        if sampled.any():
            self._sample(plan, flight, hidden[at.long()], *drawn)

    def _forward(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        token_ids: torch.Tensor,
        slots: torch.Tensor,
        attention: AttentionPlan,
        counts: np.ndarray[tuple[int], np.dtype[np.int32]],
    ) -> torch.Tensor:
        table = self._table
        load_tokens(rows, positions, table.token_ids, table.block_ids, self._config.block_size, token_ids, slots)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            starts=counts,
            counts=counts,
            block_tables=table.block_ids,
            sampled=positions[:0],
        )
        return self._decoder.forward(batch, self._kv_cache, attention)

    def _sample(
        self,
        plan: StepPlan,
        flight: Flight,
        hidden: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        outputs: torch.Tensor,
    ) -> None:
        on_host = plan.rows[plan.samples]
        if self._sampler.is_plain(on_host):
            tokens = self._sampler.draw(hidden, self._table.params, rows, outputs)
        else:
            ends = (plan.starts + plan.counts)[plan.samples]
            known = [self._known(int(row), int(end)) for row, end in zip(on_host, ends, strict=True)]
            host = on_host, plan.output_indices[plan.samples]
            tokens, flight.scored, flight.scores = self._sampler.draw_special(
                hidden, self._table.params, rows, outputs, host, known
            )
            flight.num_tops = {j: self._sampler.num_logprobs(on_host[j]) for j in flight.scored}
        store_tokens(rows, positions, tokens, self._table.token_ids)
        flight.tokens.copy_(tokens, non_blocking=True)

    def _known(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        num_prompt = int(self._num_prompt[row])
        return self._table.token_ids[row, :num_prompt], self._table.token_ids[row, num_prompt:length]

    def _score_prompt(self, plan: StepPlan, flight: Flight, hidden: torch.Tensor, row: int) -> None:
        i = int(np.flatnonzero(plan.rows == row)[0])
        start, first = int(plan.starts[i]), int(plan.counts[:i].sum())
        count = min(int(plan.counts[i]), int(self._num_prompt[row]) - 1 - start)
        # A copy: the row may be another's before the scores are read.
        next_ids = self._table.token_ids[row, start + 1 : start + 1 + count].clone()
        num_top = self._sampler.params[row].num_prompt_logprobs or 0
        parts = []
        for at in range(0, count, SCORED_AT_ONCE):
            end = min(at + SCORED_AT_ONCE, count)
            parts.append(score(self._decoder.logits(hidden[first + at : first + end]), next_ids[at:end], num_top))
        flight.prompt_scores[row] = parts, num_top


def _entries(scores: Scores) -> list[TokenLogprobs]:
    columns = (scores.chosen.tolist(), scores.top_ids.tolist(), scores.top_logprobs.tolist())
    return [
        TokenLogprobs(logprob=chosen, top_ids=ids, top_logprobs=values)
        for chosen, ids, values in zip(*columns, strict=True)
    ]


def _cut(entry: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(
        logprob=entry.logprob, top_ids=entry.top_ids[:num_top], top_logprobs=entry.top_logprobs[:num_top]
    )
