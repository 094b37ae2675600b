"""Passwords of a cluster's NATS and Redis, one a role, and the files that hold them: theirs alone
to read.

A folder: `nats/nats.conf` and `redis/users.acl` for the servers, `ROLE/stage.env` with the
variables of a stage of that role, `gateway/master.key`. Knows nothing about running servers.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import msgspec

from ..runtime.owner_file import write_owner_file
from .roles import NATS_RIGHTS, VALKEY_RIGHTS, Role

PASSWORDS_FILE = "passwords.json"
NATS_FILE = "nats/nats.conf"
ACL_FILE = "redis/users.acl"
ENV_FILE = "stage.env"
MASTER_KEY_FILE = "master.key"


@dataclass(frozen=True, slots=True, repr=False)
class Passwords:
    """Random ones, by role."""

    by_role: Mapping[Role, str]

    @classmethod
    def new(cls) -> Passwords:
        return cls({role: secrets.token_urlsafe(32) for role in Role})

    @classmethod
    def kept(cls, folder: Path) -> Passwords:
        """Passwords of an earlier call with the same folder; new ones where there was none."""
        path = folder / PASSWORDS_FILE
        if path.exists():
            known = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
            if known.keys() >= {role.value for role in Role}:
                return cls({role: known[role.value] for role in Role})
        passwords = cls.new()
        write_owner_file(
            path,
            json.dumps({role.value: word for role, word in passwords.by_role.items()}).encode(),
        )
        return passwords

    def url(self, role: Role, url: str) -> str:
        """The server's address with the role's user and password; without a user if the role has
        none."""
        if url.startswith("redis") and role not in VALKEY_RIGHTS:
            return ""
        at = urlsplit(url)
        return urlunsplit(at._replace(netloc=f"{role.value}:{self.by_role[role]}@{at.netloc}"))

    def nats_config(self) -> str:
        """Configuration of NATS: users of one account, each with the subjects of its stage."""
        users = [
            {
                "user": role.value,
                "password": self.by_role[role],
                "permissions": {
                    "publish": {"allow": list(rights.publish)},
                    "subscribe": {"allow": list(rights.subscribe)},
                },
            }
            for role, rights in NATS_RIGHTS.items()
        ]
        # The format takes JSON.
        return json.dumps({"authorization": {"users": users}}, indent=2) + "\n"

    def valkey_acl(self) -> str:
        """Access list of Valkey: no user without a password, and digests in place of passwords."""
        lines = ["user default off resetpass resetkeys resetchannels -@all"]
        for role, rights in VALKEY_RIGHTS.items():
            digest = hashlib.sha256(self.by_role[role].encode()).hexdigest()
            lines.append(f"user {role.value} on #{digest} {rights}")
        return "\n".join(lines) + "\n"

    def write_servers(self, folder: Path) -> None:
        write_owner_file(folder / NATS_FILE, self.nats_config().encode())
        write_owner_file(folder / ACL_FILE, self.valkey_acl().encode())


def keep_master_key(path: Path) -> None:
    """Draws the secret that separates tenants' cached prefixes, unless the file exists. All
    gateways have the same one, and a new one would hide the blocks that earlier starts wrote to a
    disk."""
    if not path.exists():
        write_owner_file(path, secrets.token_urlsafe(32).encode())


@dataclass(frozen=True, slots=True, repr=False)
class ServerAccess:
    """Addresses of NATS and Redis for each role. Without passwords: servers that somebody else
    runs, as they were named."""

    nats_url: str
    redis_url: str
    nats_passwords: Passwords | None = None
    redis_passwords: Passwords | None = None

    def nats(self, role: Role) -> str:
        return (
            self.nats_passwords.url(role, self.nats_url) if self.nats_passwords else self.nats_url
        )

    def redis(self, role: Role) -> str:
        return (
            self.redis_passwords.url(role, self.redis_url)
            if self.redis_passwords
            else self.redis_url
        )

    def env(self, role: Role) -> dict[str, str]:
        """Variables of a stage: a command line would show the passwords to everyone on the
        machine."""
        return {"HEADWATER_NATS_URL": self.nats(role), "HEADWATER_REDIS_URL": self.redis(role)}

    def write_stages(self, folder: Path, more: Mapping[str, str]) -> None:
        """Writes a file for each role, which a shell or a container's runtime reads."""
        for role in Role:
            # Quoted for a shell: a value of several tokens has spaces.
            lines = [f"{name}='{value}'\n" for name, value in {**self.env(role), **more}.items()]
            write_owner_file(folder / role.value / ENV_FILE, "".join(lines).encode())
