"""Decides which models of a device are awake where not all fit: turns that are fair to tenants,
within a bound on the time that goes into switching. It knows models by name, their bytes and who
waits, and starts nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

SWITCHING_SHARE = 0.1
"""Share of the time that may go into switching, in the long run."""
BURST_SWITCHES = 4.0
"""Switches of average cost that may follow one another at once after a quiet time."""
MIN_QUANTUM = 0.5
"""Seconds that a model with work stays awake at least, however short a switch is."""
MOST_QUANTA = 4.0
"""Quanta that a model stays awake at most while others wait, however little its tenants were
served."""
EXPECTED_SWITCH = 1.0
"""Seconds of a switch before one was measured."""
CLAIM_SECONDS = 10.0
"""Time for which a tenant without requests keeps what it was served: one that asks for one thing
after another is away for a moment each time."""
GRACE_SECONDS = 0.5
"""Time that a model which has woken has to get its requests, before it counts as idle."""
WEIGHT = 0.3
"""Weight of the newest value in a mean."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests of one tenant that wait for a model."""

    since: float
    """Arrival of the oldest."""
    weight: float = 1.0
    """Weight of the tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSight:
    """A model at one moment."""

    name: str
    num_bytes: int
    """Bytes of the device while it is awake."""
    is_awake: bool
    has_work: bool = False
    """Whether its engine computes something, or would."""
    is_pinned: bool = False
    """Whether it stays awake."""
    tenants: Mapping[str, float] = field(default_factory=dict)
    """Weights of the tenants whose requests its engine has."""
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    """Requests that wait, by tenant."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Models that fall asleep, in this order, then one that wakes; empty: none does."""

    sleeps: tuple[str, ...]
    wakes: str


@dataclass(slots=True)
class _Model:
    awake_since: float = 0.0
    last_worked: float = -math.inf
    turn_seconds: float = 0.0
    """Mean length of its turns; 0: none has ended."""
    wake_seconds: float = 0.0


