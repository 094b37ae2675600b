"""A batch on a line that is stopped and started again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.line.conftest import MODEL, Line

NUM_LINES = 200


def upload_and_start(client: openai.OpenAI) -> str:
    def request(number: int) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": f"Story {number}", "max_tokens": 100, "ignore_eos": True}
        return {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}

    content = "\n".join(json.dumps(request(number)) for number in range(NUM_LINES))
    file = client.files.create(file=("in.jsonl", content.encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    ).id


def client_of(line: Line) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{line.record.rest}/v1", api_key="any")


@pytest.mark.long
def test_a_batch_goes_on_where_it_was_when_the_whole_line_was_restarted(tmp_path: Path) -> None:
    env = {"HEADWATER_BATCH_CONCURRENCY": "8"}
    flags = ("--executor=simulated", "--replicas=1", "--gateways=2")
    with Line(tmp_path, *flags, env=env) as line, client_of(line) as client:
        batch_id = upload_and_start(client)
        line.wait_for(
            lambda: client.batches.retrieve(batch_id).request_counts.completed >= 10,
            60,
            "it does not begin",
        )
        assert line.stop() == 0
    with Line(tmp_path, *flags, env=env, log_name="again.log") as again, client_of(again) as client:
        assert client.batches.retrieve(batch_id).status == "in_progress"
        again.wait_for(
            lambda: client.batches.retrieve(batch_id).status == "completed", 90, "it does not go on"
        )
        batch = client.batches.retrieve(batch_id)
        assert batch.output_file_id is not None
        lines = client.files.content(batch.output_file_id).text.splitlines()
        assert again.stop() == 0
    assert sorted(int(json.loads(each)["custom_id"]) for each in lines) == list(range(NUM_LINES))
