"""Explanations of requests, running and ended, on this gateway or another one."""

from __future__ import annotations

import msgspec

from headwater.services.runtime import errors

from ..tenancy.caller import Caller
from .generation import Generation
from .running_requests import RunningRequests
from .timelines import Explanation, Timelines, rendered

MIN_BEGINNING = 6
"""Fewest characters of a prefix that identify a request."""


class Explanations:
    """Answers other gateways too, through `timelines`."""

    def __init__(self, timelines: Timelines, running: RunningRequests) -> None:
        self._timelines = timelines
        self._running = running
        timelines.find_here = self._find_here

    def keep(self, generation: Generation) -> None:
        """Keeps a prompt that has ended, where its request has room for one more."""
        if self._timelines.has_room(generation.request.caller.request_id):
            generation.timeline.forget_hashes()
            self._timelines.keep(self._head(generation), generation.to_ended())

    async def find(self, caller: Caller, request_id: str) -> Explanation:
        """The timeline of a request of the caller's tenant, on any gateway; `request_id` may be the
        beginning of one that no other request has. Raises `NotFound`, and `BadRequest` where
        several begin so."""
        tenant = caller.tenant.key
        if len(found := self._ids(request_id, tenant)) > 1:
            what = f"{len(found)} requests begin with {request_id!r}"
            raise errors.BadRequest("id", f"{what}; allowed: an id, or more of it")
        known = self._find_here(request_id, tenant) or await self._timelines.ask_others(
            request_id, tenant
        )
        if known is None:
            raise errors.NotFound("request", request_id)
        return known

    def _head(self, generation: Generation) -> Explanation:
        """A request's explanation without its prompts."""
        caller = generation.request.caller
        return self._timelines.begin(
            caller.request_id,
            caller.tenant,
            generation.request.model,
            caller.client_request_id,
            caller.span.context.trace_id,
            age=generation.timeline.seconds,
        )

    def _ids(self, beginning: str, tenant: str) -> list[str]:
        """Ids of a tenant's requests on this gateway with this prefix. Short prefixes match
        nothing, and a complete id matches that request alone."""
        if beginning in self._running or len(beginning) < MIN_BEGINNING:
            return [beginning]
        found = self._running.ids(beginning, tenant).union(self._timelines.ids(beginning, tenant))
        return [beginning] if beginning in found else sorted(found)

    def _find_here(self, request_id: str, tenant: str) -> Explanation | None:
        """The timeline of a request on this gateway, of the tenant with this key; None if no id, or
        more than one, begins with these characters."""
        [request_id, *others] = self._ids(request_id, tenant) or [request_id]
        if others:
            return None
        known = self._timelines.find(request_id, tenant)
        prompts = self._running.of(request_id, tenant)
        if not prompts:
            return known
        ended = known.prompts if known is not None else ()
        running = (rendered(each.to_ended()) for each in prompts)
        return msgspec.structs.replace(known or self._head(prompts[0]), prompts=(*ended, *running))
