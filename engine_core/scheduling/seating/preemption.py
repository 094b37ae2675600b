"""Chooses the running request that gives up seat and blocks: for a step that is short of them, to a
tenant that is behind, or because its reader takes nothing.

The scheduler takes them away.
"""

from __future__ import annotations

from collections import Counter

from ..blocks.blocks import Blocks
from ..rows.rows import Rows
from ..table.request_state import Rank, RequestState
from .tenant_shares import TenantShares


class Preemption:
    def __init__(self, rows: Rows, blocks: Blocks, shares: TenantShares) -> None:
        self._rows = rows
        self._blocks = blocks
        self._shares = shares
        self._stalled: dict[int, RequestState] = {}
        """Running requests whose readers give no credit, by key, in the order in which they
        stalled."""

    def add_stalled(self, request: RequestState) -> None:
        self._stalled[request.key] = request

    def remove_stalled(self, request: RequestState) -> None:
        """Removes a request whose reader takes tokens again, or that no longer runs."""
        self._stalled.pop(request.key, None)

    def first_stalled(self) -> RequestState | None:
        """The request that stalled first and still has no credit; rejected drafts give credit
        back."""
        credit = self._rows.table.credit
        return next(
            (request for request in self._stalled.values() if credit[request.row] <= 0), None
        )

    def last(self) -> RequestState:
        """The one that stalled first, if any has; else of the lowest tier, of the tenant that is
        farthest ahead, the last."""
        return self.first_stalled() or max(self._rows.running.values(), key=self._place)

    def held_blocks(self) -> Counter[str]:
        """Number of pages of each running tenant."""
        held = Counter[str]()
        for request in self._rows.running.values():
            held[request.tenant] += self._blocks.num_pages_of(request)
        return held

    def take_for(self, behind: RequestState, held: Counter[str]) -> RequestState | None:
        """Chooses a request whose tenant, even without it, holds no less than the tenant of
        `behind` with its new request; None where there is no such request. Subtracts what it held
        from `held`. It is the youngest of the tenant farthest ahead, and will find most of its
        blocks cached."""
        num_blocks = held[behind.tenant] + self._blocks.num_pages(behind.num_tokens)
        level = self._shares.level(behind.tenant, 1, num_blocks)
        ahead = {
            name for name, blocks in held.items() if self._shares.level(name, -1, blocks) >= level
        }
        victims = [
            each
            for each in self._rows.running.values()
            if each.tenant in ahead and each.rank[0] >= behind.rank[0]
        ]
        if not victims:
            return None
        victim = max(
            victims, key=lambda each: (each.rank[0], held[each.tenant] / each.weight, each.rank)
        )
        num_left = held[victim.tenant] - self._blocks.num_pages_of(victim)
        if self._shares.level(victim.tenant, -1, num_left) < level:
            return None
        held[victim.tenant] = num_left
        return victim

    def _place(self, request: RequestState) -> tuple[int, float, Rank]:
        return request.rank[0], self._shares.level(request.tenant), request.rank
