"""Requests of a hostile client over REST: a path, a body, and headers besides the usual ones.

Each builder takes the model's name and the number of the request; some make every request the same.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from . import constraints, values

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Post:
    path: str
    body: bytes
    """Bytes as they are sent: compressed or in chunks where `headers` say so."""
    headers: dict[str, str] = field(default_factory=dict)


Builder = Callable[[str, int], Post]
"""Request by the model's name and the number of the request."""


def value(of: Callable[[], bytes]) -> Builder:
    """Good completions with one unknown field that holds the value."""
    return lambda model, idx: Post(COMPLETIONS, _completion(model, b'"x":' + of()))


def gzipped(of: Callable[[], bytes]) -> Builder:
    """The same bodies, compressed."""
    headers = {"content-encoding": "gzip"}
    return lambda model, idx: Post(COMPLETIONS, _compressed(model, of), headers)


def template_value(of: Callable[[], bytes]) -> Builder:
    """Chats that hand the value to the chat template."""

    def build(model: str, idx: int) -> Post:
        asked = json.dumps(_conversation(model)).encode()
        return Post(CHAT, b'%s,"chat_template_kwargs":{"x":%s}}' % (asked[:-1], of()))

    return build


def schema(of: Callable[[int], constraints.Schema]) -> Builder:
    """Chats whose answers have to follow a schema."""

    def build(model: str, idx: int) -> Post:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": of(idx)}}
        return _chat(model, {"response_format": form})

    return build


def regex(of: Callable[[int], str]) -> Builder:
    """Chats whose answers have to match a regular expression."""
    return lambda model, idx: _chat(model, {"structured_outputs": {"regex": of(idx)}})


def doubled_coding(coding: str) -> Builder:
    """Bodies in chunks that name a second transfer coding."""

    def build(model: str, idx: int) -> Post:
        body = _completion(model, b'"x":1')
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        return Post(COMPLETIONS, chunks, {"transfer-encoding": coding})

    return build


def bomb(model: str, idx: int) -> Post:
    """64 MiB in 64 kB."""
    return Post(COMPLETIONS, _bomb(), {"content-encoding": "gzip"})


def broken_end(model: str, idx: int) -> Post:
    """A body whose last brace is missing, behind three megabytes of good JSON."""
    return Post(COMPLETIONS, _completion(model, b'"x":' + values.keys())[:-1])


def long_prompt(model: str, idx: int) -> Post:
    """A prompt of 400 kB, far beyond the context: it is tokenized before it is refused."""
    return _post(COMPLETIONS, {"model": model, "prompt": _text(400_000, idx), "max_tokens": 1})


def one_bad_prompt(model: str, idx: int) -> Post:
    """200 good prompts, and a last one beyond the context."""
    lengths = [1000] * 200 + [60_000]
    prompts = [_text(length, 1000 * idx + i) for i, length in enumerate(lengths)]
    return _post(COMPLETIONS, {"model": model, "prompt": prompts, "max_tokens": 1})


def small_completion(model: str, idx: int) -> Post:
    """A good request for one token, after a prompt of its own."""
    return _post(COMPLETIONS, {"model": model, "prompt": f"{idx} Hi", "max_tokens": 1})


def unknown_model(model: str, idx: int) -> Post:
    asked = {"model": f"no-such-model-{idx}", "prompt": _text(20_000, idx)}
    return _post(COMPLETIONS, asked)


def template_kwargs(model: str, idx: int) -> Post:
    """Variables of the chat template: 40,000 lists of numbers."""
    return Post(CHAT, _template_kwargs(model))


def many_tools(model: str, idx: int) -> Post:
    """400 tools of 40 parameters."""
    return Post(CHAT, _many_tools(model))


def cut_history(model: str, idx: int) -> Post:
    """2,000 turns in which the model called a tool, each with arguments that are cut off."""
    return Post(CHAT, _cut_history(model))


def _completion(model: str, more: bytes) -> bytes:
    return b'{"model":%s,"prompt":"x","max_tokens":1,%s}' % (json.dumps(model).encode(), more)


def _chat(model: str, fields: dict[str, Any]) -> Post:
    return _post(CHAT, _conversation(model) | fields)


def _conversation(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def _post(path: str, body: dict[str, Any]) -> Post:
    return Post(path, json.dumps(body).encode())


def _text(length: int, idx: int) -> str:
    """A number and words of random letters, so that no two requests share a prefix."""
    return f"{idx} {_letters()[:length]}"


@cache
def _letters() -> str:
    # More words than a tokenizer remembers.
    return "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz    ", k=400_000))


@cache
def _compressed(model: str, value: Callable[[], bytes]) -> bytes:
    return gzip.compress(_completion(model, b'"x":' + value()))


@cache
def _bomb() -> bytes:
    return gzip.compress(bytes(64 * values.MIB))


@cache
def _template_kwargs(model: str) -> bytes:
    variables = {f"v{i}": [1, 2, 3, 4, 5] for i in range(40_000)}
    return json.dumps(_conversation(model) | {"chat_template_kwargs": variables}).encode()


@cache
def _many_tools(model: str) -> bytes:
    properties = {f"p{i}": {"type": "string", "description": "d" * 20} for i in range(40)}
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool{i}",
                "parameters": {"type": "object", "properties": properties},
            },
        }
        for i in range(400)
    ]
    return json.dumps(_conversation(model) | {"tools": tools}).encode()


@cache
def _cut_history(model: str) -> bytes:
    user = {"role": "user", "content": "Go on."}
    turns: list[dict[str, Any]] = []
    for i in range(2000):
        function = {"name": "f", "arguments": '{"a": "abc '}
        call = {"id": f"call-{i}", "type": "function", "function": function}
        turns += [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call-{i}", "content": "done"},
        ]
    return json.dumps(_conversation(model) | {"messages": [user, *turns, user]}).encode()
