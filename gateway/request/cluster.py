"""The stages that serve a gateway's requests, as one object that REST and gRPC share. Knows nothing
about either."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog
from structlog.typing import FilteringBoundLogger

from headwater.services.runtime import errors
from headwater.services.runtime.membership import Change, ChangeKind

from ..adapters.names import AdapterNames
from ..adapters.placement import AdapterPlacement
from ..long_work import LongWork
from ..router.router import Router
from ..stages.catalogues import Catalogues
from ..stages.stages import Stages
from ..tenancy.accounts import Accounts
from ..tenancy.answer_lengths import AnswerLengths
from ..tenancy.cache_namespace import CacheNamespaces
from ..tenancy.caller import Caller
from ..tenancy.fair_start import FairStart
from ..tenancy.shared_prompts import SharedPrompts
from ..tenancy.tenants import Tenants
from ..tenancy.virtual_time import VirtualTime
from .admission import Admission
from .cold_start_queue import ColdStartQueue
from .explanations import Explanations
from .metrics import Metrics
from .migrations import Migrations
from .prompt_windows import PromptWindows
from .request_spans import RequestSpans
from .running_requests import RunningRequests
from .served_models import ServedModels
from .timelines import Timelines


@dataclass(slots=True, kw_only=True)
class Cluster:
    """The stages, the tenants that may use them, and the requests that run."""

    stages: Stages
    tenants: Tenants
    namespaces: CacheNamespaces
    shared_prompts: SharedPrompts
    admission: Admission
    accounts: Accounts
    fair: VirtualTime
    router: Router
    catalogues: Catalogues
    adapters: AdapterNames
    placement: AdapterPlacement
    cold_starts: ColdStartQueue
    metrics: Metrics
    spans: RequestSpans
    timelines: Timelines
    max_choices: int
    """Largest number of choices in one request."""
    needs_engine: str = "once"
    """When the gateway is not ready without an engine, where requests would wait for one: `always`,
    `never`, or until there was one (`once`)."""
    log: FilteringBoundLogger = field(default_factory=lambda: structlog.get_logger().bind())
    """Logger of requests. NOTE: it is bound once; binding is most of the cost of a line that is not
    written."""
    outages: Callable[[], tuple[str, ...]] = tuple
    """Names of services that the gateway does without for now."""
    migrations: Migrations = field(default_factory=Migrations)
    draining: bool = False
    """Whether the gateway takes no new requests."""
    is_cut_off: bool = False
    """Whether the drain limit is over: the requests that still run are ended."""
    prompt_windows: PromptWindows = field(default_factory=PromptWindows)
    long_work: LongWork = field(default_factory=LongWork)
    fair_start: FairStart = field(default_factory=FairStart)
    answer_lengths: AnswerLengths = field(default_factory=AnswerLengths)
    running: RunningRequests = field(default_factory=RunningRequests)
    served: ServedModels = field(init=False)
    explanations: Explanations = field(init=False)

    def __post_init__(self) -> None:
        self.metrics.queued_by_tier = lambda: self.admission.queued_by_tier
        self.admission.on_late = self.metrics.late.add
        self.metrics.running.set_function(lambda: self.admission.num_running)
        self.metrics.waiting.set_function(lambda: self.admission.num_queued)
        self.metrics.demand = self.demand_by_model
        self.placement.is_in_use = self.running.has_adapter
        self.stages.processors.on_change = self.cold_starts.look_again
        self.stages.outputs.on_change = self.cold_starts.look_again
        self.router.on_wake(self.cold_starts.look_again)
        self.metrics.streams.set_function(lambda: self.stages.outputs.num_streams)
        self.served = ServedModels(self.stages.processors, self.router, self.adapters)
        self.explanations = Explanations(self.timelines, self.running)

    def missing(self) -> list[str]:
        """Names of the stages that are missing for a request to be answered. Empty: the gateway is
        ready."""
        stages = {
            "processor": bool(self.stages.processors.models()),
            "output processor": self.stages.outputs.is_reachable,
            "engine": self.router.has_replicas or self._comes_by_itself(),
        }
        return ["draining"] * self.draining + [
            stage for stage, is_there in stages.items() if not is_there
        ]

    def _comes_by_itself(self) -> bool:
        """Whether requests may wait for an engine: there was one, a supervisor starts or wakes
        engines, or the settings say that the first request does. False while the first one
        loads."""
        if not self.cold_starts.patience or self.needs_engine == "always":
            return False
        return (
            self.needs_engine == "never" or self.router.had_replicas or self.catalogues.is_served()
        )

    def awaited(self) -> list[str]:
        """Stages that are missing and that requests wait for: an engine that starts, or will by
        demand."""
        is_awaited = not self.router.has_replicas and self._comes_by_itself()
        return ["engine"] * is_awaited

    def check(self, caller: Caller) -> None:
        """Raises `Unavailable` after the drain limit, `KeyRevoked` when the caller's key was
        revoked meanwhile."""
        if self.is_cut_off:
            raise shutting_down()
        self.tenants.check(caller.tenant)

    def demand_by_model(self) -> dict[str, tuple[int, int]]:
        """Number of requests by model: those that wait or run, and those without a replica."""
        without = self.cold_starts.waiting
        here = self.running.num_by_model()
        names = {*self.stages.processors.models(), *without, *here}
        return {
            name: (max(here[name], without.get(name, 0)), without.get(name, 0)) for name in names
        }

    def reject_early(self, caller: Caller) -> None:
        """Raises `LimitExceeded` where the request would be refused after its body was read,
        prepared and checked against Redis. To be called before a body is read."""
        self.admission.reject_early(caller.tenant.key)
        self.accounts.exhausted.reject_early(caller.tenant, caller.standing)

    async def drain(self, limit: float, closing: Awaitable[object]) -> None:
        """Takes no new requests while the listeners close. Requests that still run after `limit`
        seconds end with an error."""
        self.draining = True
        listeners = asyncio.ensure_future(closing)
        await asyncio.wait((listeners,), timeout=limit)
        self.is_cut_off = True
        self.cold_starts.end(shutting_down())
        self.running.cancel_all(shutting_down())
        await listeners

    def apply_change(self, change: Change) -> None:
        """Keeps connections in step with the membership, and looks again at requests that wait."""
        self.stages.apply_change(change)
        if change.kind is not ChangeKind.UPDATED:
            self.cold_starts.look_again()

    def end_revoked(self) -> None:
        """Ends the requests, waiting and running, whose key or tenant was removed."""
        self.running.cancel_revoked(self.tenants.check)

    async def close(self) -> None:
        await self.stages.close()
        self.long_work.close()


def shutting_down() -> errors.Unavailable:
    return errors.Unavailable("the gateway is shutting down", code="draining")
