"""The stages that serve a gateway's requests, as one object that REST and gRPC share. Knows nothing
about either."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger

from headwater.services.runtime import errors
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Change, ChangeKind, Members
from headwater.services.runtime.served_model import ServedModel, model_key
from headwater.services.runtime.tracing import NoTracing, Tracing

from ..adapters.names import AdapterNames, Target
from ..adapters.placement import AdapterPlacement
from ..long_work import LongWork
from ..router.router import Router
from ..stages.catalogues import Catalogues
from ..stages.output_sessions import ANY_MODEL, OutputSessions
from ..stages.prefetches import Prefetches
from ..stages.processors import Processors
from ..tenancy.accounts import Accounts
from ..tenancy.answer_lengths import AnswerLengths
from ..tenancy.cache_namespace import CacheNamespaces
from ..tenancy.caller import Caller
from ..tenancy.fair_start import FairStart
from ..tenancy.grant import Standing
from ..tenancy.shared_prompts import SharedPrompts
from ..tenancy.tenants import Identity, Tenant, Tenants, authorization_of
from ..tenancy.virtual_time import VirtualTime
from .admission import Admission
from .cold_start_queue import ColdStartQueue
from .generation import Generation
from .metrics import Metrics
from .migrations import Migrations
from .prompt_windows import PromptWindows
from .span_attributes import request_attributes
from .timelines import Explanation, Timelines, rendered

MIN_BEGINNING = 6
"""Fewest characters of a prefix that identify a request."""


@dataclass(slots=True, kw_only=True)
class Cluster:
    """The stages, the tenants that may use them, and the requests that run."""

    members: Members
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
    processors: Processors
    outputs: OutputSessions
    timelines: Timelines
    max_choices: int
    """Largest number of choices in one request."""
    needs_engine: str = "once"
    """When the gateway is not ready without an engine, where requests would wait for one: `always`,
    `never`, or until there was one (`once`)."""
    tracing: Tracing = field(default_factory=NoTracing)
    log: FilteringBoundLogger = field(default_factory=lambda: structlog.get_logger().bind())
    """Logger of requests. NOTE: it is bound once; binding is most of the cost of a line that is not
    written."""
    outages: Callable[[], tuple[str, ...]] = tuple
    """Names of services that the gateway does without for now."""
    prefetches: Prefetches = field(default_factory=Prefetches)
    migrations: Migrations = field(default_factory=Migrations)
    draining: bool = False
    """Whether the gateway takes no new requests."""
    is_cut_off: bool = False
    """Whether the drain limit is over: the requests that still run are ended."""
    prompt_windows: PromptWindows = field(default_factory=PromptWindows)
    long_work: LongWork = field(default_factory=LongWork)
    fair_start: FairStart = field(default_factory=FairStart)
    answer_lengths: AnswerLengths = field(default_factory=AnswerLengths)
    _running: dict[str, list[dict[Generation, None]]] = field(default_factory=dict)
    """Prompts that wait or run, in their order, by request id. A request runs twice when its client
    resumes it before the end of the first connection was noticed."""

    def __post_init__(self) -> None:
        self.metrics.queued_by_tier = lambda: self.admission.queued_by_tier
        self.admission.on_late = self.metrics.late.add
        self.metrics.running.set_function(lambda: self.admission.num_running)
        self.metrics.waiting.set_function(lambda: self.admission.num_queued)
        self.metrics.demand = self.demand_by_model
        self.timelines.find_here = self._explained_here
        self.placement.is_in_use = self.has_adapter
        self.processors.on_change = self.outputs.on_change = self.cold_starts.look_again
        self.router.on_wake(self.cold_starts.look_again)
        self.metrics.streams.set_function(lambda: self.outputs.num_streams)

    def model(self, name: str) -> ServedModel:
        """Model by name. Raises `NotFound`, `Unavailable` while no processor of a model that
        engines serve is known."""
        try:
            return self.processors.model(name)
        except errors.NotFound:
            if not self.router.has_replica(model_key(name)):
                raise
            raise errors.Unavailable(
                f"no processor of the model {name!r} is within reach", code="processor_unavailable"
            ) from None

    def target(self, tenant: Tenant, name: str) -> Target:
        """Model and adapter of a name that a tenant uses; an unknown name is its own target."""
        return Target(name) if self.processors.serves(name) else self.adapters.target(tenant, name)

    def models_of(self, tenant: Tenant) -> dict[str, tuple[ServedModel, int]]:
        """Models and adapters that a tenant may use, by name, each with the time since which it is
        served (seconds since 1970). An adapter is its base model under another name."""
        models = self.processors.models()
        adapters = {
            name: (dataclasses.replace(models[each.base][0], name=name), int(each.created_at))
            for name, each in self.adapters.seen_by(tenant).items()
            if each.base in models
        }
        return adapters | models

    def has_adapter(self, digest: bytes) -> bool:
        """Whether a request that waits or runs has the adapter with this hash."""
        return any(each.target.adapter == digest for run in self._runs() for each in run)

    def missing(self) -> list[str]:
        """Names of the stages that are missing for a request to be answered. Empty: the gateway is
        ready."""
        stages = {
            "processor": bool(self.processors.models()),
            "output processor": self.outputs.is_reachable,
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

    def begin(self, generations: Sequence[Generation]) -> None:
        """Counts a request's prompts among the running ones, where `cancel` finds it, until each
        has `ended`."""
        request_id = generations[0].request.caller.request_id
        self._running.setdefault(request_id, []).append(dict.fromkeys(generations))

    def check(self, caller: Caller) -> None:
        """Raises `Unavailable` after the drain limit, `KeyRevoked` when the caller's key was
        revoked meanwhile."""
        if self.is_cut_off:
            raise shutting_down()
        self.tenants.check(caller.tenant)

    def ended(self, generation: Generation) -> None:
        """Removes a prompt that has ended from the running ones."""
        request_id = generation.request.caller.request_id
        runs = self._running.get(request_id)
        if runs is None:
            return
        for run in runs:
            run.pop(generation, None)
        if left := list(filter(None, runs)):
            self._running[request_id] = left
        else:
            del self._running[request_id]

    def _runs(self) -> list[dict[Generation, None]]:
        return [run for runs in self._running.values() for run in runs]

    def demand_by_model(self) -> dict[str, tuple[int, int]]:
        """Number of requests by model: those that wait or run, and those without a replica."""
        without = self.cold_starts.waiting
        here = Counter(each.target.model for run in self._runs() for each in run)
        names = {*self.processors.models(), *without, *here}
        return {
            name: (max(here[name], without.get(name, 0)), without.get(name, 0)) for name in names
        }

    def running_prompts(self) -> list[Generation]:
        """Waiting and running prompts, oldest request first."""
        return [generation for run in self._runs() for generation in run]

    @property
    def num_requests(self) -> int:
        return len(self._running)

    def reject_early(self, caller: Caller) -> None:
        """Raises `LimitExceeded` where the request would be refused after its body was read,
        prepared and checked against Redis. To be called before a body is read."""
        self.admission.reject_early(caller.tenant.key)
        self.accounts.exhausted.reject_early(caller.tenant, caller.standing)

    async def after_refusal(
        self,
        headers: Mapping[str, str],
        standing: Standing,
        error: errors.HeadwaterError,
        identity: Identity | None = None,
    ) -> errors.HeadwaterError:
        """Counts a refused request of an identified tenant. Returns the error to answer with.
        `identity` knows the tenant of a request of the gateway's own."""
        known = identity or self.tenants
        try:
            tenant = known.identify(authorization_of(headers), headers.get("x-tenant", ""))
        except errors.HeadwaterError:
            return error
        return await self.accounts.after_refusal(tenant, standing, error)

    def cancel(self, caller: Caller, request_id: str) -> bool:
        """Ends a request of the caller's tenant; False when it has ended already.

        Raises `NotFound` for a request of another tenant, as for one that does not exist.
        """
        runs = self._running.get(request_id, [])
        if any(
            generation.request.caller.tenant.key != caller.tenant.key
            for run in runs
            for generation in run
        ):
            raise errors.NotFound("request", request_id)
        for run in runs:
            _cancel(run, errors.ClientGone("the request was cancelled"))
        return bool(runs)

    def end_revoked(self) -> None:
        """Ends the requests, waiting and running, whose key or tenant was removed."""
        for run in self._runs():
            try:
                self.tenants.check(next(iter(run)).request.caller.tenant)
            except errors.KeyRevoked as revoked:
                _cancel(run, revoked)

    def traced(self, caller: Caller, name: str) -> Caller:
        """The caller with a span that the request's other spans are part of. Binds its ids to the
        log."""
        tenant = caller.tenant.id
        request_id = caller.request_id
        tracing = self.tracing
        fields = (
            request_attributes(request_id, tenant, self.namespaces.master_key)
            if tracing.is_collected
            else {}
        )
        span = tracing.begin(name, caller.traceparent, caller.tracestate, **fields)
        structlog.contextvars.bind_contextvars(
            request_id=request_id, tenant=tenant, trace_id=span.context.trace_id
        )
        return caller.within(span)

    def explanation(self, generation: Generation) -> Explanation:
        """Head of a request's explanation, without its prompts."""
        caller = generation.request.caller
        return self.timelines.begin(
            caller.request_id,
            caller.tenant,
            generation.request.model,
            caller.client_request_id,
            caller.span.context.trace_id,
            age=generation.timeline.seconds,
        )

    async def explain(self, caller: Caller, request_id: str) -> Explanation:
        """The timeline of a request of the caller's tenant, on any gateway; `request_id` may be the
        beginning of one that no other request has. Raises `NotFound`, and `BadRequest` where
        several begin so."""
        tenant = caller.tenant.key
        if len(found := self._ids(request_id, tenant)) > 1:
            what = f"{len(found)} requests begin with {request_id!r}"
            raise errors.BadRequest("id", f"{what}; allowed: an id, or more of it")
        known = self._explained_here(request_id, tenant) or await self.timelines.ask_others(
            request_id, tenant
        )
        if known is None:
            raise errors.NotFound("request", request_id)
        return known

    def _ids(self, beginning: str, tenant: str) -> list[str]:
        """Ids of a tenant's requests on this gateway with this prefix. Short prefixes match
        nothing, and a complete id matches that request alone."""
        if beginning in self._running or len(beginning) < MIN_BEGINNING:
            return [beginning]
        running = {
            request_id
            for request_id, runs in self._running.items()
            if request_id.startswith(beginning)
            and any(each.request.caller.tenant.key == tenant for run in runs for each in run)
        }
        found = running.union(self.timelines.ids(beginning, tenant))
        return [beginning] if beginning in found else sorted(found)

    def _explained_here(self, request_id: str, tenant: str) -> Explanation | None:
        """The timeline of a request on this gateway, of the tenant with this key; None if no id, or
        more than one, begins with these characters."""
        [request_id, *others] = self._ids(request_id, tenant) or [request_id]
        if others:
            return None
        known = self.timelines.find(request_id, tenant)
        prompts = [each for run in self._running.get(request_id, []) for each in run]
        group = [each for each in prompts if each.request.caller.tenant.key == tenant]
        if not group:
            return known
        ended = known.prompts if known is not None else ()
        running = (rendered(each.to_ended()) for each in group)
        return msgspec.structs.replace(
            known or self.explanation(group[0]), prompts=(*ended, *running)
        )

    async def drain(self, limit: float, closing: Awaitable[object]) -> None:
        """Takes no new requests while the listeners close. Requests that still run after `limit`
        seconds end with an error."""
        self.draining = True
        listeners = asyncio.ensure_future(closing)
        await asyncio.wait((listeners,), timeout=limit)
        self.is_cut_off = True
        self.cold_starts.end(shutting_down())
        for run in self._runs():
            _cancel(run, shutting_down())
        await listeners

    def apply_change(self, change: Change) -> None:
        """Keeps the connections to other stages in step with the membership."""
        member = change.member
        model = _model_of(change.member)
        if change.kind is ChangeKind.JOINED and member.kind is Kind.PROCESSOR:
            self.processors.join(member.address)
        elif change.kind is ChangeKind.JOINED and member.kind is Kind.OUTPUT_PROCESSOR:
            self.outputs.join(member.address, model)
        elif change.kind is ChangeKind.LEFT:
            # A process that was restarted, or is known by its address too, is several members for a
            # while.
            others = [
                each for each in self.members.of(member.kind) if each.address == member.address
            ]
            if member.kind is Kind.OUTPUT_PROCESSOR and model not in map(_model_of, others):
                self.outputs.leave(member.address, model)
            elif member.kind is Kind.PROCESSOR and not others:
                self.processors.leave(member.address)
            elif member.kind is Kind.ENGINE and not others:
                self.prefetches.leave(member.address)
        if change.kind is not ChangeKind.UPDATED:
            self.cold_starts.look_again()

    async def close(self) -> None:
        await self.processors.close()
        await self.outputs.close()
        await self.prefetches.close()
        self.long_work.close()


def _model_of(member: Member) -> str:
    """Model that a stage serves, by name."""
    return member.model.name if member.model is not None else ANY_MODEL


def _cancel(prompts: Iterable[Generation], error: errors.HeadwaterError) -> None:
    """Ends a request's run through its first running prompt: the error of one prompt ends the
    others."""
    for generation in prompts:
        generation.cancelled_by = error
    for generation in itertools.islice(prompts, 1):
        generation.cancel(error)


def shutting_down() -> errors.Unavailable:
    return errors.Unavailable("the gateway is shutting down", code="draining")
