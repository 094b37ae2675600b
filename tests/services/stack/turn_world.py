"""A device on a virtual clock whose models take turns as the policy says."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from headwater.services.stack.turn_policy import ModelSight, Switch, TurnPolicy, Waiting

TICK = 0.05


@dataclass(slots=True)
class Request:
    model: str
    tenant: str
    arrived_at: float
    seconds: float
    """Work that is left."""
    estimate: float = 0.0
    first_served_at: float | None = None


@dataclass
class TurnWorld:
    """`num_bytes` by model; all requests of an awake model share its time equally."""

    num_bytes: dict[str, int]
    resident_bytes: int
    switch_seconds: float = 0.4
    weights: dict[str, float] = field(default_factory=dict)
    """By tenant; 1 where none is given."""
    pinned: frozenset[str] = frozenset()
    now: float = 0.0
    awake: set[str] = field(default_factory=set)
    requests: list[Request] = field(default_factory=list)
    done: list[Request] = field(default_factory=list)
    served: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by tenant."""
    switching_seconds: float = 0.0
    _asleep_since: dict[str, float] = field(default_factory=dict)
    _switch: tuple[Switch, float] | None = None

    def __post_init__(self) -> None:
        self.policy = TurnPolicy(self.resident_bytes, self.now)

    def ask(self, model: str, tenant: str, seconds: float) -> Request:
        request = Request(model, tenant, self.now, seconds)
        self.requests.append(request)
        request.estimate = self.policy.wait_seconds(model, self.sights(), self.now)
        return request

    def sights(self) -> list[ModelSight]:
        return [self._sight(name) for name in self.num_bytes]

    def _sight(self, name: str) -> ModelSight:
        of = [each for each in self.requests if each.model == name]
        waiting: dict[str, Waiting] = {}
        if name not in self.awake:
            for each in of:
                since = max(each.arrived_at, self._asleep_since.get(name, 0.0))
                known = waiting.get(each.tenant)
                since = min(since, known.since) if known else since
                waiting[each.tenant] = Waiting(since, self.weights.get(each.tenant, 1.0))
        return ModelSight(
            name=name,
            num_bytes=self.num_bytes[name],
            is_awake=name in self.awake,
            has_work=bool(of),
            is_pinned=name in self.pinned,
            tenants={each.tenant: self.weights.get(each.tenant, 1.0) for each in of},
            waiting=waiting,
        )

    def tick(self) -> None:
        self.now += TICK
        self._compute()
        self.policy.look(self.sights(), self.now)
        if self._switch is not None:
            switch, until = self._switch
            if self.now < until:
                return
            self._switch = None
            if switch.wakes:
                self.awake.add(switch.wakes)
            self.policy.note_switch(switch, self.now)
        if (switch := self.policy.decide(self.sights(), self.now)) is not None:
            self.awake -= set(switch.sleeps)
            self._asleep_since |= dict.fromkeys(switch.sleeps, self.now)
            self._switch = switch, self.now + self.switch_seconds
            self.switching_seconds += self.switch_seconds if switch.sleeps else 0.0
        used = sum(self.num_bytes[name] for name in self.awake)
        used += self.num_bytes[switch.wakes] if switch is not None and switch.wakes else 0
        assert used <= self.resident_bytes

    def _compute(self) -> None:
        for name in self.awake:
            of = [each for each in self.requests if each.model == name]
            for request in of:
                if request.first_served_at is None:
                    request.first_served_at = self.now
                request.seconds -= TICK / len(of)
                self.served[request.tenant] += TICK / len(of)
                if request.seconds <= 0:
                    self.requests.remove(request)
                    self.done.append(request)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK)):
            self.tick()
