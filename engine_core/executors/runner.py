"""Computes plans one after another on a platform: keeps the request table and the KV cache, runs
the model, samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ..config import EngineConfig
from ..executor import DrawPlan, Int32Array, StepPlan, StepResult
from ..layers.batch import ForwardBatch
from ..layers.platform import Platform
from ..models.model import LastTokens, LayerInputs, Model
from ..ragged import places
from ..request import TokenLogprobs
from ..sampling.pooling import Pools
from ..sampling.sampler import Sampler
from ..sampling.verification import by_entry, gained, positions_of
from .device.warmup_plans import warmup_plans
from .drafter.device_drafter import Computed, DeviceDrafter
from .model.new_cache import NewCache, private_cache
from .table.batch import make_batch, num_sampled
from .table.known_positions import at_known_positions, with_at_most

SCORED_AT_ONCE = 256
"""Prompt positions whose logits exist at the same time."""
HeldRow = tuple[torch.Tensor, range]
"""Logits [P, V] of a step, and which of them are the row's."""
Forward = Callable[..., torch.Tensor]
"""As `Model.forward`, with a batch, the KV cache, ends and inputs."""
NOTHING = StepResult(token_ids=np.empty((0, 1), np.int32), num_tokens=np.empty(0, np.int32))
"""The result of a step that samples for no row."""


