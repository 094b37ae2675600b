"""Settings of every stage's security towards other stages: certificates, and the cluster's token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import structlog

from . import cluster_key
from .cluster_key import ClusterKey, read_cluster_key
from .settings import setting
from .tls import StageTlsSettings, certificates_shown


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSecuritySettings(StageTlsSettings):
    """Settings by which stages trust each other."""

    cluster_token: str = setting(
        "", "secret that all stages share, at least 32 characters; for the environment", secret=True
    )
    cluster_token_file: str = setting(
        "", "file with that secret, further lines are old ones that still count; neither: any stage is believed"
    )

    def cluster_key(self) -> ClusterKey | None:
        """Key of the cluster's tokens. Raises `SettingError`, `OSError`."""
        return read_cluster_key(self.cluster_token, self.cluster_token_file)


@contextlib.contextmanager
def stages_secured(settings: StageSecuritySettings, *, is_stage: bool = True) -> Iterator[None]:
    """Scope whose channels, servers and buses use the settings' certificates and token."""
    key = settings.cluster_key()
    if key is None and is_stage:
        structlog.get_logger().warning(
            "no cluster token is set: this stage believes every process that reaches it, NATS or Redis",
            remedy="set HEADWATER_CLUSTER_TOKEN_FILE, the same on all stages (docs/security.md)",
        )
    with certificates_shown(settings), cluster_key.using(key):
        yield
