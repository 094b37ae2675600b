"""The turns of a request's choices. Choices enter the gateway's queue one at a time, each with its
part of its tenant's share, and other requests pass between them.

Knows the queue and the shares of tenants; knows nothing about what a choice computes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ..tenancy.entrance import Entrance
from ..tenancy.tenants import Tenant
from ..tenancy.virtual_time import Share, VirtualTime
from .admission import Admission, Turn
from .model_queue import NO_TERMS, Terms

ChoiceT = TypeVar("ChoiceT", bound=Hashable)


class Part(NamedTuple):
    """Tokens that choices are given. The first choice of a prompt gets the prompt as well."""

    uncached: int
    output: int
    cached: int = 0


class Place(NamedTuple):
    """The place of a prompt's choices in the queue."""

    tenant: Tenant
    tier: int
    model_key: str
    num_prompt_tokens: int
    num_uncached: int | None = None
    """Prompt tokens that a replica will probably have to compute; None: all."""
    terms: Terms = NO_TERMS

    @property
    def queue(self) -> str:
        """Name of the queue in which its turn is decided by virtual time."""
        return f"{self.model_key}:{self.tier}"


class Waited(NamedTuple):
    """How a turn was given."""

    policy: str = ""
    fcfs_seconds: float = 0.0
    """Wait in order of arrival, as far as one can tell."""


@dataclass(slots=True, eq=False)
class _Held(Generic[ChoiceT]):
    """The turn and the share that choices which began together hold until the last of them has
    ended."""

    choices: Sequence[ChoiceT]
    num_running: int
    has_prompt: bool
    num_choices: int
    turn: Turn
    share: Share


class PromptTurns(Generic[ChoiceT]):
    """The turns of one prompt's choices. `guess` predicts the tokens of choices, `cost` is what
    they were given."""

    def __init__(
        self,
        admission: Admission,
        fair: VirtualTime,
        entrance: Entrance,
        place: Place,
        choices: Sequence[ChoiceT],
        guess: Callable[[Sequence[ChoiceT], bool], Part],
        cost: Callable[[Sequence[ChoiceT], bool], Part],
    ) -> None:
        self._admission = admission
        self._fair = fair
        self._entrance = entrance
        self._place = place
        self._guess = guess
        self._cost = cost
        self._waiting = deque(choices)
        self._held: dict[ChoiceT, _Held[ChoiceT]] = {}
        self.waited = Waited()
        """How its first turn was given."""
        self._early_share: Share | None = None
        """Share of choices that have not entered the queue."""
        self._has_first = self._is_started = False

    @property
    def are_all_given(self) -> bool:
        return not self._waiting

    def has(self, choice: ChoiceT) -> bool:
        """Whether the choice has its turn."""
        return choice in self._held

    def virtual_time(self, choices: Sequence[ChoiceT]) -> float:
        """Time at which choices began, in their tenant's virtual time; the earliest of several."""
        return min(
            (self._held[each].share.virtual_time for each in choices if each in self._held),
            default=0.0,
        )

    def first_share(self, *, together: bool) -> float:
        """Takes the share of the first choice, or of all that begin together, before it enters the
        queue. Returns the virtual time at which it begins."""
        self._early_share = self._share(self._waiting if together else [self._waiting[0]])
        return self._early_share.virtual_time

    async def next(self) -> list[ChoiceT]:
        """Waits for the turn of the next choice. Later choices that need not wait are returned with
        it."""
        given = await self._begin(1, 1)
        while self._waiting and (turn := self._along()) is not None:
            given.append(self._waiting[0])
            self._give(given[-1:], 1, turn, self._share(given[-1:]))
        return given

    async def together(self, num_choices: int) -> list[ChoiceT]:
        """Waits for a turn of all choices, which count as `num_choices`."""
        return await self._begin(len(self._waiting), num_choices)

    def sent(self) -> None:
        """Notes that the prompt was sent to a replica."""
        for held in self._held.values():
            held.turn.sent()

    def started(self) -> None:
        """Notes that the prompt is being computed."""
        self._is_started = True
        for held in self._held.values():
            held.share.started()
            held.turn.started()

    def ended(self, choice: ChoiceT) -> None:
        """Notes that the choice has ended; its turn is free for another one."""
        held = self._held.pop(choice, None)
        if held is not None:
            held.num_running -= 1
            if not held.num_running:
                self._release(held)

    def release(self) -> None:
        """Gives all turns back: the request is over."""
        if self._early_share is not None:
            _drop(self._early_share)
            self._early_share = None
        for choice in list(self._held):
            self.ended(choice)

    async def _begin(self, count: int, num_choices: int) -> list[ChoiceT]:
        """Takes the next `count` choices through the entrance and the queue, where they count as
        `num_choices`."""
        place = self._place
        entrance = self._entrance
        await entrance.enter(num_choices)
        choices = list(itertools.islice(self._waiting, count))
        share = self._early_share or self._share(choices)
        self._early_share = None
        num_uncached = place.num_prompt_tokens if place.num_uncached is None else place.num_uncached
        num_tokens = 0 if self._has_first else num_uncached
        try:
            turn = await self._admission.take(
                place.tier,
                share.virtual_time,
                place.model_key,
                place.tenant.key,
                num_tokens,
                num_choices,
                msgspec.structs.replace(place.terms, cost=share.cost),
            )
        except BaseException:
            _drop(share)
            entrance.left(num_choices)
            raise
        finally:
            entrance.let_next()
        if not self._has_first:
            self.waited = Waited(turn.policy, turn.fcfs_seconds)
        self._give(choices, num_choices, turn, share)
        return choices

    def _along(self) -> Turn | None:
        if not self._entrance.has_room(1):
            return None
        turn = self._admission.try_take(self._place.model_key, self._place.tenant.key)
        if turn is not None:
            self._entrance.come_along()
        return turn

    def _share(self, choices: Sequence[ChoiceT]) -> Share:
        part = self._guess(choices, not self._has_first)
        return self._fair.request(
            self._place.tenant, part.uncached, part.output, queue=self._place.queue
        )

    def _give(self, choices: list[ChoiceT], num_choices: int, turn: Turn, share: Share) -> None:
        held = _Held(choices, len(choices), not self._has_first, num_choices, turn, share)
        if self._has_first:
            # The choice waits for a seat, not for its prompt.
            turn.started()
        if self._is_started:
            share.started()
        self._has_first = True
        for choice in choices:
            self._waiting.popleft()
            self._held[choice] = held

    def _release(self, held: _Held[ChoiceT]) -> None:
        part = self._cost(held.choices, held.has_prompt)
        held.share.ended(uncached=part.uncached, cached=part.cached, output=part.output)
        held.share.release()
        held.turn.release()
        self._entrance.left(held.num_choices)


def _drop(share: Share) -> None:
    """Gives back the share of choices that were not computed."""
    share.ended(uncached=0, cached=0, output=0)
    share.release()
