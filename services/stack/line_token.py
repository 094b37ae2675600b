"""The cluster token of a line: the one that the environment names, else one that lies in the state folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headwater.services.cluster_key import ClusterKey, read_cluster_key

TOKEN_FILE = "cluster.token"
TOKEN, TOKEN_PATH = "HEADWATER_CLUSTER_TOKEN", "HEADWATER_CLUSTER_TOKEN_FILE"


def token_env(state_dir: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a line's stages find its token, beside those that are set already."""
    return {} if env.get(TOKEN) or env.get(TOKEN_PATH) else {TOKEN_PATH: str(state_dir / TOKEN_FILE)}


def line_key(state_dir: Path, env: Mapping[str, str]) -> ClusterKey | None:
    """The key of the line with that state folder; None where there is none. Raises `SettingError`, `OSError`."""
    token, path = env.get(TOKEN, ""), env.get(TOKEN_PATH, "")
    own = state_dir / TOKEN_FILE
    return read_cluster_key(token, path or (str(own) if own.exists() else ""))
