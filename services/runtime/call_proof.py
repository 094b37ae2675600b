"""Calls between stages prove that both sides know the cluster's token, which itself never travels.

The caller's proof names method, time and a nonce, so that an eavesdropper can use it neither for
another method nor twice. The server answers with a code of the nonce before anything else. Nothing
is encrypted: TLS does that.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import grpc
from grpc_health.v1 import health

from .cluster_key import ClusterKey, Purpose, framed
from .freshness import WINDOW_SECONDS, is_fresh, now_ms
from .refusals import Refusals
from .rpc_handlers import behavior_of, handler_like, refusing

PROOF_SECONDS = 3.0
"""Seconds within which a server has to answer a proof with its own."""
_PROOF = "headwater-proof"
_ANSWER = "headwater-answer"
_OPEN_TO_ALL = f"/{health.SERVICE_NAME}/"
"""Prefix of methods without proof: container health checks and load balancers have no token."""


class Impostor(Exception):
    """The process at a stage's address does not know the cluster's token."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the process at {address} does not prove that it belongs to the cluster")
        self.address = address


@dataclass(frozen=True, slots=True)
class Proof:
    """Proof of one call."""

    method: str
    at_ms: int
    nonce: bytes

    @classmethod
    def new(cls, method: str) -> Proof:
        return cls(method, now_ms(), secrets.token_bytes(16))

    @property
    def _message(self) -> bytes:
        return framed(self.method.encode(), self.at_ms.to_bytes(8, "big"), self.nonce)

    def metadata(self, key: ClusterKey) -> tuple[str, str]:
        mac = key.sign(Purpose.CALL, self._message)
        return _PROOF, f"{self.at_ms}.{self.nonce.hex()}.{mac.hex()}"

    def answer(self, key: ClusterKey) -> tuple[str, str]:
        return _ANSWER, key.sign(Purpose.ANSWER, self._message).hex()

    def is_answered_by(self, answer: str, key: ClusterKey) -> bool:
        return key.believes(_unhex(answer), Purpose.ANSWER, self._message)

    @classmethod
    def read(cls, method: str, text: str, key: ClusterKey) -> Proof | None:
        """Proof in a call's metadata; None where the key did not sign it for this method."""
        at, _, rest = text.partition(".")
        nonce, _, mac = rest.partition(".")
        if not (at.isascii() and at.isdigit() and len(at) <= 15):
            return None
        proof = cls(method, int(at), _unhex(nonce))
        return proof if key.believes(_unhex(mac), Purpose.CALL, proof._message) else None


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


class ProofInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a proof, and answers the others with the server's own. Without a key it
    lets all pass.

    It has to be the first of a server's interceptors. Sessions get their initial metadata at once
    in either case, so that a caller knows before the first frame that the call has arrived.
    """

    def __init__(self, key: ClusterKey | None) -> None:
        self._key = key
        self._seen: OrderedDict[bytes, int] = OrderedDict()
        """Nonces of the last calls with the time of each call."""
        self._refusals = Refusals("call")

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(details)
        method = str(details.method)
        if handler is None or method.startswith(_OPEN_TO_ALL):
            return handler
        if self._key is None:
            return (
                _answering(handler, ())
                if handler.request_streaming and handler.response_streaming
                else handler
            )
        text = str(dict(details.invocation_metadata or ()).get(_PROOF, ""))
        proof, why = self._checked(method, text, self._key)
        if proof is None:
            self._refusals.add(why, method=method)
            refusal = f"this call needs the cluster's token: its proof is {why}"
            return refusing(lambda context: context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal))
        return _answering(handler, (proof.answer(self._key),))

    def _checked(self, method: str, text: str, key: ClusterKey) -> tuple[Proof | None, str]:
        """Proof of the call, or None and the problem."""
        if not text:
            return None, "missing"
        if (proof := Proof.read(method, text, key)) is None:
            return None, "forged"
        if not is_fresh(proof.at_ms):
            return None, "stale"
        if not self._is_new(proof):
            return None, "replayed"
        return proof, ""

    def _is_new(self, proof: Proof) -> bool:
        if proof.nonce in self._seen:
            return False
        now = now_ms()
        # A proof from a clock that is ahead stays fresh for as long again.
        while self._seen and now - next(iter(self._seen.values())) > 2 * WINDOW_SECONDS * 1000:
            self._seen.popitem(last=False)
        self._seen[proof.nonce] = now
        return True


def _answering(
    handler: grpc.RpcMethodHandler[Any, Any], metadata: tuple[tuple[str, str], ...]
) -> grpc.RpcMethodHandler[Any, Any]:
    behavior = behavior_of(handler)

    async def answered(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.send_initial_metadata(metadata)
        return await behavior(request, context)

    return handler_like(handler, answered)


class StageChannel(grpc.aio.Channel):
    """A channel whose calls carry a proof each; `proven` checks the server's answer. Without a key:
    a plain channel."""

    def __init__(self, inner: grpc.aio.Channel, address: str, key: ClusterKey | None) -> None:
        self._inner = inner
        self._address = address
        self._key = key
        self._proofs: WeakKeyDictionary[Any, Proof] = WeakKeyDictionary()

    @property
    def asks_for_proof(self) -> bool:
        return self._key is not None

    async def proven(self, call: Any) -> None:
        """Returns when the server of a call has proven itself; prompts are sent to no other.

        Raises `Impostor`, and `AioRpcError` for a call that has failed.
        """
        if self._key is None:
            return
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                metadata = dict(await call.initial_metadata() or ())
                await call.wait_for_connection()
        except TimeoutError:
            raise Impostor(self._address) from None
        if not self._proofs[call].is_answered_by(str(metadata.get(_ANSWER, "")), self._key):
            call.cancel()
            raise Impostor(self._address)

    def _proving(self, make: Callable[..., Any], method: str, *args: Any, **options: Any) -> Any:
        call = make(method, *args, **options)
        key = self._key
        if key is None:
            return call

        def proving(*args: Any, metadata: Any = None, **options: Any) -> Any:
            proof = Proof.new(method)
            made = call(*args, metadata=(*(metadata or ()), proof.metadata(key)), **options)
            self._proofs[made] = proof
            return made

        return proving

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._proving(self._inner.unary_unary, method, *args, **options)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._proving(self._inner.unary_stream, method, *args, **options)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._proving(self._inner.stream_unary, method, *args, **options)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._proving(self._inner.stream_stream, method, *args, **options)

    async def __aenter__(self) -> StageChannel:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        return await self._inner.__aexit__(*exc)

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()
