"""Identity of the gateway of a session with an output processor, as the session's metadata gives
it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

_NAME = "headwater-gateway"
_INCARNATION = "headwater-incarnation"


class Gateway(NamedTuple):
    """One gateway process; another process of the same name is another gateway."""

    name: str = ""
    incarnation: str = ""

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str | bytes]]) -> Gateway:
        values = {name: value for name, value in metadata if isinstance(value, str)}
        return cls(values.get(_NAME, ""), values.get(_INCARNATION, ""))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((_NAME, self.name), (_INCARNATION, self.incarnation))


NOBODY = Gateway()
