"""The list of hostile bodies: each can be sent, and asks of a server what its sentence says."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable

import msgspec
import pytest

from headwater.bench.hostile import constraints, ollama_posts, posts, values
from headwater.bench.hostile.attack import Target
from headwater.bench.hostile.bodies import ALL_NAMES, BODIES, CONTROLS
from headwater.bench.hostile.posts import Builder
from headwater.bench.hostile.rest_attacks import Posts, head_of
from headwater.gateway.settings import GatewaySettings

TARGET = Target(rest="http://127.0.0.1:80", grpc="127.0.0.1:81", model="m", key="hw-a-b")
SENT = {body.name: body.attack for body in (*CONTROLS, *BODIES) if isinstance(body.attack, Posts)}
NO_JSON = {"broken-end", "digits", "gzip-bomb", "gzip-then-chunked", "chunked-twice"}
"""Bodies that are not one JSON text that Python reads."""


def test_names_are_unique_and_fit_a_command_line() -> None:
    assert len(set(ALL_NAMES)) == len(ALL_NAMES)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in ALL_NAMES)


@pytest.mark.parametrize("name", SENT)
def test_a_body_is_within_the_gateways_limit_of_bytes(name: str) -> None:
    # More is refused by its length alone: nothing would be decoded.
    assert len(SENT[name].build("m", 0).body) <= GatewaySettings().max_body_bytes


@pytest.mark.parametrize("name", sorted(SENT.keys() - NO_JSON))
def test_a_body_is_json_for_the_model_that_is_served(name: str) -> None:
    post = SENT[name].build("m", 1)
    plain = gzip.decompress(post.body) if post.headers else post.body
    asked = msgspec.json.decode(plain, type=dict[str, msgspec.Raw])
    assert bytes(asked["model"]) == (b'"no-such-model-1"' if name == "unknown-model" else b'"m"')


def test_a_body_that_is_cut_off_is_json_but_for_its_end() -> None:
    body = posts.broken_end("m", 0).body
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(body)
    assert json.loads(body + b"}")["model"] == "m"


def test_the_head_names_the_bodys_length_unless_a_transfer_coding_does() -> None:
    plain = head_of(TARGET, posts.unknown_model("m", 0))
    coded = head_of(TARGET, posts.doubled_coding("gzip, chunked")("m", 0))
    assert b"authorization: Bearer hw-a-b\r\n" in plain
    assert b"content-length: " in plain
    assert b"content-length: " not in coded
    assert b"transfer-encoding: gzip, chunked\r\n" in coded


@pytest.mark.parametrize(
    "build",
    [
        posts.schema(constraints.exploding_schema),
        posts.schema(constraints.slow_schema),
        posts.schema(constraints.endless_schema),
        posts.schema(constraints.large_enum),
        posts.schema(constraints.many_alternatives),
        posts.regex(constraints.bad_regex),
        posts.regex(constraints.exploding_regex),
        posts.regex(constraints.backtracking_regex),
        ollama_posts.schema(constraints.exploding_schema),
        posts.small_completion,
        posts.long_prompt,
        posts.one_bad_prompt,
    ],
)
def test_what_a_server_may_remember_is_new_in_each_request(build: Builder) -> None:
    assert build("m", 1).body != build("m", 2).body


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (values.exponents, 3_600_001),
        (values.nested, 1800),
        (values.many_nested, 3_630_001),
        (values.keys, 2_888_891),
        (values.escapes, 3_600_002),
        (values.digits, 3_145_728),
        (values.many_digits, 3_600_901),
        (values.long_text, 3_145_730),
    ],
)
def test_a_value_has_the_bytes_that_its_sentence_says(
    value: Callable[[], bytes], num_bytes: int
) -> None:
    assert len(value()) == num_bytes
