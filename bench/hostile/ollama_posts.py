"""Requests of a hostile client over Ollama's API; builders as in `posts`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from . import constraints, values
from .posts import Post

CHAT = "/api/chat"
EMBED = "/api/embed"
ONE_TOKEN = {"num_predict": 1}


def schema(of: Callable[[int], constraints.Schema]) -> Callable[[str, int], Post]:
    """Chats whose answers have to follow a schema."""
    return lambda model, idx: _post(CHAT, _conversation(model) | {"format": of(idx)})


def options(model: str, idx: int) -> Post:
    """250,000 options that do not exist, more than a body may have."""
    asked = json.dumps({"model": model, "prompt": "x", "stream": False}).encode()
    return Post("/api/generate", b'%s,"options":%s}' % (asked[:-1], values.keys()))


def history(model: str, idx: int) -> Post:
    """1,500 turns in which the model called tools, whose results name no call."""
    return Post(CHAT, _history(model))


def inputs(model: str, idx: int) -> Post:
    """60,000 texts to embed, as many as a body may have strings."""
    return Post(EMBED, _inputs(model))


def _conversation(model: str) -> dict[str, Any]:
    user = {"role": "user", "content": "Hi"}
    return {"model": model, "messages": [user], "options": ONE_TOKEN, "stream": False}


def _post(path: str, body: dict[str, Any]) -> Post:
    return Post(path, json.dumps(body).encode())


@cache
def _history(model: str) -> bytes:
    call = {"function": {"name": "f", "arguments": {"a": "abc"}}}
    turn = [
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "tool_name": "f", "content": "done"},
        {"role": "tool", "tool_name": "f", "content": "done"},
    ]
    user = {"role": "user", "content": "Go on."}
    return json.dumps(_conversation(model) | {"messages": [user, *turn * 1500, user]}).encode()


@cache
def _inputs(model: str) -> bytes:
    return json.dumps({"model": model, "input": ["text"] * 60_000}).encode()
