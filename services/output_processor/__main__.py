"""The output processor: sends requests to engines and turns their tokens into text.

Its only state is open streams, and logs of those that can be resumed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from headwater.proto import output_processor_pb2, output_processor_pb2_grpc

from ..models.manifest import ModelFolderError, ModelManifest
from ..runtime.bus import Bus
from ..runtime.errors import NotFound
from ..runtime.gateway_identity import Gateway
from ..runtime.member import Kind
from ..runtime.process import configure_logging, in_one_line, run_stage
from ..runtime.served_model import ServedModel
from ..runtime.settings import SettingError, read_settings
from ..runtime.stage_security import stages_secured
from ..runtime.tracing import NO_TRACING, Tracing, tracing_to
from ..runtime.unread_variables import warn_of_unread_variables
from ..text.model import load_tokenizer, names_of
from ..text.stage import TextStageSettings, serve_stage
from ..text.token_table import UnknownDecoder
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_files_error import TokenizerFilesError
from .engines import EngineLinks
from .pending_usage import PendingUsage
from .session import GatewaySession
from .stream_logs import StreamLogs


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputProcessorSettings(TextStageSettings):
    """The output processor: turns engines' tokens into text."""


class OutputProcessor(output_processor_pb2_grpc.OutputProcessorServicer):
    """The service: one session with each gateway. All of them share one session with each
    engine."""

    def __init__(
        self,
        tokenizers: Mapping[str, Tokenizer],
        links: EngineLinks,
        tracing: Tracing = NO_TRACING,
        usage: PendingUsage | None = None,
    ) -> None:
        self._tokenizers = tokenizers
        self._links = links
        self._tracing = tracing
        self._sessions: set[GatewaySession] = set()
        self._logs = StreamLogs(usage)

    async def Session(
        self,
        request_iterator: AsyncIterator[output_processor_pb2.GatewayFrame],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[output_processor_pb2.OutputFrame]:
        gateway = Gateway.of(context.invocation_metadata() or ())
        session = GatewaySession(self._tokenizers, self._links, self._tracing, self._logs, gateway)
        self._sessions.add(session)
        try:
            async for frame in session.run(request_iterator):
                yield frame
        finally:
            self._sessions.discard(session)

    async def FindStream(
        self,
        request: output_processor_pb2.FindStreamRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[output_processor_pb2.FoundStream]:
        if (log := self._logs.find(request.request_id, request.tenant)) is None:
            raise NotFound("stream", request.request_id)
        for part in log.found():
            yield part

    async def ForgetStream(
        self,
        request: output_processor_pb2.FindStreamRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> output_processor_pb2.ForgetStreamReply:
        if (log := self._logs.find(request.request_id, request.tenant)) is None:
            raise NotFound("stream", request.request_id)
        self._logs.drop(log)
        return output_processor_pb2.ForgetStreamReply()

    def leave(self) -> None:
        """Refuses new streams from now on; each session ends with its last stream."""
        self._logs.usage.leave()
        for session in self._sessions:
            session.leave("the output processor is leaving")


async def serve(settings: OutputProcessorSettings) -> None:
    """Runs the stage until SIGTERM."""
    folders = names_of(settings.model_folder, settings.served_model_name)
    tokenizers = {name: load_tokenizer(path) for path, name in folders}
    for tokenizer in tokenizers.values():
        # Built now, so that the first request does not wait for it.
        assert len(tokenizer.table)
    models = [_served(path, name) for path, name in folders]
    with tracing_to(settings.otlp_endpoint, "output-processor", settings.replica_id) as tracing:
        async with (
            EngineLinks() as links,
            Bus.open(settings.nats_url or None) as bus,
            PendingUsage(bus).running() as usage,
        ):
            servicer = OutputProcessor(tokenizers, links, tracing, usage)
            add = functools.partial(
                output_processor_pb2_grpc.add_OutputProcessorServicer_to_server, servicer
            )
            await serve_stage(
                settings,
                Kind.OUTPUT_PROCESSOR,
                models,
                add,
                servicer.leave,
                num_running=links.num_requests,
                shared_bus=bus,
            )


def _served(folder: Path, name: str) -> ServedModel:
    """Entry of the model that gateways read; the fields of its KV cache belong to engines and stay
    empty."""
    manifest = ModelManifest.read(folder)
    return ServedModel(
        name=name,
        revision=manifest.revision,
        dtype=manifest.dtype,
        block_size=0,
        kv_format="",
        max_model_len=manifest.max_model_len,
        vocab_size=manifest.vocab_size,
    )


def main() -> None:
    faults = SettingError, ModelFolderError, TokenizerFilesError, UnknownDecoder, OSError
    with in_one_line("output-processor", *faults):
        settings = read_settings(
            OutputProcessorSettings, sys.argv[1:], prog="headwater serve output-processor"
        )
        configure_logging("output-processor", settings.log_level)
        warn_of_unread_variables()
        with stages_secured(settings):
            run_stage(serve(settings))


if __name__ == "__main__":
    main()
