"""The scope in which a stage trusts other stages, as its settings say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import structlog

from . import cluster_key
from .security_settings import StageSecuritySettings
from .tls import certificates_shown


@contextlib.contextmanager
def stages_secured(settings: StageSecuritySettings) -> Iterator[None]:
    """Scope whose channels, servers and buses use the settings' certificates and token."""
    key = settings.cluster_key()
    if key is None:
        structlog.get_logger().warning(
            "no cluster token is set: this stage believes every process that reaches it, NATS "
            "or Redis",
            remedy="set HEADWATER_CLUSTER_TOKEN_FILE, the same on all stages (docs/security.md)",
        )
    with certificates_shown(settings), cluster_key.using(key):
        yield
