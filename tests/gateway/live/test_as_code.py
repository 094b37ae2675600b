"""Programs that the console writes for a chat."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from headwater.proto import inference_pb2

CLIENT = Path(__file__).parents[1] / "js" / "code_client.js"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
BODY = {
    "model": "small",
    "messages": [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ],
    "tools": [TOOL],
    "max_tokens": 5,
    "temperature": 0.5,
    "stop": ["."],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": True}},
}


def program(scheme: str) -> str:
    if shutil.which("node") is None:
        pytest.skip("node is missing")
    return subprocess.check_output(["node", str(CLIENT), scheme, json.dumps(BODY)], text=True)


@pytest.mark.parametrize(
    ("scheme", "channel"), [("https", "secure_channel"), ("http", "insecure_channel")]
)
def test_a_program_for_grpc_speaks_tls_where_the_page_does(scheme: str, channel: str) -> None:
    names = {
        node.func.attr
        for node in ast.walk(ast.parse(program(scheme)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert names & {"secure_channel", "insecure_channel"} == {channel}


def test_its_request_has_the_fields_of_the_message() -> None:
    given: Any = next(
        node.args[0]
        for node in ast.walk(ast.parse(program("http")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "ParseDict"
    )
    request = ParseDict(ast.literal_eval(given), inference_pb2.ChatRequest())
    assert request.sampling.max_tokens == 5
    assert request.sampling.structured_output.json_schema == "true"
    assert request.conversation.tools[0].name == "weather"
    assert request.conversation.messages[1].tool_calls[0].arguments == "{}"
    assert request.conversation.messages[2].tool_call_id == "1"
