"""The fields of `SamplingParams` are those of the sampling contract."""

from __future__ import annotations

import dataclasses

from headwater.proto.common_pb2 import Sampling
from headwater.services.llm.sampling_params import SamplingParams

OTHERWISE = {
    "top_logprobs": "logprobs",
    "structured_output": "structured_outputs",
}
"""Fields of the contract that Python programs name differently, as vLLM does."""
NOT_OFFERED = {"best_of", "use_beam_search", "length_penalty", "echo"}
"""Fields of REST and gRPC that `LLM` does not take."""


def test_every_field_of_the_contract_is_a_parameter_of_python_programs() -> None:
    offered = {field.name for field in dataclasses.fields(SamplingParams)}
    fields = {field.name for field in Sampling.DESCRIPTOR.fields}
    missing = {OTHERWISE.get(name, name) for name in fields - NOT_OFFERED} - offered
    assert not missing, f"{missing}: add a field to SamplingParams of services/llm"
