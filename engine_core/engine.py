"""The engine: requests in, token ids out, one step at a time.

Owns the order of a step and the steps in flight. Knows nothing about text, sessions or processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .config import EngineConfig
from .executor import Executor, Int32Array, ReleasableMemory, StepResult
from .kv.block_source import BlockSource
from .kv.disk.block_files import BlockFiles
from .kv.peer_link import FromLink, PeerLink
from .kv.prefetch import NewPrefetch
from .kv.tiers import Tiers
from .request import FinishReason, NewRequest
from .scheduling.forced_tokens import ForcedTokens
from .scheduling.in_flight import StepsInFlight
from .scheduling.scheduler import Scheduler
from .scheduling.speculation.no_drafts import NoDrafts
from .scheduling.speculation.speculator import Speculator
from .scheduling.step_builder import PlannedStep
from .scheduling.step_results import ResultHandler
from .scheduling.table.request_state import RequestState, finished_at_once
from .sleep import Sleep, SleepState
from .step_output import EngineLoad, Finished, MaskReport, StepOutput
from .waits_for import WaitsFor

NO_MASKS: Int32Array = np.empty((1, 0, 0), np.int32)
"""Masks of an engine without grammars."""


AWAIT_THE_DEVICE = (WaitsFor.DEVICE, WaitsFor.MASKS, WaitsFor.BLOCKS)
"""Waits that the end of a step on the device may end."""
REPLACED = "the weights of the model were replaced"
STORING_SECONDS = 0.005
"""Seconds between two looks of an idle engine at blocks that are being stored, or found again."""


class Engine:
    """One engine: schedules, submits and settles steps. Not thread-safe: one loop adds, cancels and
    steps."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        masks: Int32Array = NO_MASKS,
        speculator: Speculator | None = None,
        disk_files: BlockFiles | None = None,
        peer_link: PeerLink | None = None,
        sources: Sequence[BlockSource] = (),
        report_masks: Callable[[MaskReport], None] = lambda report: None,
        memory: ReleasableMemory | None = None,
        num_held_bytes: int = 0,
    ) -> None:
        """`masks`, int32 [positions, rows of the table, words], holds the masks of requests that
        have a grammar; others fill it. Positions are one more than a row's drafts. `disk_files` is
        the place of blocks on a disk; `peer_link` leads to other engines; `sources` are asked
        beside the engine's own tiers, which come first. `report_masks` is called in the middle of a
        step, as soon as there is something to report to those who fill masks: the device waits for
        them. It must not call the engine. `memory` is what the executor gives back while the engine
        sleeps; None: nothing. `num_held_bytes`: of weights that a holder has, while it is awake."""
        self._config = config
        self._clock = clock
        self._tiers = Tiers(config, executor, disk_files, peer_link, clock)
        self._scheduler = Scheduler(
            config,
            clock,
            masks,
            NoDrafts(config.num_rows) if speculator is None else speculator,
            self._tiers,
            sources=sources,
            prefill_seconds=lambda: executor.prefill_seconds,
            copies_blocks=executor.copies_blocks,
        )
        self._results = ResultHandler(self._scheduler, clock, report_masks)
        self._requests: dict[int, RequestState] = {}
        self._in_flight = StepsInFlight(executor, config.async_depth)
        self._scheduler.blocks.open_leases(self._tiers, self._in_flight)
        self._output = StepOutput(step=0)
        self._forced = ForcedTokens(self._scheduler.rows)
        self._launched: list[PlannedStep] = []
        self._has_output = False
        """Whether a settled step has output that the caller has not taken."""
        self._num_added = 0
        self._waits_for = WaitsFor.WORK
        """Result of the last `settle`, or NOTHING once the engine was called; see `waits_for`."""
        self._has_held_back = False
        """Whether the last step might have computed something, had it not been better to wait."""
        self._sleep = Sleep(memory, clock, num_held_bytes)

    def step(self) -> StepOutput | None:
        """Schedules and submits a step; retires and settles the oldest step in flight when it is
        due. Returns output if there is any. Waits for the executor only if no further step may be
        in flight or none can be planned before results are known, and never while other engines may
        ask for blocks."""
        self.launch()
        self.settle()
        return self.take_output()

    def launch(self) -> None:
        """The first half of `step`: the device is at work when it returns. `settle` has to
        follow."""
        if not self._sleep.is_awake:
            self._fall_asleep()
            return
        self._scheduler.seating.promote()
        self._refuse_late()
        self._scheduler.blocks.advance_prefetches(self._scheduler.seating)
        # A draw waits for late masks as a step does: rows that are drawn apart once would be drawn
        # apart at every token. The draw and the plan use one reading of the clock; otherwise rows
        # whose masks arrive in between would be left out of both. What a draw does not need is done
        # after its launch.
        self._has_held_back = self._scheduler.rows.held.hold_back(
            is_in_flight=len(self._in_flight) > 0
        )
        can_draw = self._in_flight.has_room_for_draw and not self._has_held_back
        draw = self._submit(self._scheduler.draw()) if can_draw else None
        self._forced.pass_on()
        # If the device waited for masks, the draw's tokens have to be known first: the next masks
        # are made from them. If it computes a step even now, the next one is launched right behind
        # the draw.
        step = (
            self._submit(self._plan_step())
            if draw is None or self._in_flight.is_computing
            else None
        )
        self._launched = [planned for planned in (draw, step) if planned is not None]

    def settle(self) -> WaitsFor:
        """Runs the second half of `step`, whose output `take_output` returns. Returns what the next
        step waits for."""
        planned = self._launched
        self._launched = []
        retired = self._retire(planned)
        for step, result in retired:
            self._results.settle(step, result, self._output)
            self._close(step)
            self._has_output |= not step.is_silent
        has_settled_loads = self._scheduler.settle_loads()
        is_lending = self._lend()
        self._scheduler.blocks.launch()
        has_moved = bool(planned or retired or has_settled_loads)
        self._waits_for = self._awaited(has_moved=has_moved, is_lending=is_lending)
        return self.waits_for

    @property
    def waits_for(self) -> WaitsFor:
        """Event that the next step waits for, as of now: the device may be done since `settle`."""
        if self._waits_for in AWAIT_THE_DEVICE and self._in_flight.is_oldest_ready:
            return WaitsFor.NOTHING
        if self._waits_for is WaitsFor.WORK and self.pause_seconds is not None:
            return WaitsFor.TIME
        return self._waits_for

    def _awaited(self, *, has_moved: bool, is_lending: bool) -> WaitsFor:
        if self._sleep.state is SleepState.ASLEEP:
            return WaitsFor.WORK
        num_in_flight = len(self._in_flight)
        if self._sleep.state is SleepState.FALLING_ASLEEP and not num_in_flight:
            return WaitsFor.NOTHING if has_moved else WaitsFor.BLOCKS
        if num_in_flight and not has_moved:
            return WaitsFor.BLOCKS if self._moves_blocks(is_lending) else WaitsFor.DEVICE
        is_held_back = self._scheduler.rows.held.hold_back(is_in_flight=num_in_flight > 0)
        if num_in_flight <= 1 and is_held_back:
            return WaitsFor.MASKS
        if has_moved or num_in_flight or self._has_held_back:
            return WaitsFor.NOTHING
        awaits_load = self._scheduler.blocks.is_load_awaited(self._scheduler.seating)
        return WaitsFor.BLOCKS if awaits_load or is_lending else WaitsFor.WORK

    def _moves_blocks(self, is_lending: bool) -> bool:
        """Whether blocks are being sent or received: a step looks at them even while the device
        computes."""
        return is_lending or self._scheduler.blocks.are_loading

    def _lend(self) -> bool:
        """Continues copies of blocks by other engines. Returns whether more work is due soon."""
        leases = self._tiers.leases
        return leases is not None and (self._scheduler.lend(leases) or leases.is_busy)

    def add(self, new: NewRequest) -> None:
        """Adds a request. The next step reports the end of a request that can never be served
        (ERROR), and of one whose resumed answer is already complete."""
        assert new.key not in self._requests
        request = RequestState.enter(new, self._config, arrival=self._num_added, now=self._clock())
        self._num_added += 1
        self._waits_for = WaitsFor.NOTHING
        if (finished := finished_at_once(new, request, self._config)) is not None:
            self._output.finishes.append(finished)
            return
        if not self._scheduler.adapters.knows(new.adapter):
            error = "the adapter was unloaded before the request came"
            self._output.finishes.append(
                Finished(key=new.key, reason=FinishReason.ERROR, num_output_tokens=0, error=error)
            )
            return
        self._requests[new.key] = request
        if new.holder is not None:
            self._scheduler.blocks.expect(request, new.holder)
        self._scheduler.enqueue(request)
        self._scheduler.blocks.end_prefetches_of(request)

    def add_adapter(self, digest: bytes, num_ranks: int) -> None:
        """Makes an adapter available to requests. The executor keeps it in host memory; it takes
        `num_ranks` ranks of a slot."""
        self._scheduler.adapters.add(digest, num_ranks)

    def remove_adapter(self, digest: bytes) -> bool:
        """Forgets an adapter, unless requests have it. Whether it is forgotten."""
        if any(request.adapter == digest for request in self._requests.values()):
            return False
        return self._scheduler.adapters.remove(digest)

    def prefetch(self, new: NewPrefetch) -> None:
        """Begins to pull blocks of a prompt that another engine computes; ignored by an engine that
        pulls no blocks."""
        self._waits_for = WaitsFor.NOTHING
        self._scheduler.blocks.prefetch(new)

    def end_prefetch(self, number: int) -> None:
        """Ends a prefetch if it has not ended yet. Blocks that have arrived stay cached."""
        self._waits_for = WaitsFor.NOTHING
        self._scheduler.blocks.end_prefetch(number)

    def bound_prompts(self, seconds: float) -> None:
        """Bounds the seconds for which a step computes prompts; 0: as many tokens as its budget
        has."""
        self._scheduler.seating.bound_prompts(seconds)

    def take(self, message: FromLink) -> None:
        """Takes a message of the link to other engines."""
        self._waits_for = WaitsFor.NOTHING
        self._tiers.take(message)

    def sleep(self, call: int = 0) -> None:
        """Begins to put the engine to sleep, which later steps complete: it plans no more steps,
        preempts running requests, and releases its memory when no step and no block transfer is in
        flight. New requests wait. `call`: number by which the load report names this call."""
        self._sleep.begin(call)
        self._waits_for = WaitsFor.NOTHING

    def pause(self) -> None:
        """Puts the engine to sleep as `sleep` does, but keeps its memory."""
        self._sleep.pause()
        self._waits_for = WaitsFor.NOTHING

    def wake(self, call: int = 0) -> None:
        """Brings memory back, after which steps compute again. Preempted requests go on with the
        tokens that they would have had. Where the device lacks memory, the engine stays asleep and
        its load says why."""
        self._sleep.end(call)
        self._waits_for = WaitsFor.NOTHING

    def replace_weights(self, adopt: Callable[[], None], *, ends_requests: bool) -> None:
        """Has later steps computed with other weights, which `adopt` gives the executor. All cached
        blocks are dropped. Requests go on from the tokens that they have, or end. To be called
        while the engine sleeps or pauses; ends the pause."""
        assert self.is_asleep
        if ends_requests:
            for request in list(self._requests.values()):
                self._results.finish(request, FinishReason.REPLACED, self._output, error=REPLACED)
            self._requests.clear()
        self._scheduler.blocks.drop_cached()
        adopt()
        self._sleep.resume()
        self._waits_for = WaitsFor.NOTHING

    @property
    def is_asleep(self) -> bool:
        """Whether memory is given back: nothing may be launched."""
        return self._sleep.state is SleepState.ASLEEP

    def cancel(
        self,
        key: int,
        reason: FinishReason = FinishReason.CANCELLED,
        *,
        keeps_answer: bool = False,
    ) -> None:
        """Ends a request; a key that is not here has ended already. Row and blocks return with the
        steps in flight. `keeps_answer`: the next turn may go on from the answer, whose blocks wait
        for it as those of any other."""
        if (request := self._requests.pop(key, None)) is not None:
            self._waits_for = WaitsFor.NOTHING
            request.is_unwanted = reason is FinishReason.CANCELLED and not keeps_answer
            self._results.finish(request, reason, self._output)

    def add_credit(self, key: int, tokens: int) -> None:
        """Lets a request emit `tokens` more; a key that is not here has ended already."""
        if (request := self._requests.get(key)) is not None:
            self._waits_for = WaitsFor.NOTHING
            self._scheduler.seating.add_credit(request, tokens)

    def stall(self, key: int) -> None:
        """Marks a request whose credit is used up, so that waiting requests may preempt it. A key
        of an ended request is ignored."""
        if (request := self._requests.get(key)) is not None:
            self._waits_for = WaitsFor.NOTHING
            self._scheduler.seating.stall(request)

    def has_work(self) -> bool:
        """Whether a step would do anything. False also while every request waits for credit."""
        return self._waits_for is not WaitsFor.WORK

    def masks_filled(
        self,
        rows: list[int],
        tickets: list[int],
        output_indices: list[int],
        num_masks: list[int] | None = None,
    ) -> None:
        """Reports that `masks[:, rows[i]]` holds `num_masks[i]` masks (one without `num_masks`),
        from output `output_indices[i]` on, for the request that was given the ticket; see
        `MasksWanted`. They must not change until these outputs are known."""
        self._waits_for = WaitsFor.NOTHING
        counts = (
            np.ones(len(rows), np.int32) if num_masks is None else np.array(num_masks, np.int32)
        )
        self._scheduler.rows.held.note(
            np.array(rows), np.array(tickets), np.array(output_indices, np.int32), counts
        )

    def foresee(
        self,
        rows: list[int],
        tickets: list[int],
        output_indices: list[int],
        forced_ids: list[list[int]],
    ) -> None:
        """Says that grammars force the tokens forced_ids[i] from output output_indices[i] of the
        request that got the ticket on, as far as that is known."""
        self._waits_for = WaitsFor.NOTHING
        self._forced.note(rows, tickets, output_indices, forced_ids)

    def fail(self, key: int, error: str) -> None:
        """Ends a request whose mask cannot be made; a key that is unknown belongs to a request that
        has ended."""
        if (request := self._requests.pop(key, None)) is not None:
            self._waits_for = WaitsFor.NOTHING
            self._results.finish(request, FinishReason.UNFOLLOWABLE, self._output, error=error)

    def ask(self, keys: Iterable[int]) -> None:
        """Reports the end of requests that are neither waiting, running nor preempted here."""
        for key in keys:
            if key not in self._requests:
                self._waits_for = WaitsFor.NOTHING
                self._output.finishes.append(
                    Finished(key=key, reason=FinishReason.MISSING, num_output_tokens=0)
                )

    @property
    def pause_seconds(self) -> float | None:
        """How long an engine without work may sleep until blocks are stored or found, or a prefetch
        goes on; None: until it is called."""
        if self._scheduler.blocks.has_background_work:
            return STORING_SECONDS
        return self._scheduler.blocks.prefetch_pause

    @property
    def has_steps_in_flight(self) -> bool:
        """Whether a submitted step has not been retired."""
        return len(self._in_flight) > 0

    def load(self) -> EngineLoad:
        load = EngineLoad()
        self._results.describe(load)
        self._tiers.describe(load)
        self._scheduler.describe(load)
        self._sleep.describe(load)
        if load.can_sleep:
            load.tenants = self._scheduler.seating.weights_of_tenants()
        return load

    def close(self) -> None:
        """Ends loads that are open. To be called before the executor is closed, whose KV cache they
        fill; no step may follow."""
        self._scheduler.blocks.close()

    def cached_block_hashes(self) -> list[bytes]:
        """Hashes of cached blocks by the events so far: without blocks whose step has not
        retired."""
        unsaid = {
            block_hash
            for planned in self._in_flight
            for chain in planned.stored
            for block_hash in chain.hashes
        }
        return [
            block_hash
            for block_hash in self._scheduler.blocks.cached_hashes()
            if block_hash not in unsaid
        ]

    def _fall_asleep(self) -> None:
        """Goes on with falling asleep, at the border of a step: once none is in flight, requests
        are preempted; once the blocks that they leave are saved, memory is given back."""
        if self.is_asleep or len(self._in_flight):
            return
        self._scheduler.preempt_all()
        blocks = self._scheduler.blocks
        blocks.launch()
        if blocks.are_loading or self._tiers.are_saving:
            return
        if self._sleep.drops_cache:
            blocks.drop_cached()
        self._sleep.release()

    def _refuse_late(self) -> None:
        """Ends requests that wait and whose first token cannot come in time."""
        for request, seconds in self._scheduler.seating.late():
            del self._requests[request.key]
            error = f"a first token would come {seconds:.2f} s too late"
            self._results.finish(
                request, FinishReason.LATE, self._output, error=error, retry_seconds=seconds
            )

    def _submit(self, planned: PlannedStep | None) -> PlannedStep | None:
        if planned is not None:
            self._in_flight.submit(planned)
        return planned

    def _plan_step(self) -> PlannedStep | None:
        """Plans a step, unless enough are in flight or it is better to wait."""
        if self._has_held_back or not self._in_flight.has_room_for_step:
            return None
        planned = self._scheduler.schedule()
        # Blocks that the step overwrites may have to be copied first.
        self._scheduler.blocks.launch()
        if planned is not None and planned.masks_wanted is not None:
            self._results.report_masks(MaskReport(wanted=planned.masks_wanted))
        return planned

    def _retire(self, planned: list[PlannedStep]) -> list[tuple[PlannedStep, StepResult]]:
        """Retires the oldest step in flight if it is due, together with its draw if the step itself
        sampled nothing."""
        if not self._is_retirement_due(has_step=bool(planned) and not planned[-1].is_draw):
            return []
        retired = [self._in_flight.retire()]
        if not retired[0][0].sampled_rows.size and self._in_flight.is_oldest_draw:
            retired.append(self._in_flight.retire())
        return retired

    def _is_retirement_due(self, *, has_step: bool) -> bool:
        if len(self._in_flight) == 0:
            return False
        if self._tiers.leases is not None:
            # While this engine waits for its device, messages of other engines would wait too.
            return self._in_flight.is_oldest_ready
        if len(self._in_flight) == 1 and self._scheduler.rows.held.await_masks:
            # Waiting for the last one would keep the device waiting for masks that come meanwhile.
            return self._in_flight.is_oldest_ready
        return (
            not has_step or not self._in_flight.has_room_for_step or self._in_flight.is_oldest_ready
        )

    def _close(self, planned: PlannedStep) -> None:
        """Releases what a settled step kept: its masks and blocks."""
        self._scheduler.retire(planned.plan.step)
        self._output.step = planned.plan.step

    def take_output(self) -> StepOutput | None:
        """Takes the output of the last step; None: it has none."""
        output = self._output
        output.cache_events = self._scheduler.blocks.take_events()
        if not (self._has_output or output.finishes or output.cache_events):
            return None
        self._has_output = False
        for finished in output.finishes:
            self._requests.pop(finished.key, None)
        self._output = StepOutput(step=output.step)
        return output
