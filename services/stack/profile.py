"""A profile: settings of a line's engines that were found to be good, in a file that `headwater up
--profile` loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..runtime.settings import SettingError

Positive = Annotated[int, msgspec.Meta(ge=1)]


class EngineProfile(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, frozen=True
):
    """Settings of an engine by the engine's own names; None leaves one to the engine."""

    max_num_batched_tokens: Positive | None = None
    max_num_seqs: Positive | None = None
    long_prefill_chunk: Annotated[int, msgspec.Meta(ge=0)] | None = None
    policy: str | None = None


class Profile(
    msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, frozen=True
):
    """Settings of a cluster that a tuned profile brings. A flag or a variable that says otherwise
    wins."""

    replicas: Positive | None = None
    engine: EngineProfile = EngineProfile()
    measured: dict[str, Any] = {}
    """How it was found; for people."""

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Raises `SettingError`."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as fault:
            raise SettingError(
                "profile", str(path), f"a readable file ({fault.strerror})"
            ) from None
        except msgspec.DecodeError as fault:
            raise SettingError(
                "profile", str(path), f"a file that `headwater bench tune` wrote ({fault})"
            ) from None

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    def engine_flags(self, env: Mapping[str, str]) -> list[str]:
        """Flags of an engine, but for what its variables in `env` already say."""
        given = msgspec.structs.asdict(self.engine)
        return [
            f"--{name.replace('_', '-')}={value}"
            for name, value in given.items()
            if value is not None and f"HEADWATER_{name.upper()}" not in env
        ]