class Runner:
    """Plans are computed one after another; a sampled token is in the table before the next plan
    reads it."""

    def __init__(
        self,
        decoder: Model,
        config: EngineConfig,
        kv_dtype: torch.dtype,
        platform: Platform,
        sampler: Sampler | None = None,
        new_cache: NewCache = private_cache,
        forward: Forward | None = None,
    ) -> None:
        """`sampler` is there where the model's logits are no whole rows; `forward` computes what
        the model's own forward pass computes, in another way."""
        model = decoder.config
        max_blocks = -(-config.max_model_len // config.block_size)
        self._decoder = decoder
        self._config = config
        self._forward: Forward = forward or decoder.forward
        self._block_size = config.block_size
        self._device = platform.device
        self._sampler = sampler or Sampler(config.num_rows, platform.sampling, platform.device)
        self._pools = Pools()
        # One position more than a request has: a sampled token is written even when it is the last.
        self._token_ids = torch.zeros(config.num_rows, config.max_model_len + 1, dtype=torch.int32)
        self._block_ids = torch.zeros(config.num_rows, max_blocks, dtype=torch.int32)
        self._num_prompt = np.zeros(config.num_rows, np.int32)
        self._num_known = np.zeros(config.num_rows, np.int32)
        """Tokens of each row, sampled ones included."""
        self._held: dict[int, HeldRow] = {}
        """By table row, for a draw."""
        shape = (
            model.num_layers,
            2,
            config.num_blocks,
            model.num_kv_heads,
            config.block_size,
            model.head_dim,
        )
        self._kv_cache = new_cache(shape, kv_dtype, self._device)
        self._drafter: DeviceDrafter | None = None

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int32 [rows, length] and blocks int32 [rows, max blocks] of each row."""
        return self._token_ids, self._block_ids

    @property
    def kv_caches(self) -> list[torch.Tensor]:
        """[layers, 2, num_blocks, Hk, block_size, D] each: of the served model, and of what
        drafts."""
        return [self._kv_cache, *(self._drafter.kv_caches if self._drafter is not None else ())]

    def draft_by(self, drafter: DeviceDrafter) -> None:
        """Has tokens guessed from now on; to be called before the first plan. The drafter is over
        `tables`."""
        self._drafter = drafter

    @property
    def can_draft(self) -> bool:
        return self._drafter is not None

    def rehearse(self) -> float:
        """Computes a few plans for what they touch, and forgets them. Returns the seconds of a step
        of the whole budget at their pace."""
        first, *plans = warmup_plans(self._config, self._decoder.config.vocab_size)
        assert isinstance(first, StepPlan)
        self.run(first)
        # The first touches what the others find.
        start = time.perf_counter()
        num_tokens = 0
        for plan in plans:
            if isinstance(plan, StepPlan):
                self.run(plan)
                num_tokens += plan.num_tokens
            else:
                self.draw(plan)
        return (time.perf_counter() - start) / num_tokens * self._config.max_num_batched_tokens

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        plan = at_known_positions(plan, self._num_known)
        drafter = self._drafter
        self._prepare_rows(plan)
        if drafter is not None:
            plan = with_at_most(plan, drafter.most)
            self._guess(plan, drafter)
        batch = make_batch(plan, self._token_ids, self._block_ids, self._block_size).to(
            self._device
        )
        ends = self._ends(plan, batch)
        inputs = LayerInputs(drafter.layers) if drafter is not None and drafter.layers else None
        hidden = self._forward(batch, self._kv_cache, ends=ends, inputs=inputs)
        if drafter is not None:
            final = hidden if ends is not None or drafter.looks_at_all else hidden[batch.sampled]
            drafter.see(_computed(plan, final, inputs))
        prompt_logprobs = {
            row: self._score_prompt(plan, hidden, row) for row in plan.prompt_logprob_rows
        }
        vectors = self._pools.take(plan, hidden)
        result = NOTHING
        if len(batch.sampled):
            logits = self._decoder.logits(hidden[batch.sampled] if ends is None else hidden)
            if plan.holds.any():
                logits = self._hold(plan, logits)
            if plan.samples.any():
                num_positions = num_sampled(plan)[plan.samples]
                first = (plan.starts + plan.counts)[plan.samples] - num_positions + 1
                outputs = plan.output_indices[plan.samples]
                result = self._sample(
                    logits, plan.rows[plan.samples], first, num_positions, outputs
                )
        if plan.num_drafts is not None and plan.draft_ids is None:
            result = replace(result, num_drafts=plan.num_drafts[plan.samples])
        embeddings = {row: vector.cpu().numpy().tobytes() for row, vector in vectors.items()}
        return replace(result, prompt_logprobs=prompt_logprobs, embeddings=embeddings)

    @torch.inference_mode()
    def draw(self, plan: DrawPlan) -> StepResult:
        logits = _joined([self._held.pop(row) for row in plan.rows.tolist()])
        num_positions = positions_of(plan.num_drafts, len(plan.rows))
        masks = plan.masks[places(num_positions), np.repeat(plan.rows, num_positions)]
        return self._sample(
            logits, plan.rows, plan.positions, num_positions, plan.output_indices, masks
        )

    def _guess(self, plan: StepPlan, drafter: DeviceDrafter) -> None:
        """Writes guesses into the table where the plan leaves them to the executor. They are drawn
        as the row's own tokens are, with the same noise, which makes them equal oftener than two
        draws of their own would be."""
        num_drafts = _num_drafts(plan)
        ends = plan.starts + plan.counts - num_drafts
        wanted = num_drafts if plan.draft_ids is None else np.zeros_like(num_drafts)
        drafter.follow(plan.rows, plan.starts, ends, wanted, self._draw_guesses)

    def _draw_guesses(self, logits: torch.Tensor, rows: Int32Array, at: Int32Array) -> Int32Array:
        outputs = at - self._num_prompt[rows]
        return self._sampler.draw(
            logits, rows, outputs, lambda i: self._outputs(int(rows[i]), int(at[i]))
        )

    def _ends(self, plan: StepPlan, batch: ForwardBatch) -> LastTokens | None:
        """Where nobody looks at every token of the plan."""
        looks_at_all = plan.looks_at_all or (
            self._drafter is not None and self._drafter.looks_at_all
        )
        if looks_at_all or len(batch.sampled) == plan.num_tokens:
            return None
        return self._decoder.ends(batch, num_sampled(plan))

    def _hold(self, plan: StepPlan, logits: torch.Tensor) -> torch.Tensor:
        """Keeps the logits that are drawn from later; returns those that are sampled now."""
        num_positions = num_sampled(plan)
        first = np.cumsum(num_positions) - num_positions
        held = (
            plan.rows[plan.holds].tolist(),
            first[plan.holds].tolist(),
            num_positions[plan.holds].tolist(),
        )
        self._held |= {
            row: (logits, range(at, at + count)) for row, at, count in zip(*held, strict=True)
        }
        return logits[torch.from_numpy(np.repeat(plan.samples, num_positions)).to(self._device)]

    def _sample(
        self,
        logits: torch.Tensor,
        rows: Int32Array,
        first: Int32Array,
        num_positions: Int32Array,
        output_indices: Int32Array,
        masks: Int32Array | None = None,
    ) -> StepResult:
        """logits [P, V] and masks [P, words] of the num_positions of each row, whose first token
        goes to position `first`."""
        place = places(num_positions)
        each = np.repeat(rows, num_positions)
        at = np.repeat(first, num_positions) + place
        sampled, scores = self._sampler.sample(
            logits,
            each,
            np.repeat(output_indices, num_positions) + place,
            lambda i: self._outputs(int(each[i]), int(at[i])),
            masks,
        )
        token_ids = self._token_ids.numpy()
        found = gained(sampled, token_ids[each, at], num_positions)
        i, column = found.places
        token_ids[rows[i], first[i] + column] = found.token_ids[i, column]
        self._num_known[rows] = first + found.num_tokens
        logprobs = by_entry(found, num_positions, scores)
        return StepResult(token_ids=found.token_ids, num_tokens=found.num_tokens, logprobs=logprobs)

    def _update_table(self, plan: StepPlan) -> None:
        for row in plan.released:
            self._held.pop(row, None)
        for admitted in plan.admitted:
            self._token_ids[admitted.row, : len(admitted.token_ids)] = torch.from_numpy(
                admitted.token_ids
            )
            self._block_ids[admitted.row] = 0
            self._num_prompt[admitted.row] = admitted.num_prompt_tokens
            self._num_known[admitted.row] = len(admitted.token_ids)
            self._sampler.admit(admitted)
            self._pools.admit(admitted)
            if self._drafter is not None:
                self._drafter.seat(admitted.row)
        self._block_ids.numpy()[plan.block_rows, plan.block_indices] = plan.block_ids
        if plan.num_drafts is not None and plan.draft_ids is not None:
            count = plan.num_drafts
            ends = plan.starts + plan.counts
            rows = np.repeat(plan.rows, count)
            at = np.repeat(ends - count, count) + places(count)
            self._token_ids.numpy()[rows, at] = plan.draft_ids

    def _prepare_rows(self, plan: StepPlan) -> None:
        """Does what a plan wants done before anything is computed."""
        self._update_table(plan)
        self._copy_blocks(plan.copied_blocks)

    def _copy_blocks(self, pairs: Int32Array) -> None:
        for cache in self.kv_caches if len(pairs) else ():
            cache[:, :, _index(pairs[:, 1])] = cache[:, :, _index(pairs[:, 0])]

    def _outputs(self, row: int, length: int) -> Int32Array:
        token_ids: Int32Array = self._token_ids[row, self._num_prompt[row] : length].numpy()
        return token_ids

    def _score_prompt(self, plan: StepPlan, hidden: torch.Tensor, row: int) -> list[TokenLogprobs]:
        """Log probabilities of the prompt tokens after the positions that the row computes."""
        i = int(np.flatnonzero(plan.rows == row)[0])
        start = int(plan.starts[i])
        first = int(plan.counts[:i].sum())
        count = min(int(plan.counts[i]), int(self._num_prompt[row]) - 1 - start)
        next_ids = self._token_ids[row, start + 1 : start + 1 + count].to(self._device)
        entries: list[TokenLogprobs] = []
        for at in range(0, count, SCORED_AT_ONCE):
            end = min(at + SCORED_AT_ONCE, count)
            logits = self._decoder.logits(hidden[first + at : first + end])
            entries += self._sampler.score_prompt(logits, next_ids[at:end], row)
        return entries


def _num_drafts(plan: StepPlan) -> Int32Array:
    return np.zeros(len(plan.rows), np.int32) if plan.num_drafts is None else plan.num_drafts


def _computed(plan: StepPlan, final: torch.Tensor, inputs: LayerInputs | None) -> Computed:
    return Computed(
        rows=plan.rows,
        starts=plan.starts,
        counts=plan.counts,
        num_drafts=_num_drafts(plan),
        num_sampled=num_sampled(plan),
        final=final,
        inputs={} if inputs is None else inputs.states,
    )


def _index(values: Int32Array) -> torch.Tensor:
    return torch.from_numpy(values).long()


def _joined(held: list[HeldRow]) -> torch.Tensor:
    """Logits [P, V] of all positions; as they were computed where all of a step are drawn
    together."""
    logits = held[0][0]
    wanted = [i for _, positions in held for i in positions]
    if wanted == list(range(len(logits))) and all(each is logits for each, _ in held):
        return logits
    return torch.cat([each[positions.start : positions.stop] for each, positions in held])
