"""An engine for one process: its core in a child process, its server and the session with it on
this event loop, without a network."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from headwater.proto.engine_pb2 import ClientFrame, EngineFrame
from headwater.proto.output_processor_pb2 import Open

from ..engine.core.client import CoreClient
from ..engine.core.messages import Ready
from ..engine.settings import EngineSettings
from ..engine.stage.grammars import GrammarCompiler
from ..engine.stage.kv_events import KvEventLog
from ..engine.stage.replica import Replica
from ..engine.stage.server import EngineServer
from ..engine.stage.session import EngineSession
from ..output_processor.engines import EngineCall, EngineLink, Request
from ..output_processor.stream import OutputStream
from ..runtime.errors import HeadwaterError, Unavailable
from ..runtime.tasks import owned_task

ADDRESS = "this process"


class LocalEngine:
    """`link` is a running session with the server of the core."""

    def __init__(self, core: CoreClient, ready: Ready, link: EngineLink, replica: Replica) -> None:
        self.ready = ready
        self._core = core
        self._link = link
        self._replica = replica

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, settings: EngineSettings) -> AsyncIterator[LocalEngine]:
        """An engine inside the `with` block. Raises `CoreFailed`."""
        assert settings.model_folder is not None
        async with CoreClient.running(settings) as core:
            with contextlib.closing(GrammarCompiler(settings.model_folder)) as compiler:
                ready = await core.ready()
                replica = Replica(settings, ready)
                events = KvEventLog(replica.incarnation)
                server = EngineServer(core, ready, events, replica.model.name, compiler)
                await compiler.read()
                server.open(lambda batch: None)
                link = EngineLink(ADDRESS, functools.partial(_call, server, replica.epoch))
                async with (
                    owned_task(server.grammars.run(core.memory.take_mask_reports())),
                    owned_task(link.run()),
                ):
                    yield cls(core, ready, link, replica)

    def open(self, opening: Open, streams: Sequence[OutputStream]) -> Request:
        """Begins a request. Raises `Unavailable` once the core has ended."""
        if self._core.gone.is_set():
            raise Unavailable("the engine core has ended", code="engine_core_ended")
        opening.engine_address = ADDRESS
        opening.replica_id = self._replica.replica_id
        opening.epoch = self._replica.epoch
        return self._link.open(opening, streams, is_paced=False)

    def cancel(self, request: Request) -> None:
        """Ends the choices of a request that have not ended."""
        for number in list(request.streams):
            self._link.cancel(number, "cancelled")


@contextlib.asynccontextmanager
async def _call(server: EngineServer, epoch: int, _address: str) -> AsyncIterator[EngineCall]:
    async def learn_epoch() -> int:
        return epoch

    with server.session() as session:
        yield EngineCall(_SameProcess(), _LocalCall(session), learn_epoch)


class _SameProcess:
    """Channel to this process, which has nothing to prove."""

    async def proven(self, call: Any, /) -> None: ...


class _LocalCall:
    """Frames of a session both ways, read and written as those of a gRPC call."""

    def __init__(self, session: EngineSession) -> None:
        self._sent: asyncio.Queue[ClientFrame] = asyncio.Queue()
        self._frames = session.run(self._incoming())

    async def write(self, frame: ClientFrame) -> None:
        self._sent.put_nowait(frame)

    async def read(self) -> EngineFrame | Any:
        """The next frame, or `grpc.aio.EOF` when the engine has ended the session."""
        try:
            return await anext(self._frames, grpc.aio.EOF)
        except HeadwaterError:
            # The streams have been told their end, in frames before.
            return grpc.aio.EOF

    def cancel(self) -> None:
        """Does nothing: closing the generator ends the request."""

    async def _incoming(self) -> AsyncIterator[ClientFrame]:
        while True:
            yield await self._sent.get()
