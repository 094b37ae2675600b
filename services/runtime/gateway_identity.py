"""Who a session between a gateway and an output processor is with, as its metadata says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_NAME, _INCARNATION = "headwater-gateway", "headwater-incarnation"


class Gateway(NamedTuple):
    """One process; another of the same name is another one."""

    name: str = ""
    incarnation: str = ""

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str | bytes]]) -> Gateway:
        said = {name: value for name, value in metadata if isinstance(value, str)}
        return cls(said.get(_NAME, ""), said.get(_INCARNATION, ""))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((_NAME, self.name), (_INCARNATION, self.incarnation))


NOBODY = Gateway()
