"""`headwater run`: a file of requests at a real gateway, and at a deployment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.services.cli.batch_lines import BatchFileError, read_lines
from headwater.services.cli.batch_run import BatchRun
from headwater.services.runtime.progress import silent
from tests.gateway.conftest import GatewayStarter
from tests.gateway.processes import MODEL, Behind, Gateway

CHAT = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 4}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(path: Path) -> dict[str, Any]:
    """Responses by `custom_id`."""
    read = [json.loads(line) for line in path.read_text().splitlines()]
    found = {result["custom_id"]: result["response"] for result in read}
    assert len(found) == len(read)
    return found


async def run(source: Path, output: Path, gateway: Gateway, **more: Any) -> BatchRun:
    batch = BatchRun(source, output)
    options: dict[str, Any] = {"model": MODEL, "num_at_once": 4, "report": silent}
    await batch.run(gateway.rest, {}, **options | more)
    return batch


async def test_every_endpoint_answers_and_failures_have_their_reason(
    gateway: Gateway, tmp_path: Path
) -> None:
    source = write(
        tmp_path / "requests.jsonl",
        {"custom_id": "chat", "body": CHAT},
        {"custom_id": "text", "url": "/v1/completions", "body": {"prompt": "A", "max_tokens": 3}},
        {"custom_id": "vector", "url": "/v1/embeddings", "body": {"input": "A river"}},
        {"custom_id": "bad", "method": "POST", "body": CHAT | {"temperature": 9}},
    )
    batch = await run(source, tmp_path / "results.jsonl", gateway)
    found = results(tmp_path / "results.jsonl")
    assert (batch.statuses[200], batch.num_failed) == (3, 1)
    assert found["chat"]["body"]["usage"]["completion_tokens"] == 4
    assert found["text"]["body"]["object"] == "text_completion"
    assert len(found["vector"]["body"]["data"]) == 1
    assert found["bad"]["status_code"] == 400
    assert found["bad"]["body"]["error"]["param"] == "temperature"


async def test_a_second_run_computes_what_lacks_an_answer(gateway: Gateway, tmp_path: Path) -> None:
    lines = [{"custom_id": f"{i}", "body": CHAT | {"temperature": 9 * (i == 1)}} for i in range(6)]
    source = write(tmp_path / "requests.jsonl", *lines)
    output = tmp_path / "results.jsonl"
    await run(source, output, gateway)
    first = results(output)
    # The run was killed while it wrote its last line.
    whole = output.read_text().splitlines()
    output.write_text("\n".join([*whole[:5], whole[5][:40]]))
    write(source, *({**line, "body": CHAT} for line in lines))
    again = await run(source, output, gateway)
    assert len(again.lines) == again.statuses[200] == 6 - again.num_kept
    assert again.num_kept in (4, 5)
    found = results(output)
    assert {response["status_code"] for response in found.values()} == {200}
    same = [name for name in found if found[name] == first[name]]
    assert len(same) == again.num_kept


async def test_a_line_that_meets_a_limit_waits(
    behind: Behind, start_gateway: GatewayStarter, tmp_path: Path
) -> None:
    with start_gateway(behind, "--max-running=1", "--max-queued=1") as gateway:
        lines = [{"custom_id": f"{i}", "body": CHAT} for i in range(12)]
        source = write(tmp_path / "requests.jsonl", *lines)
        batch = await run(source, tmp_path / "results.jsonl", gateway, num_at_once=12)
        assert batch.statuses == {200: 12}
        refused = gateway.client.get("/metrics").text
    assert 'headwater_requests_refused_total{code="' in refused, "no request met the limit"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: it is no JSON"),
        ('{"body": {"a": 1}}', "line 2: custom_id is missing; allowed: a string"),
        (
            '{"custom_id": "1", "body": {"a": 1}}',
            "custom_id is '1'; allowed: another than in line 1",
        ),
        ('{"custom_id": "2", "url": "/v1/audio", "body": {}}', "url is '/v1/audio'; allowed: /v1/"),
        ('{"custom_id": "2", "method": "GET", "body": {"a": 1}}', "method is 'GET'; allowed: POST"),
        ('{"custom_id": "2", "body": "x"}', "body is 'x'; allowed: the object"),
        ('{"custom_id": "2", "body": {"stream": true}}', "body.stream is true; allowed: false"),
    ],
)
def test_a_file_is_refused_by_line_and_field(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"custom_id": "1", "body": CHAT}) + "\n" + line + "\n")
    with pytest.raises(BatchFileError) as refusal:
        read_lines(path)
    assert problem in str(refusal.value)


@pytest.mark.long
def test_the_command_starts_a_deployment_for_the_file(tmp_path: Path) -> None:
    source = write(tmp_path / "requests.jsonl", {"custom_id": "1", "body": CHAT})
    command = [sys.executable, "-m", "headwater.services.cli", "run", str(source)]
    flags = ["--executor=simulated", "--replicas=1", "--max-model-len=512"]
    for kept in ("", "1 kept, "):
        done = subprocess.run(
            [*command, *flags], capture_output=True, text=True, timeout=120, check=True
        )
        answered = 0 if kept else 1
        assert f"{kept}{answered} answered, 0 failed" in done.stderr
    assert results(tmp_path / "requests.results.jsonl")["1"]["status_code"] == 200
