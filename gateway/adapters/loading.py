"""Loads and unloads adapters while requests run: every engine of the model checks the content, then
the catalogue gives it a name. What one engine refuses gets none."""

from __future__ import annotations

import msgspec

from headwater.services.runtime import errors
from headwater.services.runtime.member import Kind, Member
from headwater.services.runtime.membership import Members
from headwater.services.runtime.model_name import NAME_ALLOWED, is_model_name

from ..stages.processors import Processors
from . import engine_calls
from .names import AdapterNames
from .placement import AdapterPlacement
from .records import OPERATOR, AdapterRecord


class AdapterLoading:
    def __init__(
        self,
        members: Members,
        processors: Processors,
        names: AdapterNames,
        placement: AdapterPlacement,
    ) -> None:
        self._members = members
        self._processors = processors
        self.catalogue = names.catalogue
        self._placement = placement

    async def load(self, draft: AdapterRecord, within: str = "") -> AdapterRecord:
        """Serves an adapter under its name, in the place of the version before. `draft` has no hash
        and no rank yet; without a base it is the only model's. `within`: a folder on the engines'
        hosts that the files have to lie in. Raises `BadRequest`, `NotFound`, `Unavailable`."""
        base = draft.base or self._processors.only_model()
        self._check_name(draft, base)
        engines = self._engines_of(base)
        checked = await self._placement.check(engines, draft, within)
        record = msgspec.structs.replace(draft, base=base, digest=checked.digest, rank=checked.rank)
        await self.catalogue.put(record)
        return record

    async def unload(self, owner: str, name: str) -> AdapterRecord | None:
        """Removes a name: new requests do not find its adapter, running ones keep it. Returns its
        record; None for an adapter that engines were started with. Raises `NotFound`,
        `Unavailable`."""
        engines = self._started_with(name) if owner == OPERATOR else []
        try:
            record = await self.catalogue.drop(owner, name)
        except errors.NotFound:
            if not engines:
                raise
            record = None
        replies = await engine_calls.of_each(engines, lambda each: engine_calls.unload(each, name))
        if failed := [each for each in replies if isinstance(each, errors.HeadwaterError)]:
            raise failed[0]
        for engine in engines:
            self._members.on_member(await engine_calls.described(engine), from_bus=False)
        return record

    def _check_name(self, draft: AdapterRecord, base: str) -> None:
        """Raises `BadRequest` for a name that clients cannot send, and for one that is taken."""
        if not is_model_name(draft.name):
            raise errors.BadRequest.of("name", draft.name, NAME_ALLOWED)
        if self._processors.serves(draft.name):
            raise errors.BadRequest.of("name", draft.name, "a name that no model has")
        before = self.catalogue.owned(draft.owner, draft.name)
        if before is not None and before.base != base:
            raise errors.BadRequest.of("name", draft.name, "a name that no model's adapter has")

    def _engines_of(self, base: str) -> list[Member]:
        """The engines that serve a model, at least one. Raises `NotFound`, `Unavailable`."""
        self._processors.model(base)
        if not (engines := self._placement.engines_of(base)):
            raise errors.Unavailable(f"no engine of {base!r} is within reach", code="no_replica")
        return engines

    def _started_with(self, name: str) -> list[Member]:
        """Engines that were started with an adapter of that name."""
        return [
            engine
            for engine in self._members.of(Kind.ENGINE)
            if any(each.name == name for each in engine.adapters)
        ]
