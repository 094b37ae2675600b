"""What a client says of speculation on its way to engines, and what engines say of it on the way
back."""

from __future__ import annotations

import asyncio
import builtins
import io
import json
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from rich.console import Console

from headwater.proto import inference_pb2, inference_pb2_grpc
from headwater.proto.common_pb2 import LOSS_CAUSE_HANDED_OVER, ChatMessage, Sampling, Speculative
from headwater.proto.engine_pb2 import Work
from headwater.proto.output_processor_pb2 import Open
from headwater.proto.processor_pb2 import Conversation
from headwater.services.cli.chat import Chat, converse
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway, chat_body, completion_body
from tests.gateway.scripted_output import ScriptedOutputProcessor, scripted_stages

pytestmark = pytest.mark.asyncio(loop_scope="module")
RECEIPT = {"x-headwater-receipt": "1"}
DRAFTED = Work(steps=4, mean_batch=1.0, output_tokens=10, draft_tokens=9, accepted_tokens=6)
TOLD = {
    "steps": 4,
    "tokens_per_step": 2.5,
    "draft_tokens": 9,
    "accepted_tokens": 6,
    "mean_batch_size": 1.0,
    "preemptions": 0,
    "kv_bytes": {},
    "experts": None,
    "weights": [],
}


@dataclass
class Scripted:
    """A gateway before engines that do as the test says."""

    script: ScriptedOutputProcessor
    gateway: Gateway
    client: httpx.AsyncClient

    def ask(self, path: str, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.client.post(path, json=body, headers=RECEIPT))

    async def asked(self, path: str, body: dict[str, Any]) -> Speculative:
        """What an engine hears of the body's speculation."""
        self.script.begin()
        reply = self.ask(path, body)
        opened = await self.script.open(0)
        answer(self.script, opened)
        assert (await reply).status_code == 200, (await reply).text
        return opened.add.sampling.speculative


def answer(script: ScriptedOutputProcessor, opened: Open, work: Work | None = None) -> None:
    """Ten tokens, or what is left of them."""
    (stream_id,), first = opened.add.stream_ids, opened.add.num_output_tokens
    script.start(stream_id)
    script.tokens(stream_id, first, [5] * (10 - first), "text", sum(opened.delivered_bytes))
    script.end(stream_id, 10, work)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages(behind: Behind, start_gateway: GatewayStarter) -> AsyncIterator[Scripted]:
    async with scripted_stages(behind.processor, 2) as (script, output_processor, engines):
        starting = start_gateway(Behind(behind.processor, output_processor, tuple(engines)))
        gateway = await asyncio.to_thread(starting.__enter__)
        await asyncio.to_thread(gateway.wait_for_replicas, len(engines))
        async with httpx.AsyncClient(base_url=gateway.rest, timeout=60) as client:
            yield Scripted(script, gateway, client)
        await asyncio.to_thread(starting.__exit__, None, None, None)


@pytest.fixture
def scripted(stages: Scripted) -> Scripted:
    stages.script.begin()
    return stages


@pytest.mark.parametrize(
    ("given", "received"),
    [
        (None, Speculative()),
        ("auto", Speculative(mode="auto")),
        ("off", Speculative(mode="off")),
        ({}, Speculative()),
        ({"mode": None, "max_tokens": 7}, Speculative(max_tokens=7)),
        (
            {"mode": "auto", "drafter": "suffix", "max_tokens": 31},
            Speculative(mode="auto", drafter="suffix", max_tokens=31),
        ),
    ],
    ids=str,
)
async def test_an_engine_receives_what_was_asked_over_rest(
    scripted: Scripted, given: Any, received: Speculative
) -> None:
    for path, body in (
        ("/v1/chat/completions", chat_body(max_tokens=10)),
        ("/v1/completions", completion_body(max_tokens=10)),
        (
            "/v1/responses",
            {
                "model": MODEL,
                "input": "Tell me of a river.",
                "store": False,
                "max_output_tokens": 10,
            },
        ),
    ):
        assert await scripted.asked(path, body | {"speculative": given}) == received


async def test_an_engine_receives_what_was_asked_over_grpc(scripted: Scripted) -> None:
    given = Speculative(mode="auto", drafter="ngram", max_tokens=5)
    sampling = Sampling(max_tokens=10, speculative=given)
    conversation = Conversation(messages=[ChatMessage(role="user", content="Hello")])
    async with grpc.aio.insecure_channel(scripted.gateway.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        for call, request in (
            (
                stub.Chat,
                inference_pb2.ChatRequest(
                    model=MODEL, conversation=conversation, sampling=sampling
                ),
            ),
            (
                stub.Complete,
                inference_pb2.CompleteRequest(model=MODEL, text="Hello", sampling=sampling),
            ),
        ):
            scripted.script.begin()
            reply = call(request, timeout=60)
            opened = await scripted.script.open(0)
            answer(scripted.script, opened)
            await reply
            assert opened.add.sampling.speculative == given


async def test_what_no_engine_could_follow_reaches_none(scripted: Scripted) -> None:
    asked = {"model": MODEL, "input": "x", "speculative": {"max_tokens": 32}}
    refused = await scripted.client.post("/v1/responses", json=asked)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "speculative.max_tokens")
    assert error["message"] == "speculative.max_tokens is 32; allowed: 1…31"
    refused = await scripted.client.post(
        "/v1/chat/completions", json=chat_body(speculative={"depth": 3})
    )
    assert refused.json()["error"]["message"] == (
        "speculative.depth is no field that exists; allowed: mode, drafter, max_tokens"
    )
    refused = await scripted.client.post("/v1/chat/completions", json=chat_body(speculative="on"))
    assert refused.json()["error"]["message"] == (
        "speculative is 'on'; allowed: auto, off, or an object with mode, drafter and max_tokens"
    )
    assert scripted.script.opens == []


