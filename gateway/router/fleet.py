"""The replicas of every model, kept by membership and load messages. Knows nothing about
choosing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from headwater.proto import events_pb2
from headwater.services.runtime import subjects
from headwater.services.runtime.bus import Bus, Subscription
from headwater.services.runtime.member import Kind, Member, ReplicaLoad
from headwater.services.runtime.membership import Change, ChangeKind, Members
from headwater.services.runtime.tasks import owned_task

from .rates import Rates, pooled
from .replica import Replica

_RATES_SECONDS = 0.25


class Fleet:
    """Use within `running`."""

    def __init__(self, bus: Bus, members: Members, clock: Callable[[], float]) -> None:
        self._bus = bus
        self._members = members
        self._clock = clock
        self._models: dict[str, dict[str, Replica]] = {}
        self._rates: dict[str, tuple[float, dict[str, Rates]]] = {}
        self.on_wake: Callable[[], None] = lambda: None
        """Called when an engine has woken."""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Fleet]:
        """Follows membership and load inside the `with` block."""
        async with self._bus.subscribe(subjects.EVERY_LOAD) as loads, owned_task(self._read(loads)):
            self._members.on_change(self._on_change)
            try:
                yield self
            finally:
                self._members.forget_listener(self._on_change)

    def __bool__(self) -> bool:
        return any(self._models.values())

    @property
    def had_replicas(self) -> bool:
        """Whether any model has had a replica, also one that left."""
        return bool(self._models)

    @property
    def model_keys(self) -> list[str]:
        return [model_key for model_key, replicas in self._models.items() if replicas]

    def of(self, model_key: str) -> Mapping[str, Replica]:
        """Replicas of a model by id."""
        return self._models.get(model_key, {})

    def replica(self, member: Member) -> Replica:
        """NOTE: it may have left since it was chosen; what is counted then counts nowhere."""
        known = self.of(member.model_key).get(member.replica_id)
        return (
            known if known is not None and known.member.epoch == member.epoch else Replica(member)
        )

    def expect(self, member: Member | None) -> Replica | None:
        """Adds to the number of requests that are expected to go on at a replica, and returns it;
        None: at none.

        NOTE: what is added is taken from that replica again, which may have left and joined
        meanwhile.
        """
        replica = self.replica(member) if member is not None else None
        if replica is not None:
            replica.num_expected += 1
        return replica

    def has(self, member: Member) -> bool:
        """Whether this incarnation of the replica is known."""
        known = self.of(member.model_key).get(member.replica_id)
        return known is not None and known.member.epoch == member.epoch

    def all(self) -> list[Replica]:
        """The replicas of every model."""
        return [each for of in self._models.values() for each in of.values()]

    def trust(self) -> dict[str, float]:
        """How far the replicas of every model are believed, by id."""
        return {each.member.replica_id: each.trust.value for each in self.all()}

    def rates(self, model_key: str, now: float) -> Mapping[str, Rates]:
        """Speeds of replicas by numerics id, cached between requests."""
        until, rates = self._rates.get(model_key, (0.0, {}))
        if now >= until:
            groups: dict[str, list[ReplicaLoad]] = {}
            for replica in self.of(model_key).values():
                groups.setdefault(replica.member.numerics_id, []).append(replica.load.reported)
            rates = {numerics_id: pooled(loads) for numerics_id, loads in groups.items()}
            self._rates[model_key] = now + _RATES_SECONDS, rates
        return rates

    def _on_change(self, change: Change) -> None:
        member = change.member
        if member.kind is not Kind.ENGINE or member.model is None:
            return
        replicas = self._models.setdefault(member.model_key, {})
        self._rates.pop(member.model_key, None)
        if change.kind is ChangeKind.LEFT:
            replicas.pop(member.replica_id, None)
            return
        if change.kind is ChangeKind.JOINED:
            replicas[member.replica_id] = Replica(member)
        replica = replicas[member.replica_id]
        replica.member = member
        if member.load is not None:
            self._report(replica, member.load)

    async def _read(self, loads: Subscription) -> None:
        async for subject, load in loads.decoded(events_pb2.Load.FromString, "load"):
            model_key = subject.split(".")[1]
            replica = self.of(model_key).get(load.incarnation.replica_id)
            if replica is not None and replica.member.epoch == load.incarnation.epoch:
                self._report(replica, ReplicaLoad.from_pb(load))

    def _report(self, replica: Replica, load: ReplicaLoad) -> None:
        has_woken = load.is_awake and not replica.load.reported.is_awake
        replica.load.report(load, self._clock())
        if has_woken:
            self.on_wake()
