"""The engine: requests in, token ids out, one step at a time.

Owns the order of a step and the steps in flight. Knows nothing about text, sessions or processes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from headwater.engine_core.config import EngineConfig
from headwater.engine_core.executors.executor import Executor
from headwater.engine_core.request import FinishReason, NewRequest
from headwater.engine_core.request_state import RequestState
from headwater.engine_core.scheduler import Scheduler
from headwater.engine_core.settler import Settler
from headwater.engine_core.step_draft import PlannedStep
from headwater.engine_core.step_output import EngineLoad, Finished, StepOutput


class Engine:
    """Not thread-safe: one loop adds, cancels and steps."""

    def __init__(
        self, config: EngineConfig, executor: Executor, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._executor = executor
        self._clock = clock
        self._scheduler = Scheduler(config, clock)
        self._settler = Settler(self._scheduler, clock)
        self._requests: dict[int, RequestState] = {}
        self._in_flight: deque[tuple[int, PlannedStep]] = deque()
        self._output = StepOutput(step=0)
        self._num_added = 0
        # The last step had nothing to do, and nothing was said to the engine since.
        self._is_idle = True

    def step(self) -> StepOutput | None:
        """Schedules and submits a step, retires and settles the oldest in flight when its time has come.

        Returns what there is to say, if anything; waits for the executor only when as many steps are in flight as may
        be or nothing can be planned before results are known.
        """
        planned = self._scheduler.schedule()
        if planned is not None:
            self._in_flight.append((self._executor.submit(planned.plan), planned))
        retired = self._retire() if self._is_retirement_due(planned) else None
        self._is_idle = planned is None and retired is None
        return self._take_output(retired)

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

    def has_work(self) -> bool:
        """Whether a step would do anything. False also while every request waits for credit."""
        return not self._is_idle

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
        )

    def cached_block_hashes(self) -> list[bytes]:
        """What the events said so far add up to: blocks that wait for their step are not in it."""
        unsaid = {
            block_hash for _, planned in self._in_flight for chain in planned.stored for block_hash in chain.hashes
        }
        return [block_hash for block_hash in self._scheduler.pool.cached_hashes() if block_hash not in unsaid]

    def _is_retirement_due(self, planned: PlannedStep | None) -> bool:
        if not self._in_flight:
            return False
        return (
            planned is None
            or len(self._in_flight) == self._config.async_depth
            or self._executor.is_ready(self._in_flight[0][0])
        )

    def _retire(self) -> PlannedStep:
        handle, planned = self._in_flight.popleft()
        self._settler.settle(planned, self._executor.retire(handle), self._output)
        self._scheduler.retire(planned.plan.step)
        self._output.step = planned.plan.step
        return planned

    def _take_output(self, retired: PlannedStep | None) -> StepOutput | None:
        output = self._output
        output.cache_events = self._scheduler.cache.take_events()
        if retired is None and not output.finishes and output.cache_events is None:
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
    elif outputs and outputs[-1] in sampling.stop_token_ids and len(outputs) > sampling.min_tokens:
        reason, stop_token_id = FinishReason.STOP, outputs[-1]
    elif outputs and request.num_tokens >= request.max_len:
        reason = FinishReason.LENGTH
    if reason is None:
        return None
    return Finished(
        key=new.key, reason=reason, num_output_tokens=len(outputs), stop_token_id=stop_token_id, error=error
    )
