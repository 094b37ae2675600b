"""Asks a stage whether it serves, for container health checks: `health_probe [FLAGS] ADDRESS`,
status 0 when it does.

ADDRESS is host:port of a gRPC server, also with an IPv6 address without brackets, as Kubernetes
gives a pod's, or a URL that answers 200. The flags, and the variables, are the stage's own: with
its certificates the probe asks as another stage would, or, for a URL, as the gateway itself.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from .advertise import joined
from .channel import open_channel
from .settings import read_settings, setting
from .stage_tls import StageTlsSettings
from .tls import certificates_shown, own_gateway_context

LIMIT = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings(StageTlsSettings):
    """Asks a stage whether it serves."""

    tls_cert_file: str = setting("", "PEM certificate of the gateway that a URL asks")
    tls_key_file: str = setting("", "PEM private key of that certificate")
    service: str = setting(
        "", "service of a gRPC server that is asked about: live, or none for the whole"
    )


def is_served(url: str, settings: ProbeSettings) -> bool:
    cert = settings.tls_cert_file
    key = settings.tls_key_file
    context = (
        own_gateway_context(Path(cert), Path(key)) if cert and url.startswith("https://") else None
    )
    try:
        with urlopen(url, timeout=LIMIT, context=context) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


async def serves(address: str, service: str = "") -> bool:
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=LIMIT)
        except grpc.aio.AioRpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def main(argv: list[str]) -> bool:
    settings = read_settings(ProbeSettings, argv[:-1], prog="health_probe")
    address = argv[-1]
    if address.startswith(("http://", "https://")):
        return is_served(address, settings)
    with certificates_shown(settings):
        host, _, port = address.rpartition(":")
        return asyncio.run(serves(joined(host.strip("[]"), port), settings.service))


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
