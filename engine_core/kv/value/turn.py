"""A turn of a conversation as its blocks are given back: its tenant, its kind, and hints."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation. Blocks of turns of one tenant and kind are expected back after like
    times."""

    tenant: str = ""
    weight: float = 1.0
    """Weight of the tenant's share of the cache; 0: not known, and the share keeps the one that it
    has."""
    kind: str = ""
    """Word for what the next turn waits for; empty: not known."""
    session: str = ""
    """Name of the conversation within its tenant; empty: not known."""
    priority: int = 0
    """Hint: one step more doubles the value of the blocks."""
    keep_seconds: float = 0.0
    """Hint: for so long the blocks count as sure to come back."""

    end_token_ids: tuple[int, ...] = ()
    """Tokens by which the model itself ends answers."""

    def ended(self, stop_token_id: int | None) -> Turn:
        """The turn with the token that ended its answer: models end a call of a tool by another one
        than what they say to a person. Tokens that clients choose tell nothing."""
        if stop_token_id not in self.end_token_ids:
            return self
        return replace(self, kind=f"{self.kind}/{stop_token_id}")

    def part(self, kind: str) -> Turn:
        """The turn of blocks that do not come back as its others do, by a kind of their own."""
        return replace(self, kind=kind, session="")


UNKNOWN = Turn()
MOVED = "moved"
"""Kind of blocks that were held to be copied elsewhere, for no turn."""


def moved(tenant: str) -> Turn:
    """Blocks of a tenant that were held for no turn of it."""
    return Turn(tenant=tenant, weight=0.0, kind=MOVED)
