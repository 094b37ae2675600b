"""Bodies that a client makes for the sake of their cost: no decoder of the gateway and the
processor keeps other threads of its process waiting for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.gateway.anthropic import decode as anthropic
from headwater.gateway.anthropic.schema import MessagesRequest
from headwater.gateway.anthropic.to_pb import to_prompt
from headwater.gateway.jobs.batches.lines import read_line, read_options
from headwater.gateway.ollama import decode as ollama
from headwater.gateway.ollama import schema as ollama_schema
from headwater.gateway.ollama.to_pb import to_prompt as ollama_to_prompt
from headwater.gateway.ollama.to_pb import to_sampling
from headwater.gateway.openai.decode import decode
from headwater.gateway.openai.response_schema import ResponsesRequest
from headwater.gateway.openai.schema import ChatCompletionRequest, CompletionRequest
from headwater.gateway.settings import GatewaySettings
from headwater.services.runtime.client_json import read_json
from headwater.services.runtime.errors import BadRequest
from tests.long_values import long_but
from tests.longest_hold import longest_hold

MAX_BODY_BYTES = GatewaySettings().max_body_bytes
MOST_SECONDS = 0.02
ATOMS = (
    *(b"1e308", b"-1.7976931348623157E+308", b"1e23", b"9007199254740993.0", b"1" * 4300),
    *(b"0." + b"0" * 310 + b"1", b"1", b"12345", b"null", b"1.5"),
    *(b"[]", b"{}", b'{"a":1}', b"[[1]]", b"[" * 100 + b"]" * 100),
    *(b'""', b'"a"', b'"\\n"', b'"' + b"\\u00e9" * 64 + b'"', b'"' + b"a" * 4096 + b'"'),
)
"""Values that cost a decoder much for their bytes, and usual ones."""
CALL = (
    b'{"model":"m","max_tokens":1,"messages":[{"role":"assistant","content":'
    b'[{"type":"tool_use","id":"1","name":"f","input":{"a":%b}}]}]}'
)
OLLAMA_CALL = (
    b'{"model":"m","messages":[{"role":"assistant","tool_calls":'
    b'[{"function":{"name":"f","arguments":{"a":%b}}}]}]}'
)
Decoder = Callable[[bytes], object]
DECODERS: dict[str, Decoder] = {
    "an unknown field": lambda value: decode(
        b'{"model":"m","prompt":"x","foo":%b}' % value, CompletionRequest
    ),
    "a prompt": lambda value: decode(b'{"model":"m","prompt":%b}' % value, CompletionRequest),
    "messages": lambda value: decode(b'{"model":"m","messages":%b}' % value, ChatCompletionRequest),
    "template variables": lambda value: decode(
        b'{"model":"m","input":"x","chat_template_kwargs":{"a":%b}}' % value, ResponsesRequest
    ),
    "the input of a call": lambda value: to_prompt(anthropic.decode(CALL % value, MessagesRequest)),
    "the arguments of a call to Ollama": lambda value: ollama_to_prompt(
        ollama.decode(OLLAMA_CALL % value, ollama_schema.ChatRequest)
    ),
    "a format of Ollama": lambda value: to_sampling(
        ollama.decode(
            b'{"model":"m","prompt":"x","format":{"a":%b}}' % value, ollama_schema.GenerateRequest
        )
    ),
    "a line of a batch": lambda value: read_options(
        read_line(
            b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":%b}}'
            % value
        )
    ),
    "JSON in a field": lambda value: read_json(value, "chat_template_kwargs"),
}


def refusing(decoder: Decoder, value: bytes) -> Callable[[], None]:
    def work() -> None:
        with contextlib.suppress(BadRequest, msgspec.MsgspecError):
            decoder(value)

    return work


def filled(*atoms: bytes, num_bytes: int = MAX_BODY_BYTES - 200) -> bytes:
    """A list of so many bytes that repeats some values."""
    entry = b",".join(atoms)
    return b"[%b]" % b",".join([entry] * (num_bytes // (len(entry) + 1)))


def held_by(name: str, value: bytes) -> float:
    return longest_hold(refusing(DECODERS[name], value), MOST_SECONDS)


@pytest.mark.parametrize("name", long_but(list(DECODERS), "an unknown field", "a line of a batch"))
def test_numbers_at_the_end_of_a_floats_range_hold_no_decoder(name: str) -> None:
    """600,000 of them held it for 7 s."""
    assert held_by(name, filled(b"1e308")) < MOST_SECONDS


@pytest.mark.parametrize("name", long_but(list(DECODERS), "a prompt"))
def test_most_token_ids_of_a_body_hold_no_decoder(name: str) -> None:
    assert held_by(name, filled(b"12345")) < MOST_SECONDS


def check_any(name: str, atoms: list[bytes]) -> None:
    held = held_by(name, filled(*atoms))
    assert held < MOST_SECONDS, f"{name} of {atoms} held the interpreter for {held:.3f} s"


ANY = st.sampled_from(list(DECODERS)), st.lists(st.sampled_from(ATOMS), min_size=1, max_size=3)


@settings(max_examples=4, deadline=None)
@given(*ANY)
def test_no_mixture_of_costly_values_holds_a_decoder(name: str, atoms: list[bytes]) -> None:
    check_any(name, atoms)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(*ANY)
def test_no_mixture_of_costly_values_holds_a_decoder_in_many_tries(
    name: str, atoms: list[bytes]
) -> None:
    check_any(name, atoms)


@pytest.mark.parametrize("depth", [129, 600, 900, 5000])
def test_deep_json_is_refused_by_its_depth(depth: int) -> None:
    body = b'{"model":"m","prompt":"x","foo":%b}' % (b"[" * depth + b"]" * depth)
    with pytest.raises(BadRequest) as refused:
        decode(body, CompletionRequest)
    assert refused.value.message == (
        "the body has more than 128 levels of objects and lists; allowed: 128"
    )
