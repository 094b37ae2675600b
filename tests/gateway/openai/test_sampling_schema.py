"""The sampling contract over REST: every field of the stages is one that clients can send and read
about."""

from __future__ import annotations

from pathlib import Path

from headwater.gateway.openai.schema import Sampling
from headwater.proto import common_pb2

API = Path(__file__).parents[3] / "docs" / "api.md"
BODIES = {
    # Chat and completions differ in these, and only completions echo.
    *("logprobs", "top_logprobs", "echo"),
    # Many spellings of clients, see `structured_output.py`.
    "structured_output",
}
"""Fields that a body has for itself, beside `Sampling`."""


def test_every_field_of_the_contract_is_a_field_of_rest() -> None:
    contract = {field.name for field in common_pb2.Sampling.DESCRIPTOR.fields}
    row = (
        "a field of proto/common.proto's Sampling is one of Sampling in "
        "gateway/openai/schema.py under the same name"
    )
    assert contract - BODIES == {*Sampling.__struct_fields__}, row


def test_every_field_of_sampling_is_in_the_documentation() -> None:
    text = API.read_text()
    absent = {name for name in Sampling.__struct_fields__ if f"`{name}`" not in text}
    assert not absent, f"{absent}: add a row to the table of sampling in docs/api.md"
