"""A turn of a conversation when it releases its blocks: its tenant, its kind, and hints."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation. Blocks of turns of one tenant and kind are expected back after like
    times."""

    tenant: str = ""
    weight: float = 1.0
    """Weight of the tenant's share of the cache; 0: unknown, the last weight is kept."""
    kind: str = ""
    """Name of what the next turn waits for, such as a tool; empty: unknown."""
    session: str = ""
    """Name of the conversation within its tenant; empty: not known."""
    priority: int = 0
    """Hint: one step more doubles the value of the blocks."""
    keep_seconds: float = 0.0
    """Hint: for so long the blocks count as sure to come back."""

    end_token_ids: tuple[int, ...] = ()
    """Tokens by which the model ends answers."""

    def ended(self, stop_token_id: int | None) -> Turn:
        """The turn with the token that ended its answer: models end a tool call by another token
        than a message to a person. Stop tokens that clients choose say nothing."""
        if stop_token_id not in self.end_token_ids:
            return self
        return replace(self, kind=f"{self.kind}/{stop_token_id}")

    def part(self, kind: str) -> Turn:
        """The turn of blocks whose return times differ from those of its other blocks, with a kind
        of their own."""
        return replace(self, kind=kind, session="")


UNKNOWN = Turn()
MOVED = "moved"
"""Kind of blocks that were held to be copied elsewhere, for no turn."""


def moved(tenant: str) -> Turn:
    """Blocks of a tenant that were held by transfers only."""
    return Turn(tenant=tenant, weight=0.0, kind=MOVED)
