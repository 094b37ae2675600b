"""One request's life: clients that leave or read slowly, stages that die, deadlines, the queue,
shutting down."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from headwater.proto import engine_pb2, engine_pb2_grpc
from tests.free_ports import free_port
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    completion_body,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    started,
)
from tests.gateway.request.test_explain import begun_before_its_deadline

ENDLESS: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True, "temperature": 0} | UNDRAFTED


def is_idle(gateway: Gateway) -> bool:
    return (
        gateway.metric("headwater_num_streams")
        == gateway.metric("headwater_num_requests_running")
        == 0
    )


def used_blocks(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        stub: Any = engine_pb2_grpc.EngineStub(channel)
        load = stub.Info(engine_pb2.InfoRequest()).load
    busy: int = load.num_running + load.num_waiting + load.num_used_blocks
    return busy


@contextlib.contextmanager
def stream(gateway: Gateway, **more: Any) -> Iterator[Iterator[str]]:
    """Lines of a stream that has begun; leaving the scope is leaving the line."""
    with gateway.client.stream(
        "POST", "/v1/completions", json=completion_body(**(ENDLESS | more), stream=True)
    ) as reply:
        lines = (line for line in reply.iter_lines() if line)
        yield lines


def test_a_client_that_leaves_ends_its_streams_and_frees_their_blocks(
    gateway: Gateway, behind: Behind
) -> None:
    with stream(gateway, n=2, temperature=1) as lines:
        next(lines)
        assert gateway.metric("headwater_num_streams") == 2
        assert used_blocks(behind.replicas[0]) > 0
    gateway.wait_until(lambda: is_idle(gateway))
    gateway.wait_until(lambda: used_blocks(behind.replicas[0]) == 0)


def test_a_client_that_leaves_before_its_answer_is_whole_ends_it_too(
    gateway: Gateway, behind: Behind
) -> None:
    more = {"ignore_eos": True} | UNDRAFTED
    with (
        openai.OpenAI(
            base_url=f"{gateway.rest}/v1", api_key="any", max_retries=0, timeout=0.3
        ) as client,
        contextlib.suppress(openai.APITimeoutError),
    ):
        client.completions.create(model=MODEL, prompt="Once", max_tokens=8000, extra_body=more)
    gateway.wait_until(lambda: is_idle(gateway))
    gateway.wait_until(lambda: used_blocks(behind.replicas[0]) == 0)


@pytest.mark.long
def test_two_hundred_streams_that_are_left_leave_nothing(gateway: Gateway, behind: Behind) -> None:
    def leave(idx: int) -> None:
        with stream(gateway, prompt=f"Story {idx}") as lines:
            next(lines)

    with ThreadPoolExecutor(25) as clients:
        list(clients.map(leave, range(200)))
    gateway.wait_until(lambda: is_idle(gateway))
    gateway.wait_until(lambda: used_blocks(behind.replicas[0]) == 0)
    assert gateway.metric("headwater_num_requests_waiting") == 0


@pytest.mark.long
def test_a_slow_reader_stalls_only_itself_and_misses_nothing(gateway: Gateway) -> None:
    """NOTE: the answer's events take far more than a kernel holds for a socket and their credit
    allows on top."""
    # One token an event: what was answered once is drafted the next time, several tokens at once.
    asked = completion_body(
        max_tokens=3000, ignore_eos=True, n=16, temperature=1, seed=1, speculative="off"
    )
    whole = gateway.client.post("/v1/completions", json=asked).json()["choices"]
    body = json.dumps(asked | {"stream": True}).encode()
    host, _, port = gateway.rest.removeprefix("http://").partition(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((host, int(port)))
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        )
        slow.sendall(
            f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        tokens = stalled_at(gateway)
        assert gateway.complete("Far away", speculative="off")["usage"]["completion_tokens"] == 8
        assert gateway.metric("headwater_num_streams") == 16
        assert tokens == gateway.metric("headwater_inter_token_latency_seconds_count") - 7
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        received = b"".join(iter(lambda: slow.recv(1 << 20), b""))
    events = [
        json.loads(line[6:])
        for line in unchunked(received).split(b"\n\n")
        if line.startswith(b"data: {")
    ]
    assert len(events) < 16 * 3000
    choices = [event["choices"][0] for event in events]
    for index in range(16):
        text = "".join(choice["text"] for choice in choices if choice["index"] == index)
        assert text == whole[index]["text"]


def stalled_at(gateway: Gateway) -> float:
    """Waits until no more tokens come; how many came so far."""
    counts = [0.0]
    while len(set(counts[-4:])) > 1 or not counts[-1]:
        time.sleep(0.4)
        counts.append(gateway.metric("headwater_inter_token_latency_seconds_count"))
    return counts[-1]


def unchunked(response: bytes) -> bytes:
    """The body of a response in chunked encoding."""
    parts = []
    position = response.index(b"\r\n\r\n") + 4
    while position < len(response):
        start = response.index(b"\r\n", position) + 2
        size = int(response[position:start], 16)
        parts.append(response[start : start + size])
        position = start + size + 2
    return b"".join(parts)


def test_a_deadline_that_passes_is_504_before_the_first_byte_and_an_event_after(
    slow_gateway: Gateway,
) -> None:
    gateway = slow_gateway
    headers = {"x-headwater-deadline-ms": "300"}
    reply = gateway.client.post("/v1/completions", json=completion_body(**ENDLESS), headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    streamed = begun_before_its_deadline(gateway, {})
    assert "event: error\ndata: " in streamed.text
    assert not streamed.text.endswith("[DONE]\n\n")
    gateway.wait_until(lambda: is_idle(gateway))


def test_requests_past_the_limit_wait_are_kept_alive_and_past_the_queue_refused(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    queued: list[str] = []

    def wait_in_line(gateway: Gateway) -> None:
        with gateway.client.stream(
            "POST", "/v1/completions", json=completion_body(stream=True)
        ) as reply:
            queued.extend(line for line in reply.iter_lines() if line)

    flags = ("--max-running=1", "--max-queued=1", "--sse-keep-alive=0.2")
    with start_gateway(behind, *flags) as gateway, ThreadPoolExecutor(1) as clients:
        with stream(gateway) as running:
            next(running)
            waiting = clients.submit(wait_in_line, gateway)
            gateway.wait_until(lambda: gateway.metric("headwater_num_requests_waiting") == 1)
            refused = gateway.client.post("/v1/completions", json=completion_body())
            assert (refused.status_code, refused.json()["error"]["type"]) == (
                429,
                "rate_limit_error",
            )
            assert refused.headers["retry-after"] == "1"
            gateway.wait_until(lambda: bool(queued))
        waiting.result(60)
    assert queued[0] == ": keep-alive"
    assert queued[-1] == "data: [DONE]"


def test_waiting_work_runs_when_its_turn_comes(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    with start_gateway(behind, "--max-running=1") as gateway, ThreadPoolExecutor(4) as clients:
        texts = list(clients.map(lambda _: gateway.complete()["choices"][0]["text"], range(8)))
    assert len(set(texts)) == 1


LONG: dict[str, Any] = {
    "max_tokens": 900,
    "ignore_eos": True,
    "temperature": 1,
    "seed": 5,
} | UNDRAFTED


def text_of(lines: Iterator[str]) -> str:
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


@pytest.mark.slow
def test_an_answer_outlives_its_engine_and_a_request_that_none_can_take_is_refused(
    gateway: Gateway, behind: Behind, start_gateway: GatewayStarter
) -> None:
    # The engines are slow, so that the answer still runs when its engine is found and killed.
    engines = [
        engine_stage(f"--replica-id={name}", "--simulated-step-seconds=0.01") for name in "ab"
    ]
    with started(*engines):
        addresses = tuple(engine.address for engine in engines)
        with start_gateway(Behind(behind.processor, behind.output_processor, addresses)) as slow:
            slow.wait_for_replicas(len(engines))
            undisturbed = gateway.complete(**LONG)
            with stream(slow, **LONG, stream_options={"include_usage": True}) as lines:
                first = next(lines)
                busy = [used_blocks(engine.address) > 0 for engine in engines]
                engines[busy.index(True)].kill()
                rest = list(lines)
            assert text_of(iter([first, *rest])) == undisturbed["choices"][0]["text"]
            usage = json.loads(rest[-2].removeprefix("data: "))["usage"]
            assert usage["completion_tokens"] == undisturbed["usage"]["completion_tokens"]
            assert slow.metric("headwater_migrations_total") == 1
            request_id = json.loads(first.removeprefix("data: "))["id"]
            (reported,) = slow.client.get(f"/v1/requests/{request_id}/explain").json()["prompts"]
            assert [each["cause"] for each in reported["attempts"]] == ["engine_gone", None]
            # Nobody has told the gateway yet; what has no token is simply sent to the other one.
            for _ in range(4):
                assert slow.complete()["usage"]["completion_tokens"] == 8
            engines[busy.index(False)].kill()
            reply = slow.client.post("/v1/completions", json=completion_body())
            assert (reply.status_code, reply.json()["error"]["type"]) == (503, "server_error")
            assert int(reply.headers["retry-after"]) >= 1
            slow.wait_until(lambda: not slow.is_ready())
            slow.wait_until(lambda: is_idle(slow))


@pytest.mark.slow
def test_an_answer_waits_for_an_output_processor_that_died_and_goes_on_with_it(
    text_folder: Path, behind: Behind, start_gateway: GatewayStarter
) -> None:
    # The system assigns this port to no other process while it is free.
    port = f"--port={free_port()}"
    first = output_processor_stage(text_folder, port)
    with started(first):
        seeds = Behind(behind.processor, first.address, behind.replicas)
        with start_gateway(seeds) as gateway:
            undisturbed = gateway.complete(**LONG)
            with stream(gateway, **LONG) as lines:
                begin = next(lines)
                first.kill()
                # What has not begun does not wait.
                reply = gateway.client.post("/v1/completions", json=completion_body())
                assert (reply.status_code, reply.json()["error"]["code"]) == (
                    503,
                    "output_processor_unavailable",
                )
                with started(output_processor_stage(text_folder, port)):
                    rest = list(lines)
            assert text_of(iter([begin, *rest])) == undisturbed["choices"][0]["text"]
            assert is_idle(gateway)


@pytest.mark.slow
def test_an_answer_outlives_its_only_engine_though_no_new_request_may_wait_for_one(
    behind: Behind, start_gateway: GatewayStarter
) -> None:
    port = f"--port={free_port()}"
    pace = "--simulated-step-seconds=0.01"
    first = engine_stage(port, pace, "--drain-limit=3")
    with started(first):
        seeds = Behind(behind.processor, behind.output_processor, (first.address,))
        with start_gateway(seeds, "--max-queued=0", "--cold-start-timeout=0.05") as gateway:
            with stream(gateway, max_tokens=700) as lines:
                next(lines)
                first.terminate()
                # The engine hands the answer over at its drain limit, when the gateway knows that
                # the engine leaves.
                first.process.wait(60)
                with started(engine_stage(port, pace)):
                    rest = list(lines)
            assert rest[-1] == "data: [DONE]", rest[-1]


def test_on_sigterm_a_gateway_finishes_what_runs_and_exits_with_0(behind: Behind) -> None:
    stage = gateway_stage(*behind.flags(), "--drain-limit=60")
    with started(stage), Gateway(stage) as gateway:
        gateway.wait_until(gateway.is_ready)
        with stream(gateway, max_tokens=700) as lines:
            next(lines)
            stage.terminate()
            assert list(lines)[-1] == "data: [DONE]"
        assert stage.process.wait(60) == 0


def test_what_is_not_done_at_the_drain_limit_ends_with_a_retriable_error(behind: Behind) -> None:
    stage = gateway_stage(*behind.flags(), "--drain-limit=0.3")
    with started(stage), Gateway(stage) as gateway:
        gateway.wait_until(gateway.is_ready)
        with stream(gateway) as lines:
            next(lines)
            stage.terminate()
            assert '"code":"draining"' in list(lines)[-1]
        assert stage.process.wait(60) == 0
