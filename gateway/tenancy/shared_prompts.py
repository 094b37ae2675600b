"""System messages that operators declare by their hash, and whose blocks named tenants share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from headwater.proto.processor_pb2 import Prompt
from headwater.services.runtime.key_file import NAME
from headwater.services.runtime.settings import SettingError

_SYSTEM_ROLES = ("system", "developer")
_DECLARED = re.compile(r"(?P<model>.+)=(?P<digest>[0-9a-f]{64}):(?P<tenants>[^:=]+)")
FORM = "MODEL=SHA256:TENANT+TENANT: a served name, 64 hex digits, and two names of tenants or more"


@dataclass(frozen=True, slots=True)
class SharedPrompts:
    tenants: Mapping[tuple[str, str], frozenset[str]]
    """Names of the tenants that share a message, by model and hash."""

    @classmethod
    def read(cls, declared: Sequence[str], *, shared_cache: bool = False) -> SharedPrompts:
        """Reads `--shared-prompt`. Raises `SettingError`, also where all tenants share
        everything."""
        if declared and shared_cache:
            raise SettingError("shared_prompt", declared[0], "none beside --shared-cache")
        tenants = dict[tuple[str, str], frozenset[str]]()
        for each in declared:
            found = _DECLARED.fullmatch(each)
            names = found["tenants"].split("+") if found else []
            if (
                found is None
                or len(set(names)) < max(2, len(names))
                or not all(map(NAME.fullmatch, names))
            ):
                raise SettingError("shared_prompt", each, FORM)
            tenants[found["model"], found["digest"]] = frozenset(names)
        if len(tenants) < len(declared):
            most = Counter(each.rpartition(":")[0] for each in declared).most_common(1)[0][0]
            raise SettingError("shared_prompt", most, "each message of a model once")
        return cls(tenants)

    def of(self, tenant: str, model: str, prompt: Prompt) -> str:
        """Hash of the system message that a chat of a tenant begins with, where the tenant shares
        it; empty: it shares nothing."""
        if not self.tenants or not prompt.conversation.messages:
            return ""
        first = prompt.conversation.messages[0]
        if first.role not in _SYSTEM_ROLES:
            return ""
        text = (
            first.content
            if first.HasField("content")
            else "\n".join(part.text for part in first.parts)
        )
        digest = sha256(text.encode()).hexdigest()
        return digest if tenant in self.tenants.get((model, digest), ()) else ""