class TurnPolicy:
    """One device. `decide` says what to do next, unless a switch is under way; what became of it is
    to be noted by `note_switch`."""

    def __init__(self, resident_bytes: int, now: float) -> None:
        """`resident_bytes`: bytes of the device that awake models may have together."""
        self._resident_bytes = resident_bytes
        self._models: dict[str, _Model] = {}
        self._served: dict[str, float] = {}
        """Seconds of awake models over the tenant's weight, by tenant."""
        self._seen: dict[str, float] = {}
        """Time at which each of these tenants last waited or was served."""
        self._credit = BURST_SWITCHES * EXPECTED_SWITCH
        """Seconds that may go into switching now."""
        self._switch_seconds = EXPECTED_SWITCH
        """Mean cost of a switch."""
        self._seen_at = now
        self._switch: Switch | None = None
        """Switch that is under way since `_begun_at`."""
        self._begun_at = now

    def look(self, sights: Sequence[ModelSight], now: float) -> None:
        """Notes what models do; to be called several times a second."""
        seconds = now - self._seen_at
        self._seen_at = now
        most = BURST_SWITCHES * self._switch_seconds
        self._credit = min(most, self._credit + SWITCHING_SHARE * seconds)
        for sight in sights:
            model = self._model(sight.name)
            if sight.is_awake and sight.has_work:
                model.last_worked = now
                total = sum(sight.tenants.values())
                for tenant in sight.tenants:
                    # The tenant's share of the time by weight, divided by its weight.
                    self._served[tenant] = self._served.get(tenant, 0.0) + seconds / total
        self._welcome(sights, now)

    def decide(self, sights: Sequence[ModelSight], now: float) -> Switch | None:
        """The next switch; None: none is due, or one is under way."""
        if self._switch is not None:
            return None
        awake = [sight for sight in sights if sight.is_awake]
        excess = sum(sight.num_bytes for sight in awake) - self._resident_bytes
        if excess > 0:
            # An engine that was started again is awake.
            evicted = self._evicted(awake, excess)
            return self._begun(Switch(tuple(evicted), ""), now) if evicted else None
        for idx, sight in enumerate(self._in_order(sights)):
            # Others go before the first only where they fit beside all that is awake: it may need
            # the room of several models, whose turns end one by one.
            over = [] if idx else self._over(awake, now, sight)
            evicted = self._evicted(over, sight.num_bytes + excess)
            room = sum(each.num_bytes for each in awake if each.name in evicted) - excess
            if room >= sight.num_bytes and (not evicted or self._credit >= self._switch_seconds):
                return self._begun(Switch(tuple(evicted), sight.name), now)
        return None

    def note_switch(self, switch: Switch, now: float) -> None:
        """Notes that a switch has ended."""
        assert self._switch is switch
        self._switch = None
        seconds = now - self._begun_at
        if switch.sleeps:
            self._credit -= seconds
            self._switch_seconds += WEIGHT * (seconds - self._switch_seconds)
        for name in switch.sleeps:
            model = self._model(name)
            turn = max(0.0, now - seconds - model.awake_since)
            mean = model.turn_seconds or turn
            model.turn_seconds = mean + WEIGHT * (turn - mean)
        if switch.wakes:
            model = self._model(switch.wakes)
            model.awake_since = model.last_worked = now

    def note_costs(self, name: str, wake_seconds: float) -> None:
        """Notes what a model's engine took to wake, the last time; 0: unknown."""
        self._model(name).wake_seconds = wake_seconds

    def begin(self, switch: Switch, now: float) -> bool:
        """Begins a switch that was not decided here; whether none is under way."""
        if self._switch is not None:
            return False
        self._begun(switch, now)
        return True

    def wait_seconds(self, name: str, sights: Sequence[ModelSight], now: float) -> float:
        """Seconds until a model that sleeps is awake, were it asked for now; 0 for one that is
        awake. Turns are taken to last as long as those of the model did so far."""
        sight = next((each for each in sights if each.name == name), None)
        if sight is None or sight.is_awake:
            return 0.0
        cost = self._switch_seconds
        wakes = "" if self._switch is None else self._switch.wakes
        left = 0.0 if self._switch is None else max(0.0, cost - (now - self._begun_at))
        if name == wakes:
            return left
        awake = [each for each in sights if each.is_awake or each.name == wakes]
        if self._resident_bytes - sum(each.num_bytes for each in awake) >= sight.num_bytes:
            return left + (self._model(name).wake_seconds or cost)
        lacking = max(0.0, cost - self._credit) / SWITCHING_SHARE
        first = next(iter(self._in_order(sights)), None)
        turns = [self._turn_left(each, now, first) for each in awake if not each.is_pinned]
        waiting = [each.name for each in self._in_order(sights) if each.name != wakes]
        before = waiting[: waiting.index(name)] if name in waiting else waiting
        wait = left + max(lacking, min(turns, default=0.0)) + cost
        return wait + sum(self._turn_of(each) + cost for each in before)

    @property
    def is_switching(self) -> bool:
        """Whether a switch is under way."""
        return self._switch is not None

    @property
    def quantum(self) -> float:
        """Seconds that a model with work stays awake at least."""
        return max(MIN_QUANTUM, self._switch_seconds * (1 / SWITCHING_SHARE - 1))

    def last_used(self, name: str) -> float:
        """Time at which the model was last seen to work; minus infinity: it was not."""
        return self._model(name).last_worked

    def _begun(self, switch: Switch, now: float) -> Switch:
        self._switch = switch
        self._begun_at = now
        return switch

    def _model(self, name: str) -> _Model:
        return self._models.setdefault(name, _Model(awake_since=self._seen_at))

    def _welcome(self, sights: Iterable[ModelSight], now: float) -> None:
        """Lets new tenants begin level with the one that was served least, and forgets those that
        have been away for `CLAIM_SECONDS`."""
        waiting = {tenant for sight in sights for tenant in sight.waiting}
        busy = [sight for sight in sights if sight.is_awake and sight.has_work]
        present = waiting | {tenant for sight in busy for tenant in sight.tenants}
        least = min((self._served[each] for each in present & self._served.keys()), default=0.0)
        self._seen |= dict.fromkeys(present, now)
        self._seen = {each: at for each, at in self._seen.items() if now - at < CLAIM_SECONDS}
        self._served = {each: self._served.get(each, least) for each in self._seen}

    def _in_order(self, sights: Sequence[ModelSight]) -> list[ModelSight]:
        """Models that sleep while requests wait for them: that of the tenant served least first,
        then that of the request which has waited longest. One that does not fit beside pinned
        models is left out: it would keep its place for ever."""
        pinned = sum(each.num_bytes for each in sights if each.is_pinned)
        waiting = [
            each
            for each in sights
            if each.waiting
            and not each.is_awake
            and (each.is_pinned or each.num_bytes + pinned <= self._resident_bytes)
        ]
        return sorted(waiting, key=self._rank)

    def _rank(self, sight: ModelSight) -> tuple[float, float, str]:
        served, since = min(
            (self._served.get(tenant, 0.0), each.since) for tenant, each in sight.waiting.items()
        )
        return served, since, sight.name

    def _over(self, awake: Iterable[ModelSight], now: float, first: ModelSight) -> list[ModelSight]:
        """Awake models whose turn is over. `first`: the next of those that wait."""
        return [
            each for each in awake if not each.is_pinned and self._stay_left(each, now, first) <= 0
        ]

    def _stay_left(self, sight: ModelSight, now: float, first: ModelSight | None) -> float:
        """Seconds that the model may stay awake for certain: its quantum, and longer while one of
        its tenants was served less than that of `first`, which waits. One without work makes
        room."""
        awake_since = self._model(sight.name).awake_since
        if not sight.has_work:
            return max(0.0, awake_since + min(GRACE_SECONDS, self.quantum) - now)
        left = awake_since + self.quantum - now
        if first is not None and sight.tenants:
            least = min(self._served.get(each, 0.0) for each in sight.tenants)
            behind = (self._rank(first)[0] - least) * sum(sight.tenants.values())
            left = max(left, min(behind, awake_since + MOST_QUANTA * self.quantum - now))
        return max(0.0, left)

    def _turn_left(self, sight: ModelSight, now: float, first: ModelSight | None) -> float:
        """Seconds that the model is expected to stay awake."""
        if not sight.is_awake:
            return self._turn_of(sight.name)
        left = self._stay_left(sight, now, first)
        if not left:
            return 0.0
        expected = self._model(sight.name).awake_since + self._turn_of(sight.name) - now
        return min(left, expected) if expected > 0 else left

    def _turn_of(self, name: str) -> float:
        """Seconds of the model's turn while others wait: at most the quantum, though its turns so
        far include time in which no other model was asked for."""
        return min(self._model(name).turn_seconds or self.quantum, self.quantum)

    def _evicted(self, awake: Iterable[ModelSight], lacking: int) -> list[str]:
        """Models that make room for so many bytes, as far as they do: those without work first,
        the least recently used of them; then those that have been awake longest."""
        order = sorted(
            (each for each in awake if not each.is_pinned),
            key=lambda each: (
                each.has_work,
                self._model(each.name).awake_since
                if each.has_work
                else self._model(each.name).last_worked,
            ),
        )
        found = []
        for sight in order:
            if lacking <= 0:
                break
            found.append(sight.name)
            lacking -= sight.num_bytes
        return found
