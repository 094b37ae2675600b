"""The requests of a gateway that wait or run, by id. Knows nothing about stages."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from headwater.services.runtime import errors

from ..tenancy.tenants import Tenant
from .generation import Generation


class RunningRequests:
    """A request runs twice when its client resumes it before the end of the first connection was
    noticed."""

    def __init__(self) -> None:
        self._runs: dict[str, list[dict[Generation, None]]] = {}
        """Prompts that wait or run, in their order, by request id."""

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._runs

    def begin(self, generations: Sequence[Generation]) -> None:
        """Counts a request's prompts among the running ones, where `cancel` finds it, until each
        has `ended`."""
        request_id = generations[0].request.caller.request_id
        self._runs.setdefault(request_id, []).append(dict.fromkeys(generations))

    def ended(self, generation: Generation) -> None:
        """Removes a prompt that has ended."""
        request_id = generation.request.caller.request_id
        runs = self._runs.get(request_id)
        if runs is None:
            return
        for run in runs:
            run.pop(generation, None)
        if left := list(filter(None, runs)):
            self._runs[request_id] = left
        else:
            del self._runs[request_id]

    def prompts(self) -> list[Generation]:
        """Waiting and running prompts, oldest request first."""
        return [generation for run in self._all_runs() for generation in run]

    def of(self, request_id: str, tenant: str) -> list[Generation]:
        """Prompts of a request of the tenant with this key."""
        prompts = itertools.chain.from_iterable(self._runs.get(request_id, ()))
        return [each for each in prompts if each.request.caller.tenant.key == tenant]

    def ids(self, beginning: str, tenant: str) -> set[str]:
        """Ids with this prefix of the tenant's requests."""
        return {
            request_id
            for request_id in self._runs
            if request_id.startswith(beginning) and self.of(request_id, tenant)
        }

    def num_by_model(self) -> Counter[str]:
        return Counter(each.target.model for each in self.prompts())

    def has_adapter(self, digest: bytes) -> bool:
        """Whether a request has the adapter with this hash."""
        return any(each.target.adapter == digest for each in self.prompts())

    def cancel(self, request_id: str, tenant: str) -> bool:
        """Ends a request of the tenant with this key; False when it has ended already.

        Raises `NotFound` for a request of another tenant, as for one that does not exist.
        """
        runs = self._runs.get(request_id, [])
        if len(self.of(request_id, tenant)) < sum(map(len, runs)):
            raise errors.NotFound("request", request_id)
        for run in runs:
            _cancel(run, errors.ClientGone("the request was cancelled"))
        return bool(runs)

    def cancel_all(self, error: errors.HeadwaterError) -> None:
        for run in self._all_runs():
            _cancel(run, error)

    def cancel_revoked(self, check: Callable[[Tenant], None]) -> None:
        """Ends the requests whose key or tenant was removed: for those `check` raises
        `KeyRevoked`."""
        for run in self._all_runs():
            try:
                check(next(iter(run)).request.caller.tenant)
            except errors.KeyRevoked as revoked:
                _cancel(run, revoked)

    def _all_runs(self) -> list[dict[Generation, None]]:
        return [run for runs in self._runs.values() for run in runs]


def _cancel(prompts: Iterable[Generation], error: errors.HeadwaterError) -> None:
    """Ends a request's run through its first running prompt: the error of one prompt ends the
    others."""
    for generation in prompts:
        generation.cancelled_by = error
    for generation in itertools.islice(prompts, 1):
        generation.cancel(error)
