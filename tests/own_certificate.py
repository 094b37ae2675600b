"""A certificate that signs itself."""

from __future__ import annotations

import subprocess
from pathlib import Path


def own_certificate(folder: Path, *, days: int) -> tuple[Path, Path]:
    """Files of a certificate for loopback that is valid for so many days from now, and of its
    key."""
    cert, key = folder / "own.pem", folder / "own.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", str(days)),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key
