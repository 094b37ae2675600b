"""Faults of one generation: whether it is tried again, which engines it avoids, and whether it runs
alone.

A request may have killed the engine that died. A generation that the engine ran is doubted until it
gets past the position at which it was.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from ..router.replica import Incarnation
from .cluster import Cluster
from .generation import Generation
from .stream_failure import Cause, PoisonRequest, StreamLost
from .timeline import Attempt

MAX_FAULTS = 3
"""Number of attempts that may end by a fault. A stage that leaves in order does not count."""


class FaultHistory:
    """Fault history of one generation, over all its attempts."""

    def __init__(self, cluster: Cluster, generation: Generation) -> None:
        self._cluster = cluster
        self._generation = generation
        self.failed: set[Incarnation] = set()
        """Engines that failed the generation."""
        self.lender: Incarnation | None = None
        """The engine that handed the generation over in the last attempt that started; it still
        holds its blocks."""
        self.is_doubted = False
        """Whether an engine died while it ran the generation, and the generation has not got any
        further since."""
        self._num_faults = 0
        self._doubted_on: Incarnation | None = None
        """The engine that runs the generation while it is doubted."""
        self._is_suspect = False
        """Whether the generation is a suspect, which is tried while no other suspect is."""
        self._end_trial: Callable[[], None] | None = None

    @property
    def is_on_trial(self) -> bool:
        """Whether the generation is tried as a suspect: no other suspect runs."""
        return self._end_trial is not None

    async def begin_trial(self) -> None:
        """Waits until no other suspect is tried. To be called before an attempt."""
        if self._is_suspect:
            self._end_trial = await self._cluster.migrations.alone(self._generation.model.key)

    def pass_trial(self) -> None:
        """Lets the next suspect be tried."""
        if self._end_trial is not None:
            self._end_trial()
            self._end_trial = None

    def dispatched(self, engine: Incarnation) -> None:
        if self.is_doubted:
            self._doubted_on = engine
            self._cluster.migrations.doubt(self._generation.model.key, engine)

    def got_further(self) -> None:
        """Notes that a choice is past the position at which an engine died, or has ended."""
        if all(choice.is_past_doubt for choice in self._generation.unfinished):
            self.is_doubted = self._is_suspect = False
            self.end_doubt()
            self.pass_trial()

    def end_doubt(self) -> None:
        """Notes that the generation got further on its engine, or left while the engine lived."""
        if self._doubted_on is not None:
            self._cluster.migrations.trust(self._generation.model.key, self._doubted_on)
            self._doubted_on = None

    def consider(self, loss: StreamLost) -> None:
        """Raises the error that ends the generation, if no further attempt follows the lost one."""
        generation = self._generation
        cause = loss.cause
        attempt = generation.timeline.attempts[-1]
        fields = {
            "request_id": generation.request.caller.request_id,
            "replica": attempt.decision.replica_id,
        }
        if cause is Cause.ENGINE_GONE:
            # The request stays counted as doubted, for the other requests that were there when the
            # engine died.
            if self._doubted_on is not None:
                self._cluster.migrations.died(generation.model.key, self._doubted_on)
            self._doubted_on = None
            if self._is_to_blame(attempt):
                structlog.get_logger().error(
                    "poison request", attempts=generation.attempt, **fields
                )
                raise PoisonRequest("engines die of the request; it is not tried again")
            self._suspect(attempt)
        self.end_doubt()
        self._num_faults += loss.is_fault
        if self._num_faults == MAX_FAULTS:
            raise loss
        if cause.is_suspicion and not self._cluster.migrations.is_excused():
            structlog.get_logger().warning(
                "migration refused: too many on suspicion", cause=cause.value, **fields
            )
            raise loss
        if cause is Cause.HANDED_OVER:
            self.lender = attempt.decision.incarnation
            if attempt.decision.hands_over:
                # The engine left as planned: that is no fault, and the engine may take the request
                # back where no other is left.
                self._cluster.metrics.hand_overs.add()
                return
        elif attempt.start is not None:
            # What that engine gave away long ago it may have forgotten. The index knows.
            self.lender = None
        if cause.is_of_engine:
            self.failed.add(attempt.decision.incarnation)
        self._cluster.metrics.retries.add()
        if generation.has_begun:
            self._cluster.metrics.migrations.add(cause.value)
            structlog.get_logger().info(
                "migration", cause=cause.value, tokens=generation.num_output_tokens, **fields
            )

    def _suspect(self, attempt: Attempt) -> None:
        # A generation that has tokens, also of an earlier engine, goes on at once, unless that
        # failed before.
        self._is_suspect = self.is_doubted or not (
            attempt.start is not None or self._generation.has_begun
        )
        if not self.is_doubted:
            for choice in self._generation.unfinished:
                choice.doubt()
        self.is_doubted = True

    def _is_to_blame(self, attempt: Attempt) -> bool:
        """Whether a second engine died at the same place of the answer and ran no other doubted
        generation, of this gateway or another one."""
        migrations = self._cluster.migrations
        engine = attempt.decision.incarnation
        if not self.is_doubted or migrations.doubts.are_elsewhere(engine):
            return False
        return attempt.was_alone or migrations.num_doubted(engine) == 1
