"""The stages within reach: who they are, and the connections to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Change, ChangeKind, Members

from .output_sessions import ANY_MODEL, OutputSessions
from .prefetches import Prefetches
from .processors import Processors


@dataclass(frozen=True, slots=True)
class Stages:
    """Connections follow the membership."""

    members: Members
    outputs: OutputSessions
    processors: Processors = field(default_factory=Processors)
    prefetches: Prefetches = field(default_factory=Prefetches)

    def apply_change(self, change: Change) -> None:
        """Keeps the connections to other stages in step with the membership."""
        member = change.member
        model = _model_of(member)
        if change.kind is ChangeKind.JOINED and member.kind is Kind.PROCESSOR:
            self.processors.join(member.address)
        elif change.kind is ChangeKind.JOINED and member.kind is Kind.OUTPUT_PROCESSOR:
            self.outputs.join(member.address, model)
        elif change.kind is ChangeKind.LEFT:
            # A restarted process, or one that is also known by its address alone, is several
            # members for a while.
            others = [
                each for each in self.members.of(member.kind) if each.address == member.address
            ]
            if member.kind is Kind.OUTPUT_PROCESSOR and model not in map(_model_of, others):
                self.outputs.leave(member.address, model)
            elif member.kind is Kind.PROCESSOR and not others:
                self.processors.leave(member.address)
            elif member.kind is Kind.ENGINE and not others:
                self.prefetches.leave(member.address)

    async def close(self) -> None:
        await self.processors.close()
        await self.outputs.close()
        await self.prefetches.close()


def _model_of(member: Member) -> str:
    """Model that a stage serves, by name."""
    return member.model.name if member.model is not None else ANY_MODEL
