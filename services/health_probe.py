"""Asks a stage whether it serves, for container health checks: `health_probe ADDRESS`, status 0 when it does.

ADDRESS is host:port of a gRPC server, or a URL that answers 200.
"""

from __future__ import annotations

import sys
from urllib.error import URLError
from urllib.request import urlopen

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LIMIT = 3.0


def serves(address: str) -> bool:
    if address.startswith(("http://", "https://")):
        try:
            with urlopen(address, timeout=LIMIT) as reply:
                return bool(reply.status == 200)
        except URLError:
            return False
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(0 if serves(sys.argv[1]) else 1)
