"""Settings of TLS between stages, and the certificates that they name. Imports no gRPC: processes
that speak none read the settings too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .settings import require, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTlsSettings:
    """Settings of TLS between stages: all of them or none."""

    stage_tls_cert_file: str = setting(
        "", "PEM certificate that this stage shows to other stages; none: no TLS"
    )
    stage_tls_key_file: str = setting("", "PEM private key of that certificate")
    stage_tls_ca_file: str = setting("", "PEM certificates of those who sign for stages")
    stage_tls_name: str = setting(
        "", "name in the certificates of all stages; default: the address of each"
    )

    def stage_tls(self) -> StageTls | None:
        """Certificates of the settings. Raises `SettingError` where only some are set, `OSError`
        for files that cannot be read."""
        paths = {
            "stage_tls_cert_file": self.stage_tls_cert_file,
            "stage_tls_key_file": self.stage_tls_key_file,
            "stage_tls_ca_file": self.stage_tls_ca_file,
        }
        if not any(paths.values()):
            return None
        for name, path in paths.items():
            require(
                path,
                name,
                path,
                "a file, as the other two of certificate, key and authority are given",
            )
        cert, key, ca = (Path(path).read_bytes() for path in paths.values())
        return StageTls(cert, key, ca, self.stage_tls_name)


@dataclass(frozen=True, slots=True, repr=False)
class StageTls:
    """Contents of the files."""

    cert: bytes
    key: bytes
    ca: bytes
    name: str
