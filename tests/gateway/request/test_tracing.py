"""One request's spans from every stage, as a real collector receives them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from headwater.gateway.request.span_attributes import hashed
from headwater.proto import inference_pb2, inference_pb2_grpc, processor_pb2
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import (
    MODEL,
    UNDRAFTED,
    Behind,
    Gateway,
    Stage,
    completion_body,
    engine_stage,
    output_processor_stage,
    processor_stage,
    started,
)
from tests.otlp_receiver import Collector, attributes_of, receiving

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
TRACESTATE = "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    with receiving() as kept:
        yield kept


def test_a_tenants_hash_is_one_of_the_master_key() -> None:
    assert hashed("ada", b"k" * 16) == hashed("ada", b"k" * 16) != hashed("eve", b"k" * 16)
    assert hashed("ada", b"k" * 16) != hashed("ada", b"l" * 16)


@pytest.mark.slow
def test_every_stage_hangs_its_spans_on_the_clients_trace(
    text_folder: Path, start_gateway: GatewayStarter, collector: tuple[Collector, str]
) -> None:
    kept, endpoint = collector
    flag = f"--otlp-endpoint={endpoint}"
    processor = processor_stage(text_folder, flag)
    output_processor = output_processor_stage(text_folder, flag)
    engine = engine_stage(flag)
    with started(processor, output_processor, engine):
        behind = Behind(processor.address, output_processor.address, (engine.address,))
        with start_gateway(behind, flag) as gateway:
            headers = {"traceparent": TRACEPARENT, "tracestate": TRACESTATE}
            assert (
                gateway.client.post(
                    "/v1/completions", json=completion_body(), headers=headers
                ).status_code
                == 200
            )
            refused = gateway.client.post(
                "/v1/completions", json=completion_body(temperature=9), headers=headers
            )
            assert refused.status_code == 400
            with grpc.insecure_channel(gateway.grpc) as channel:
                stub: Any = inference_pb2_grpc.InferenceStub(channel)
                asked = inference_pb2.CompleteRequest(
                    model=MODEL, text="Once", sampling={"max_tokens": 4}
                )
                stub.Complete(asked, metadata=list(headers.items()))
            for stage in (gateway.stage, processor, output_processor, engine):
                stage.terminate()
                assert stage.process.wait(60) == 0
    assert {span.trace_id.hex() for _, span in kept.spans} == {TRACE}
    assert {span.trace_state for _, span in kept.spans} == {TRACESTATE}
    by_id = {span.span_id: span.name for _, span in kept.spans}
    tree = {
        (name, span.name, by_id.get(span.parent_span_id, span.parent_span_id.hex()))
        for name, span in kept.spans
    }
    assert tree == {
        ("headwater-gateway", "POST /v1/completions", PARENT),
        ("headwater-gateway", "Inference/Complete", PARENT),
        *(
            edge
            for root in ("POST /v1/completions", "Inference/Complete")
            for edge in (
                *(
                    ("headwater-gateway", part, root)
                    for part in ("prepare", "replica", "queue", "route", "stream")
                ),
                ("headwater-processor", "Prepare", root),
                ("headwater-output-processor", "output", root),
            )
        ),
        ("headwater-engine", "engine", "output"),
        *(("headwater-engine", part, "engine") for part in ("queue", "prefill", "decode")),
    }
    [root] = [
        span
        for _, span in kept.spans
        if span.name == "POST /v1/completions" and not span.status.message
    ]
    reported = attributes_of(root)
    assert reported.pop("headwater.request_id")
    assert re.fullmatch(r"[0-9a-f]{16}", reported.pop("headwater.tenant"))
    assert reported == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "headwater",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 8,
        "headwater.cached_tokens": 0,
    }
    [called] = [span for _, span in kept.spans if span.name == "Inference/Complete"]
    reported = attributes_of(called)
    assert (reported["rpc.method"], reported["gen_ai.request.model"]) == ("Complete", MODEL)
    kinds = {(span.name, span.kind) for name, span in kept.spans if name == "headwater-gateway"}
    server, client, internal = Span.SPAN_KIND_SERVER, Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_INTERNAL
    assert kinds >= {
        ("POST /v1/completions", server),
        ("prepare", client),
        ("stream", client),
        ("queue", internal),
    }
    refusal = [span for _, span in kept.spans if span.status.message == "invalid_value"]
    assert 400 in {attributes_of(span).get("http.response.status_code") for span in refusal}
    failed = {
        (name, span.name) for name, span in kept.spans if span.status.message == "invalid_value"
    }
    codes = {span.status.message for _, span in kept.spans if span.status.message}
    assert len(codes) == 1, (failed, codes)
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for _, span in kept.spans)


def test_an_answer_that_moves_has_a_span_that_is_linked_to_the_one_before(
    behind: Behind, start_gateway: GatewayStarter, collector: tuple[Collector, str]
) -> None:
    kept, endpoint = collector
    engines = [engine_stage("--simulated-step-seconds=0.01") for _ in range(2)]
    with started(*engines):
        two = Behind(
            behind.processor, behind.output_processor, tuple(each.address for each in engines)
        )
        with start_gateway(two, f"--otlp-endpoint={endpoint}") as gateway:
            gateway.wait_for_replicas(2)
            body = completion_body(max_tokens=300, ignore_eos=True, stream=True) | UNDRAFTED
            with gateway.client.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.iter_lines()
                next(line for line in lines if line.startswith("data: {"))
                dispatched_to(gateway, engines).kill()
                assert list(lines)[-2] == "data: [DONE]"
            gateway.stage.terminate()
            assert gateway.stage.process.wait(60) == 0
    first, second = sorted(
        (span for _, span in kept.spans if span.name == "stream"),
        key=lambda span: attributes_of(span)["attempt"],
    )
    assert [link.span_id for link in second.links] == [first.span_id]
    assert not first.links


def dispatched_to(gateway: Gateway, engines: list[Stage]) -> Stage:
    """The engine that runs the only request."""
    reported = gateway.first(
        lambda: gateway.client.get("/admin/replicas").json()["data"],
        lambda known: sum(each["num_running"] for each in known) == 1,
    )
    [address] = [each["address"] for each in reported if each["num_running"]]
    return next(each for each in engines if each.address == address)


def test_a_request_of_another_library_is_prepared_without_a_trace(behind: Behind) -> None:
    """The processor needs no traceparent."""
    with grpc.insecure_channel(behind.processor) as channel:
        from headwater.proto import processor_pb2_grpc  # noqa: PLC0415

        stub: Any = processor_pb2_grpc.ProcessorStub(channel)
        request = processor_pb2.PrepareRequest(
            model=MODEL, prompt=processor_pb2.Prompt(text="Once"), cache_namespace=b"0" * 16
        )
        assert stub.Prepare(request).prompt_ids
