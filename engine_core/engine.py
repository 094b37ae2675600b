"""The engine: requests in, token ids out, one step at a time.

Owns the order of a step and the steps in flight. Knows nothing about text, sessions or processes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executor import DrawPlan, Executor, Int32Array, StepPlan
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.request_state import RequestState
from headwater.engine_core.scheduler import Scheduler
from headwater.engine_core.settler import Settler
from headwater.engine_core.step_draft import PlannedStep
from headwater.engine_core.step_output import EngineLoad, Finished, StepOutput

PATIENCE_SECONDS = 0.001
"""That masks may be late before a step does without their rows."""
NO_MASKS: Int32Array = np.empty((0, 0), np.int32)
"""Of an engine without grammars."""


class Engine:
    """Not thread-safe: one loop adds, cancels and steps."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        masks: Int32Array = NO_MASKS,
    ) -> None:
        """`masks`, int32 [max_num_seqs, words], holds the masks of requests that have a grammar; others fill it."""
        self._config = config
        self._executor = executor
        self._swapper = executor.swapper
        self._clock = clock
        self._scheduler = Scheduler(config, clock, masks)
        self._settler = Settler(self._scheduler, clock)
        self._requests: dict[int, RequestState] = {}
        self._in_flight: deque[tuple[int, PlannedStep]] = deque()
        self._num_computing = 0
        """Of these, those that are no draws."""
        self._retired_at = -math.inf
        self._output = StepOutput(step=0)
        self._num_added = 0
        self._rise_at = 0.0
        # The last step had nothing to do, and nothing was said to the engine since.
        self._is_idle = True
        # The last step had nothing to do until blocks are back from host memory.
        self._awaits_blocks = False
        # The last step might have computed something, had it not been better to wait.
        self._has_held_back = False

    def step(self) -> StepOutput | None:
        """Schedules and submits a step, retires and settles the oldest in flight when its time has come.

        Returns what there is to say, if anything; waits for the executor only when as many steps are in flight as may
        be or nothing can be planned before results are known.
        """
        self._let_rise()
        if self._swapper is not None:
            self._scheduler.loaded(self._swapper.num_loaded)
        is_computing = bool(self._in_flight) and not self._executor.is_ready(self._in_flight[0][0])
        has_drawn = self._draw(is_computing)
        # Where the device had to wait for masks, whoever makes the next ones shall know the tokens before anything else
        # is launched; where it did not, the next step is launched right behind.
        has_computed = (is_computing or not has_drawn) and self._compute()
        retired = self._retire() if self._is_retirement_due(has_computed) else None
        if retired is not None and not self._output.keys and self._is_draw_next():
            # It was launched right behind: what it says need not be said apart.
            retired = self._retire()
        is_busy = bool(has_drawn or has_computed or retired or self._in_flight or self._has_held_back)
        self._awaits_blocks = self._scheduler.host.is_loading and not is_busy
        self._is_idle = not (is_busy or self._awaits_blocks)
        return self._take_output(retired)

    def _let_rise(self) -> None:
        """Once a second at most."""
        if self._scheduler.waiting.may_rise and (now := self._clock()) >= self._rise_at:
            self._rise_at = now + 1.0
            self._scheduler.waiting.rise(now)

    def add(self, new: NewRequest) -> None:
        """Takes a request. One that can never be served ends with ERROR, one whose resumed answer is whole with the
        reason that made it so; the next step says either."""
        assert new.key not in self._requests
        request = RequestState.enter(new, self._config, arrival=self._num_added, now=self._clock())
        self._num_added += 1
        self._is_idle = False
        if (finished := _finished_at_once(new, request, self._config)) is not None:
            self._output.finishes.append(finished)
            return
        self._requests[new.key] = request
        self._scheduler.enqueue(request)

    def cancel(self, key: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends a request; a key that is not here has ended already. Row and blocks return with the steps in flight."""
        if (request := self._requests.pop(key, None)) is not None:
            self._is_idle = False
            self._settler.finish(request, reason, self._output)

    def add_credit(self, key: int, tokens: int) -> None:
        """Lets a request emit `tokens` more; a key that is not here has ended already."""
        if (request := self._requests.get(key)) is not None:
            self._is_idle = False
            self._scheduler.add_credit(request, tokens)

    def stall(self, key: int) -> None:
        """Lets a request that has no credit, and gets none, make room for those that wait; a key that is not here has
        ended already."""
        if (request := self._requests.get(key)) is not None:
            self._is_idle = False
            self._scheduler.stall(request)

    def has_work(self) -> bool:
        """Whether a step would do anything. False also while every request waits for credit."""
        return not self._is_idle

    def masks_filled(self, rows: list[int], tickets: list[int], output_indices: list[int]) -> None:
        """Says that `masks[rows[i]]` is the mask of output output_indices[i] of whom got the ticket; see `MasksWanted`.
        It stays as it is until that output is known."""
        self._is_idle = False
        self._scheduler.table.note_masks(np.array(rows), np.array(tickets), np.array(output_indices, np.int32))

    def fail(self, key: int, error: str) -> None:
        """Ends a request whose mask cannot be made; a key that is not here has ended already."""
        if (request := self._requests.pop(key, None)) is not None:
            self._is_idle = False
            self._settler.finish(request, FinishReason.UNFOLLOWABLE, self._output, error=error)

    def ask(self, keys: Iterable[int]) -> None:
        """Says the end of those that are neither waiting nor running, preempted ones included: they are not here."""
        for key in keys:
            if key not in self._requests:
                self._is_idle = False
                self._output.finishes.append(Finished(key=key, reason=FinishReason.MISSING, num_output_tokens=0))

    @property
    def holds_back(self) -> bool:
        """Whether the next step would do nothing until masks or blocks come or the device is done: time to wait."""
        if self._awaits_blocks:
            return True
        return self._holds_back() and len(self._in_flight) <= 1 and not self._is_only_ready()

    def load(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_prefill_tokens=scheduler.num_prefill_tokens,
            num_used_blocks=scheduler.pool.num_used,
            num_total_blocks=scheduler.pool.num_usable,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.cache.num_queried_tokens,
            prefix_hits=scheduler.cache.num_hit_tokens,
            num_generated_tokens=self._settler.num_generated_tokens,
            num_used_host_blocks=scheduler.host.num_used_slots,
            num_total_host_blocks=scheduler.host.num_slots,
            num_swapped_out=scheduler.host.num_saved * self._config.block_size,
            num_swapped_in=scheduler.host.num_loaded * self._config.block_size,
        )

    def cached_block_hashes(self) -> list[bytes]:
        """What the events said so far add up to: blocks that wait for their step are not in it."""
        unsaid = {
            block_hash for _, planned in self._in_flight for chain in planned.stored for block_hash in chain.hashes
        }
        return [block_hash for block_hash in self._scheduler.pool.cached_hashes() if block_hash not in unsaid]

    def _draw(self, is_computing: bool) -> bool:
        """Launches the sampling of what is held and can be drawn now; while the device is busy, only of all that is
        held: what goes apart once would go apart at every token."""
        if len(self._in_flight) >= 2 * self._config.async_depth:
            return False
        if is_computing and self._scheduler.table.awaits_masks:
            return False
        drawn = self._scheduler.draw()
        if drawn is not None:
            assert isinstance(drawn.plan, DrawPlan)
            self._in_flight.append((self._executor.draw(drawn.plan), drawn))
        return drawn is not None

    def _compute(self) -> bool:
        """Launches a step, unless enough are in flight or it is better to wait."""
        self._has_held_back = self._holds_back()
        if self._num_computing == self._config.async_depth or self._has_held_back:
            return False
        planned = self._scheduler.schedule()
        # What the step writes to may have to be copied first.
        self._swap()
        if planned is None:
            return False
        assert isinstance(planned.plan, StepPlan)
        self._in_flight.append((self._executor.submit(planned.plan), planned))
        self._num_computing += 1
        self._output.masks_wanted = planned.masks_wanted
        return True

    def _swap(self) -> None:
        """Launches what the host tier wants copied."""
        if (plan := self._scheduler.host.take_plan()) is not None:
            assert self._swapper is not None
            self._swapper.swap(plan)

    def _holds_back(self) -> bool:
        """While the device is busy, and a moment longer, rows that wait for a mask may still join the next step: two
        steps of half the rows would take twice the time."""
        if not self._scheduler.table.awaits_masks:
            return False
        return bool(self._in_flight) or self._clock() < self._retired_at + PATIENCE_SECONDS

    def _is_retirement_due(self, has_computed: bool) -> bool:
        if not self._in_flight:
            return False
        if len(self._in_flight) == 1 and self._scheduler.table.awaits_masks:
            # Waiting for the last one would keep the device waiting for masks that come meanwhile.
            return self._executor.is_ready(self._in_flight[0][0])
        return (
            not has_computed
            or self._num_computing == self._config.async_depth
            or self._executor.is_ready(self._in_flight[0][0])
        )

    def _is_only_ready(self) -> bool:
        return len(self._in_flight) == 1 and self._executor.is_ready(self._in_flight[0][0])

    def _is_draw_next(self) -> bool:
        return bool(self._in_flight) and isinstance(self._in_flight[0][1].plan, DrawPlan)

    def _retire(self) -> PlannedStep:
        handle, planned = self._in_flight.popleft()
        self._num_computing -= isinstance(planned.plan, StepPlan)
        self._settler.settle(planned, self._executor.retire(handle), self._output)
        self._scheduler.retire(planned.plan.step)
        self._swap()
        self._output.step = planned.plan.step
        self._output.is_drawn = isinstance(planned.plan, DrawPlan)
        self._retired_at = self._clock()
        return planned

    def _take_output(self, retired: PlannedStep | None) -> StepOutput | None:
        output = self._output
        output.cache_events = self._scheduler.cache.take_events()
        is_told = retired is not None and not retired.is_silent
        if not (is_told or output.finishes or output.cache_events or output.masks_wanted):
            return None
        for finished in output.finishes:
            self._requests.pop(finished.key, None)
        output.load = self.load()
        self._output = StepOutput(step=output.step)
        return output


def _finished_at_once(new: NewRequest, request: RequestState, config: EngineConfig) -> Finished | None:
    """How a request ends that has nothing to compute, or none that fits."""
    reason, error, stop_token_id = None, "", None
    num_prompt, outputs, sampling = len(new.prompt_ids), new.output_ids, new.sampling
    if not new.prompt_ids:
        reason, error = FinishReason.ERROR, "the prompt has no tokens"
    elif num_prompt + min(sampling.max_tokens, 1) > config.max_model_len:
        reason = FinishReason.ERROR
        error = f"a prompt of {num_prompt} tokens leaves no room for an answer within {config.max_model_len}"
    elif outputs and outputs[-1] in sampling.stop_token_ids and len(outputs) > request.min_tokens:
        reason, stop_token_id = FinishReason.STOP, outputs[-1]
    elif outputs and request.num_tokens >= request.max_len:
        reason = FinishReason.LENGTH
    if reason is None:
        return None
    return Finished(
        key=new.key, reason=reason, num_output_tokens=len(outputs), stop_token_id=stop_token_id, error=error
    )