async def test_speculation_settings_follow_a_migrated_answer_and_the_last_engine_reports_its_drafts(
    scripted: Scripted,
) -> None:
    script = scripted.script
    asked = {"drafter": "suffix", "max_tokens": 3}
    reply = scripted.ask("/v1/completions", completion_body(max_tokens=10, speculative=asked))
    first = await script.open(0)
    (stream_id,) = first.add.stream_ids
    script.start(stream_id)
    script.tokens(stream_id, 0, [7, 8], "ab", 0)
    script.lose(stream_id, LOSS_CAUSE_HANDED_OVER)
    second = await script.open(1)
    assert second.add.sampling.speculative == first.add.sampling.speculative == Speculative(**asked)
    answer(script, second, DRAFTED)
    whole = (await reply).json()
    assert whole["receipt"]["engine"] == TOLD
    (prompt,) = (await scripted.client.get(f"/v1/requests/{whole['id']}/explain")).json()["prompts"]
    assert [choice["engine"] for choice in prompt["choices"]] == [TOLD]


async def test_a_receipt_over_grpc_and_a_streams_say_what_was_drafted_and_nothing_where_an_engine_does_not(
    scripted: Scripted,
) -> None:
    script = scripted.script
    reply = scripted.ask("/v1/completions", completion_body(max_tokens=10, stream=True))
    answer(script, await script.open(0), DRAFTED)
    events = [
        line.removeprefix("data: ")
        for line in (await reply).text.splitlines()
        if line.startswith("data: {")
    ]
    assert json.loads(events[-1])["receipt"]["engine"] == TOLD
    async with grpc.aio.insecure_channel(scripted.gateway.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.CompleteRequest(model=MODEL, text="x", return_receipt=True)
        for work, reported in ((DRAFTED, TOLD), (None, None)):
            script.begin()
            call = stub.Complete(request, timeout=60)
            answer(script, await script.open(0), work)
            assert json.loads((await call).receipt_json)["engine"] == reported


@pytest.mark.parametrize(
    ("work", "printed"),
    [
        (DRAFTED, "10 answered, 2.5 tokens a step (6 of 9 drafted accepted)"),
        (Work(steps=11, output_tokens=10), "10 answered, 0.9 tokens a step"),
        (None, "10 answered"),
    ],
    ids=["drafted", "plain", "silent"],
)
async def test_the_terminal_says_how_many_tokens_a_step_brought(
    scripted: Scripted, work: Work | None, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["Tell me of a river.", "/quit"])
    monkeypatch.setattr(builtins, "input", lambda *_: next(lines))
    written = io.StringIO()

    def talk() -> None:
        with httpx.Client(base_url=f"{scripted.gateway.rest}/v1", timeout=60) as client:
            converse(
                Chat(client, MODEL, options={"max_tokens": 10}), Console(file=written, width=200)
            )

    talking = asyncio.create_task(asyncio.to_thread(talk))
    answer(scripted.script, await scripted.script.open(0), work)
    await talking
    assert [line for line in written.getvalue().splitlines() if line.endswith(printed)], (
        written.getvalue()
    )


@pytest.mark.parametrize(
    ("engine", "printed"),
    [
        (TOLD, ["2.5 tokens a step, 6 of 9 drafted accepted"]),
        (
            TOLD | {"draft_tokens": 0, "accepted_tokens": 0, "tokens_per_step": 0.91},
            ["0.9 tokens a step"],
        ),
        (None, []),
    ],
    ids=["drafted", "plain", "silent"],
)
@pytest.mark.long
async def test_the_page_shows_what_drafts_brought(
    engine: dict[str, Any] | None, printed: list[str], js_folder: Path
) -> None:
    usage = {
        "prompt_tokens": 36,
        "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    event = json.dumps(
        {"usage": usage, "receipt": {"engine": engine, "decision": {"replica_id": "e0"}}}
    )
    command = ["node", str(js_folder / "facts_client.js"), event]
    reported = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=True
    )
    first = ["10 tokens", "9.0 tokens/s", "first after 200 ms"]
    last = ["16 of 36 prompt tokens cached", "served by e0"]
    assert reported.stdout.strip().split(" · ") == [*first, *printed, *last]
