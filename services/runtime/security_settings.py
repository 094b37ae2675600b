"""Settings of every stage's security towards other stages: certificates, and the cluster's token.
Imports no gRPC."""

from __future__ import annotations

from dataclasses import dataclass

from .cluster_key import ClusterKey, read_cluster_key
from .settings import setting
from .stage_tls import StageTlsSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSecuritySettings(StageTlsSettings):
    """Settings by which stages trust each other."""

    cluster_token: str = setting(
        "",
        "secret that all stages share, at least 32 characters; set it in the environment",
        secret=True,
    )
    cluster_token_file: str = setting(
        "",
        "file with the cluster token; further lines: older tokens, still accepted; no token: "
        "every stage is trusted",
    )

    def cluster_key(self) -> ClusterKey | None:
        """Key of the cluster's tokens. Raises `SettingError`, `OSError`."""
        return read_cluster_key(self.cluster_token, self.cluster_token_file)
