"""Nothing that a line writes or answers holds a secret: keys, administrators' keys, passwords in
addresses."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest

from headwater.proto import inference_pb2, inference_pb2_grpc
from tests.gateway.processes import (
    MODEL,
    Gateway,
    Stage,
    chat_body,
    engine_stage,
    gateway_stage,
    output_processor_stage,
    processor_stage,
)

ADMIN = f"admin-{uuid.uuid4().hex}"
MASTER = f"master-{uuid.uuid4().hex}"
NATS_WORD = f"nats-{uuid.uuid4().hex}"
REDIS_WORD = f"redis-{uuid.uuid4().hex}"
BAD_KEY = f"hw-abc-{uuid.uuid4().hex}"
LOUD = "--log-level=debug"


def with_password(url: str, word: str, user: str) -> str:
    return url.replace("://", f"://{user}:{word}@")


@pytest.mark.slow
def test_no_secret_is_in_what_a_line_writes_or_answers(
    text_folder: Path, nats_url: str, shared_redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_ADMIN_KEY", ADMIN)
    monkeypatch.setenv("HEADWATER_MASTER_KEY", MASTER)
    facts = (
        f"--nats-url={with_password(nats_url, NATS_WORD, 'someone')}",
        f"--redis-url={with_password(shared_redis_url, REDIS_WORD, 'default')}",
    )
    nowhere = (
        f"--nats-url=nats://u:{NATS_WORD}@127.0.0.1:1",
        f"--redis-url=redis://u:{REDIS_WORD}@127.0.0.1:1",
    )
    behind = [
        processor_stage(text_folder, *facts, LOUD),
        output_processor_stage(text_folder, *facts, LOUD),
        engine_stage(*facts, LOUD),
    ]
    seeds: list[str] = []
    stages: list[Stage] = list(behind)
    try:
        for flag, stage in zip(("processor", "output-processor", "replica"), behind, strict=True):
            seeds.append(f"--{flag}={stage.wait_ready().address}")
        stages += [gateway_stage(*seeds, *urls, LOUD) for urls in (facts, nowhere)]
        with Gateway(stages[3].wait_ready()) as gateway, Gateway(stages[4].wait_ready()) as lost:
            gateway.wait_until(gateway.is_ready)
            key, printed = ask_about_everything(gateway)
            printed.append(
                lost.client.post("/v1/chat/completions", json=chat_body(), headers=bearer(key)).text
            )
            printed.append(lost.client.get("/metrics").text)
    finally:
        said_and_written = [stage.close() for stage in stages]
    logs = "\n".join(said_and_written)
    assert '"level": "debug"' in logs, "they were as loud as can be"
    secrets = (ADMIN, MASTER, NATS_WORD, REDIS_WORD, BAD_KEY, key, key.split("-", 2)[2])
    for text in [*printed, logs]:
        assert [secret for secret in secrets if secret in text] == [], text[-2000:]


def ask_about_everything(gateway: Gateway) -> tuple[str, list[str]]:
    """A tenant's key, and all answers but the one that shows it."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    made = gateway.client.post(
        "/admin/tenants", json={"id": name, "limits": {"concurrency": 9}}, headers=bearer(ADMIN)
    )
    key: str = made.json()["key"]
    gateway.wait_until(
        lambda: gateway.client.get("/v1/models", headers=bearer(key)).status_code == 200
    )
    headers = bearer(key) | {"x-headwater-receipt": "1"}
    answer = gateway.client.post("/v1/chat/completions", json=chat_body(), headers=headers)
    assert answer.status_code == 200
    refused = [
        gateway.client.post("/v1/chat/completions", json=chat_body(), headers=bearer(BAD_KEY)),
        gateway.client.get("/admin/tenants", headers=bearer(BAD_KEY)),
        gateway.client.post("/v1/chat/completions", json={"model": 5}, headers=bearer(key)),
        gateway.client.get("/v1/models", headers={"authorization": BAD_KEY}),
    ]
    assert [each.status_code for each in refused] == [401, 403, 400, 401]
    paths = (
        f"/admin/tenants/{name}",
        f"/admin/tenants/{name}/usage",
        "/admin/audit",
        "/admin/tenants",
    )
    reported = [gateway.client.get(path, headers=bearer(ADMIN)) for path in paths]
    reported.append(
        gateway.client.get(
            f"/v1/requests/{answer.headers['x-request-id']}/explain", headers=bearer(key)
        )
    )
    assert {each.status_code for each in reported} == {200}
    printed = [each.text for each in (answer, *refused, *reported, gateway.client.get("/metrics"))]
    return key, [*printed, refused_over_grpc(gateway)]


def refused_over_grpc(gateway: Gateway) -> str:
    with grpc.insecure_channel(gateway.grpc) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Complete(
                inference_pb2.CompleteRequest(model=MODEL, text="hi"),
                metadata=(("authorization", f"Bearer {BAD_KEY}"),),
            )
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return f"{raised.value.details()} {raised.value.trailing_metadata()}"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
