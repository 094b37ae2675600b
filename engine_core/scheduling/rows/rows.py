"""Rows of the request table: the requests that hold one, from when they take it until no step in
flight lists it.

A request that holds a row is running (until its known tokens are computed also prefilling), or it
leaves: it computes nothing more, but a launched step still lists its row. Knows nothing about
blocks, tenants and the order of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from ...config import EngineConfig
from ...executor import Int32Array
from ...step_output import EngineLoad
from ..speculation.speculator import Speculator
from ..table.masks import HeldRows, RowIndices
from ..table.request_state import RequestState
from ..table.request_table import RequestTable
from ..table.row_drafts import RowDrafts
from .pending_release import PendingRelease
from .pipeline_groups import row_groups
from .step_counts import StepCounts


class Rows:
    def __init__(
        self,
        config: EngineConfig,
        masks: Int32Array,
        speculator: Speculator,
        clock: Callable[[], float],
    ) -> None:
        """`masks`: int32 [positions, rows, words]."""
        assert speculator.max_drafts <= config.max_draft_tokens
        self.held = HeldRows(config.num_rows, masks, clock)
        drafts = RowDrafts(
            config.num_rows,
            speculator.needs_result,
            speculator.runs_ahead,
            is_on=speculator.max_drafts > 0,
        )
        self.table = RequestTable(config, self.held, drafts)
        self.speculator = speculator
        self.running: dict[int, RequestState] = {}
        """Keyed by key."""
        self.prefilling: dict[int, RequestState] = {}
        """Running requests whose known tokens are not all computed, by key."""
        self._groups = row_groups(config.num_groups, config.num_rows)
        self._leaving = PendingRelease()
        self._counts = StepCounts()
        self._num_seats = config.max_num_seqs
        self._planned_step = 0
        self.retired_step = 0
        """Steps up to this one are settled."""
        self._released: list[int] = []
        """Rows that came free since the last plan."""

    @property
    def num_free_seats(self) -> int:
        """Number of requests that can take a row now. A seat is free as soon as its request leaves,
        if a row of the table is."""
        return min(self.num_left_seats, len(self.table.free_rows))

    @property
    def num_left_seats(self) -> int:
        """Number of seats without a request, those included whose row has yet to return."""
        return self._num_seats - len(self.running)

    @property
    def num_decoding(self) -> int:
        return len(self.running) - len(self.prefilling)

    @property
    def has_leaving(self) -> bool:
        return bool(self._leaving)

    @property
    def leaving(self) -> Iterable[RequestState]:
        return self._leaving

    @property
    def num_preempted(self) -> int:
        """Number of preempted requests whose rows have yet to return."""
        return self._leaving.num_preempted

    @property
    def next_step(self) -> int:
        """Number of the plan that is composed next."""
        return self._planned_step + 1

    def turns(self) -> Iterator[None]:
        """Gives each group of rows its turn, the group after the last one first."""
        for _ in range(len(self._groups)):
            self._groups.advance()
            yield

    def has_turn(self, request: RequestState) -> bool:
        return self._groups.has_turn(request.row)

    def has_room(self, num_requests: int) -> bool:
        """Whether a request may take a row of the group whose turn it is, of `num_requests` that
        are shared out among the groups."""
        return self.num_free_seats > 0 and self._groups.has_room(num_requests)

    def decodable(self) -> RowIndices:
        """Rows of the group whose turn it is that can decode."""
        return self._groups.of_turn(self.table.decodable_rows())

    def prefilling_by_rank(self) -> list[RequestState]:
        return sorted(self.prefilling.values(), key=attrgetter("rank"))

    def seat(self, request: RequestState) -> None:
        """Gives a row to a request."""
        self._counts.begin(request)
        self.table.seat(request)
        self._groups.seat(request.row)
        self.speculator.seat(request)
        self.running[request.key] = self.prefilling[request.key] = request

    def start_decoding(self, request: RequestState) -> None:
        """Notes that all known tokens of a request are scheduled."""
        del self.prefilling[request.key]
        self.table.start_decoding(request)

    def leave(self, request: RequestState) -> bool:
        """Stops computing a request, whose row returns with the steps in flight. Returns whether
        known tokens were left to compute."""
        del self.running[request.key]
        self._groups.leave(request.row)
        self._counts.end(request)
        self.table.drafts.count(request)
        self.table.stop_decoding(request.row)
        self._leaving.push(request, self._planned_step)
        return self.prefilling.pop(request.key, None) is not None

    def returning(self) -> Iterator[RequestState]:
        """Takes requests that no step in flight lists; `vacate` is to follow for each."""
        return self._leaving.pop_until(self.retired_step)

    def vacate(self, request: RequestState) -> None:
        """Frees the row of a request that has left. A request that has not finished keeps its known
        tokens and its credit."""
        row = request.row
        known_ids = self.table.known_ids(row).copy()
        if not request.has_finished:
            request.token_ids = known_ids
            request.credit = int(self.table.credit[row])
            request.num_computed = 0
        self.table.drafts.count(request)
        self.speculator.vacate(row, known_ids)
        self.table.vacate(row)
        self._released.append(row)

    def note_step(self, num_requests: int) -> int:
        """Notes that a step of `num_requests` requests is planned; returns its number."""
        self._counts.note(num_requests)
        return self.note_draw()

    def note_draw(self) -> int:
        """Notes that a draw is planned; returns its number."""
        self._planned_step += 1
        return self._planned_step

    def take_released(self) -> list[int]:
        """Takes the rows that came free since the last plan."""
        released = self._released
        self._released = []
        return released

    def retire(self, step: int) -> None:
        """Notes that the steps up to this one are settled."""
        self.retired_step = step
        self.held.note_retired()

    @property
    def num_prefill_tokens(self) -> int:
        """Known tokens that running requests have still to compute."""
        return sum(
            request.num_tokens - request.num_computed for request in self.prefilling.values()
        )

    def describe(self, load: EngineLoad) -> None:
        load.num_running = len(self.running)
        load.num_waiting += self._leaving.num_unfinished
        load.num_prefill_tokens += self.num_prefill_tokens
        load.num_drafter_bytes = self.speculator.num_bytes
