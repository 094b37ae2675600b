"""The cluster's token: from the environment, else from the state folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..runtime.cluster_key import ClusterKey, make_token_file, read_cluster_key
from .embedded import STREAMS_FOLDER

TOKEN_FILE = "cluster.token"
_UNSIGNED = "unsigned-tenants"
"""Marks a state folder of a version without tokens, until a line that keeps tenants has been ready
with it."""
TOKEN = "HEADWATER_CLUSTER_TOKEN"
TOKEN_PATH = "HEADWATER_CLUSTER_TOKEN_FILE"


def prepare_token(state_dir: Path, env: Mapping[str, str]) -> None:
    """Draws a token for the cluster with that state folder, unless it has one or the environment
    names another."""
    if (state_dir / TOKEN_FILE).exists() or not token_env(state_dir, env):
        return
    if (state_dir / STREAMS_FOLDER).exists():
        (state_dir / _UNSIGNED).touch()
    make_token_file(state_dir / TOKEN_FILE)


def has_unsigned_tenants(state_dir: Path) -> bool:
    """Whether NATS may keep tenants that an earlier version wrote, which its gateways are to
    sign."""
    return (state_dir / _UNSIGNED).exists()


def tenants_are_signed(state_dir: Path) -> None:
    (state_dir / _UNSIGNED).unlink(missing_ok=True)


def token_env(state_dir: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a cluster's stages find its token, unless they are set already."""
    return (
        {} if env.get(TOKEN) or env.get(TOKEN_PATH) else {TOKEN_PATH: str(state_dir / TOKEN_FILE)}
    )


def key_of_environment(env: Mapping[str, str]) -> ClusterKey | None:
    """The key that the environment names; None where it names none. Raises `SettingError`,
    `OSError`."""
    return read_cluster_key(env.get(TOKEN, ""), env.get(TOKEN_PATH, ""))


def key_of_cluster(state_dir: Path, env: Mapping[str, str]) -> ClusterKey | None:
    """The key of the cluster with that state folder; None where there is none. Raises
    `SettingError`, `OSError`."""
    token = env.get(TOKEN, "")
    path = env.get(TOKEN_PATH, "")
    own = state_dir / TOKEN_FILE
    return read_cluster_key(token, path or (str(own) if own.exists() else ""))
