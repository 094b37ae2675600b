"""Requests of very many prompts beside those of others: what is prepared, run and ended at once has
a bound."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from headwater.gateway.request.prompt_windows import PROMPTS_AT_ONCE
from headwater.proto import processor_pb2_grpc
from headwater.proto.processor_pb2 import (
    PrepareCall,
    PreparedCall,
    PreparedFrame,
    PrepareFrame,
    PrepareReply,
    ProcessorModelsReply,
    ProcessorModelsRequest,
)
from headwater.services.runtime.listener import Listener
from headwater.services.runtime.member import Kind
from headwater.services.runtime.prober import SERVICES
from headwater.services.runtime.served_model import ServedModel
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    chat_body,
    completion_body,
    gateway_stage,
    started,
)
from tests.gateway.request.test_generation import used_blocks

ABUSER = {"x-tenant": "abuser"}
NEIGHBOUR = {"x-tenant": "neighbour"}
COMPLETIONS = "/v1/completions"
OF_ABUSER = 1
OF_NEIGHBOUR = 2
"""First tokens of their prompts."""


class HoldingProcessor(processor_pb2_grpc.ProcessorServicer):
    """Prepares nothing until it is told to; counts what it holds, by the first token of the
    prompts."""

    def __init__(self) -> None:
        self.held: list[PrepareCall] = []
        self.most_held: Counter[int] = Counter()
        self.num_seen: Counter[int] = Counter()
        self.changed = asyncio.Condition()
        self._ready: asyncio.Queue[PreparedCall] = asyncio.Queue()

    async def ListModels(
        self, request: ProcessorModelsRequest, context: Any
    ) -> ProcessorModelsReply:
        model = ServedModel(
            name=MODEL,
            revision="",
            dtype="",
            block_size=16,
            kv_format="",
            max_model_len=4096,
            vocab_size=49152,
        )
        return ProcessorModelsReply(models=[model.to_pb()])

    async def PrepareSession(
        self, incoming: AsyncIterator[PrepareFrame], context: Any
    ) -> AsyncIterator[PreparedFrame]:
        reading = asyncio.create_task(self._read(incoming))
        try:
            while True:
                yield PreparedFrame(calls=[await self._ready.get()])
        finally:
            reading.cancel()

    async def _read(self, incoming: AsyncIterator[PrepareFrame]) -> None:
        async for frame in incoming:
            for call in frame.calls:
                self.held.append(call)
                self.num_seen[_kind(call)] += 1
            for kind, count in Counter(map(_kind, self.held)).items():
                self.most_held[kind] = max(self.most_held[kind], count)
            async with self.changed:
                self.changed.notify_all()

    async def until_seen(self, kind: int, count: int) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: self.num_seen[kind] >= count)

    def answer_one(self, kind: int) -> None:
        call = next(each for each in self.held if _kind(each) == kind)
        self.held.remove(call)
        reply = PrepareReply(
            prompt_ids=call.request.prompt.token_ids.ids, sampling=call.request.sampling
        )
        reply.sampling.max_tokens = reply.sampling.n = 1
        self._ready.put_nowait(PreparedCall(id=call.id, reply=reply))


def _kind(call: PrepareCall) -> int:
    return call.request.prompt.token_ids.ids[0]


@contextlib.asynccontextmanager
async def held() -> AsyncIterator[tuple[HoldingProcessor, httpx.AsyncClient]]:
    """A processor that holds back what it is asked, and a client of a gateway before it that has no
    engine."""
    listener = Listener("127.0.0.1", 0, service=SERVICES[Kind.PROCESSOR])
    processor = HoldingProcessor()
    processor_pb2_grpc.add_ProcessorServicer_to_server(processor, listener.server)
    await listener.start()
    stage = gateway_stage(f"--processor={listener.address}")
    try:
        with started(stage), Gateway(stage) as gateway:
            serves = partial(gateway.client.get, f"/v1/models/{MODEL}")
            await asyncio.to_thread(gateway.wait_until, lambda: serves().status_code == 200)
            async with httpx.AsyncClient(base_url=gateway.rest, timeout=60) as client:
                yield processor, client
    finally:
        await listener.server.stop(None)


async def test_a_tenant_has_a_few_prompts_at_the_processor_however_many_long_requests_it_sends() -> (
    None
):
    async with held() as (processor, client), asyncio.TaskGroup() as group:
        body = completion_body([[OF_ABUSER, 5, 6]] * 60)
        abuse = [
            group.create_task(client.post(COMPLETIONS, json=body, headers=ABUSER)) for _ in range(4)
        ]
        await processor.until_seen(OF_ABUSER, PROMPTS_AT_ONCE)
        neighbour = client.post(
            COMPLETIONS, json=completion_body([OF_NEIGHBOUR, 5, 6]), headers=NEIGHBOUR
        )
        waiting = group.create_task(neighbour)
        await processor.until_seen(OF_NEIGHBOUR, 1)
        processor.answer_one(OF_NEIGHBOUR)
        for num_answered in range(4 * 60):
            await processor.until_seen(OF_ABUSER, min(num_answered + PROMPTS_AT_ONCE, 4 * 60))
            processor.answer_one(OF_ABUSER)
        # There is no engine.
        assert {reply.status_code for reply in await asyncio.gather(*abuse, waiting)} == {503}
    assert processor.num_seen == {OF_ABUSER: 4 * 60, OF_NEIGHBOUR: 1}
    assert processor.most_held == {OF_ABUSER: PROMPTS_AT_ONCE, OF_NEIGHBOUR: 1}


def test_a_request_of_many_prompts_takes_no_places_from_requests_that_wait_for_a_model(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    flags = (f"--processor={behind.processor}", f"--output-processor={behind.output_processor}")
    flags += ("--ready-needs-engine=never",)
    stage = gateway_stage(*flags, "--cold-start-timeout=60", "--max-queued=16", "--drain-limit=0.1")
    with started(stage), Gateway(stage) as gateway, ThreadPoolExecutor(2) as clients:
        gateway.wait_until(gateway.is_ready)
        asked = clients.submit(
            gateway.client.post, COMPLETIONS, json=completion_body(["x"] * 40), headers=ABUSER
        )
        gateway.wait_until(lambda: gateway.metric("headwater_model_requests") == 40)
        other = clients.submit(
            gateway.client.post, "/v1/chat/completions", json=chat_body(), headers=NEIGHBOUR
        )
        gateway.wait_until(lambda: gateway.metric("headwater_model_requests") == 41)
        assert not asked.done()
        assert not other.done()
        gateway.stage.terminate()
        assert {asked.result(60).status_code, other.result(60).status_code} == {503}


@pytest.mark.parametrize("num_prompts", [50, pytest.param(150, marks=pytest.mark.long)])
def test_prompts_of_one_request_are_answered_in_their_order_though_few_may_run_at_once(
    num_prompts: int, behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--max-running=5") as gateway:
        prompts = [f"Story {i}" for i in range(num_prompts)]
        answer = gateway.complete(prompts, max_tokens=2, n=2, temperature=1, seed=1)
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num_prompts))
        assert answer["usage"]["completion_tokens"] == 4 * num_prompts
        # Each as if it had been alone.
        alone = gateway.complete(prompts[-1], max_tokens=2, n=2, temperature=1, seed=1)
        assert [each["text"] for each in answer["choices"][-2:]] == [
            each["text"] for each in alone["choices"]
        ]


def test_a_request_of_many_prompts_that_is_left_or_cancelled_leaves_nothing_behind(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--max-running=40", "--drain-limit=0.1") as gateway:
        endless = completion_body(["x"] * 300, max_tokens=8000, ignore_eos=True, **UNDRAFTED)
        with contextlib.suppress(httpx.ReadTimeout):
            gateway.client.post(COMPLETIONS, json=endless, timeout=2)
        gateway.wait_until(lambda: _is_idle(gateway))
        with ThreadPoolExecutor(1) as client:
            asked = client.submit(gateway.client.post, COMPLETIONS, json=endless)
            gateway.wait_until(lambda: gateway.metric("headwater_num_requests_running") >= 30)
            gateway.stage.terminate()
            assert asked.result(60).json()["error"]["code"] == "draining"
        gateway.wait_until(lambda: used_blocks(behind.replicas[0]) == 0)


def _is_idle(gateway: Gateway) -> bool:
    names = ("model_requests", "num_requests_running", "num_requests_waiting", "num_streams")
    return not any(gateway.metric(f"headwater_{name}") for name in names)
