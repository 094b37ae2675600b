"""The socket of the public gRPC surface, with health and reflection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headwater.proto import inference_pb2, inference_pb2_grpc
from headwater.services.runtime.advertise import advertised
from headwater.services.runtime.errors import HeadwaterError
from headwater.services.runtime.grpc_errors import ErrorInterceptor, abort
from headwater.services.runtime.rpc_handlers import behavior_of, handler_like, refusing
from headwater.services.runtime.tls import bind

from ..http.listener import PATIENCE_SECONDS, SILENCE_SECONDS, ClientTls, bound, untaken_limit
from ..request.cluster import Cluster
from ..tenancy.grant import Standing
from ..tenancy.peers import peer_of_call
from ..tenancy.refused_requests import after_refusal
from .call_standings import CallStandings
from .callers import headers_of, identified
from .message_limit import MessageLimit
from .open_calls import OpenCalls
from .refusal_pace import RefusalPace
from .relay import Relay
from .service import InferenceService

PING_OPTIONS = (
    ("grpc.keepalive_time_ms", SILENCE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", PATIENCE_SECONDS * 1000),
    ("grpc.http2.ping_timeout_ms", PATIENCE_SECONDS * 1000),
    # Clients may ping as well, within reason.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
)
MAX_HEAD_BYTES = 16 * 1024
"""Bytes of a call's metadata."""
MAX_ENCODED_HEAD_BYTES = 2 * MAX_HEAD_BYTES
"""Bytes of a call's metadata on the wire, where it is seldom longer. A connection ends at a longer
head; gRPC answers shorter ones, but reads them to their end first."""
SETTINGS_SECONDS = 5
"""Seconds within which a client has to acknowledge these settings."""
MAX_STREAMS = 128
"""Number of calls that a connection carries at once. A client keeps further ones back, or opens
another connection."""
MAX_PENDING = 4096
"""Number of calls that have come and that the server has not taken yet, one at a time; gRPC cancels
further ones. NOTE: from a thousand on it would cancel some at random, of any client."""
SIZE_OPTIONS = (
    ("grpc.max_metadata_size", MAX_HEAD_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_HEAD_BYTES),
    # NOTE: gRPC (1.85) counts calls that have ended and are not freed yet, too, and refused those
    # of clients that kept to its number.
    ("grpc.max_concurrent_streams", 2 * MAX_STREAMS),
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
)
MAX_OPTION = 2**31 - 1
"""Largest value of gRPC's options, and no limit as one of bytes."""
SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
UNLIMITED = frozenset(f"/{SERVICE}/{name}" for name in ("ListModels", "Resume", "Cancel"))
"""Methods whose calls are no requests of the tenant's minute."""


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses before its message comes, as over REST, a caller whose key is not known or has used
    up its requests, and one call too many. Calls that come at once begin one by one, tenants in
    turn."""

    def __init__(self, cluster: Cluster, max_calls: int) -> None:
        self._cluster = cluster
        self._open_calls = OpenCalls(max_calls)
        self._pace = RefusalPace()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not str(details.method).startswith(f"/{SERVICE}/"):
            handler = await continuation(details)
            return handler and handler_like(handler, self._counted(behavior_of(handler)))
        caller = ""
        try:
            tenant = identified(details.invocation_metadata, self._cluster.tenants).tenant
            caller = tenant.key
            if str(details.method) not in UNLIMITED:
                # Before its message is read, and without a turn: thousands may come at once.
                self._cluster.accounts.exhausted.reject_early(tenant, Standing())
            # NOTE: interceptors run in the call's own task (grpcio 1.85).
            self._open_calls.count(tenant.key)
        except HeadwaterError as error:
            refusal = error
            self._cluster.metrics.refused.add(refusal.code)

            async def refuse(context: grpc.aio.ServicerContext[Any, Any]) -> None:
                await self._pace.wait(caller)
                await abort(context, refusal)

            return refusing(refuse)
        if not self._cluster.fair_start.begin_at_once(tenant.key):
            await self._cluster.fair_start.wait(tenant.key)
        return await continuation(details)

    def _counted(self, behavior: Any) -> Any:
        """The behavior of a call without a key, whose client is known only now."""

        async def counted(messages: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                self._open_calls.count_without_key(peer_of_call(context.peer()))
            except HeadwaterError as error:
                self._cluster.metrics.refused.add(error.code)
                await abort(context, error)
            return await behavior(messages, context)

        return counted


class GrpcListener:
    """The public service's listener; `address` is known from the start."""

    def __init__(
        self,
        cluster: Cluster,
        host: str,
        port: int,
        *,
        slow_reader_limit: float,
        slow_message_limit: float,
        max_message_bytes: int,
        max_text_bytes: int,
        max_calls: int,
        max_connections: int,
        reuse_port: bool,
        tls: ClientTls | None = None,
    ) -> None:
        """`max_calls` is the largest number of calls that are open at once.
        `slow_message_limit` is the number of seconds in which the message of a call comes."""
        longest = ("grpc.max_receive_message_length", min(max_message_bytes, MAX_OPTION))
        options = (longest, *PING_OPTIONS, *SIZE_OPTIONS)
        standings = CallStandings()

        async def count_refused(context: Any, error: HeadwaterError) -> HeadwaterError:
            headers = headers_of(context.invocation_metadata())
            standing = standings.of_this_call()
            return await after_refusal(cluster.accounts, cluster.tenants, headers, standing, error)

        def tenant_of(context: Any) -> str:
            try:
                return identified(context.invocation_metadata(), cluster.tenants).tenant.key
            except HeadwaterError:
                # A call that needs no key.
                return peer_of_call(context.peer())

        errors = ErrorInterceptor(slow_reader_limit, cluster.metrics.refused.add, count_refused)
        interceptors = [
            KeyInterceptor(cluster, max_calls),
            errors,
            MessageLimit(slow_message_limit, cluster.long_work, tenant_of),
        ]
        self._server = grpc.aio.server(interceptors=interceptors, options=options)
        self._health = health.aio.HealthServicer()
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(cluster, max_text_bytes, standings), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._tls = tls.for_grpc() if tls is not None else None
        self._socket = bound(host, port, reuse_port)
        self.address = advertised(host, self._socket.getsockname()[1])
        self._relay = Relay(
            max_connections=max_connections,
            max_head_bytes=MAX_ENCODED_HEAD_BYTES,
            max_streams=MAX_STREAMS,
            settings_seconds=SETTINGS_SECONDS,
            patience=untaken_limit(slow_reader_limit),
            on_refused=cluster.metrics.refused.add,
        )
        bind(self._server, f"unix:{self._relay.inner}", None)

    async def start(self) -> None:
        await self._server.start()
        await self._relay.start(self._socket, self._tls)
        for service in ("", SERVICE):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace: float) -> None:
        """Stops the service. Health reports it first; running calls get `grace` seconds."""
        await self._health.enter_graceful_shutdown()
        self._relay.accept_no_more()
        await self._server.stop(grace)
        self._relay.close()
