"""Sampling fields that are over the contract, for both surfaces."""

from __future__ import annotations

from typing import Any

VOCAB_SIZE = 49152


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


# Over the contract in one field, in chat and in completions, on REST and on gRPC alike.
SAMPLING: list[tuple[str, Any, str]] = [
    ("n", 0, "n"),
    ("n", 129, "n"),
    ("n", 2, "n"),
    ("temperature", -0.1, "temperature"),
    ("temperature", 2.1, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.01, "top_p"),
    ("top_k", -2, "top_k"),
    ("min_p", -0.1, "min_p"),
    ("min_p", 1.1, "min_p"),
    ("presence_penalty", -2.1, "presence_penalty"),
    ("presence_penalty", 2.1, "presence_penalty"),
    ("frequency_penalty", -2.1, "frequency_penalty"),
    ("frequency_penalty", 2.1, "frequency_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("repetition_penalty", -1, "repetition_penalty"),
    ("stop", [str(i) for i in range(17)], "stop"),
    ("stop", [""], "stop"),
    ("stop_token_ids", [VOCAB_SIZE], "stop_token_ids"),
    ("bad_words", [""], "bad_words"),
    ("allowed_token_ids", [VOCAB_SIZE], "allowed_token_ids"),
    ("logit_bias", {VOCAB_SIZE: 1.0}, "logit_bias"),
    ("min_tokens", 9, "min_tokens"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", 9000, "messages"),
    ("prompt_logprobs", 21, "prompt_logprobs"),
    ("best_of", 0, "best_of"),
    ("best_of", 129, "best_of"),
    ("best_of", 3, "best_of"),
    ("truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
    ("truncate_prompt_tokens", 8193, "truncate_prompt_tokens"),
    ("top_logprobs", 2, "top_logprobs"),
    ("speculative", {"max_tokens": 0}, "speculative.max_tokens"),
    ("speculative", {"max_tokens": 32}, "speculative.max_tokens"),
    ("speculative", {"mode": "on"}, "speculative.mode"),
    ("speculative", {"drafter": "eagle"}, "speculative.drafter"),
    ("speculative", {"mode": "off", "drafter": ""}, "speculative.drafter"),
]
SAMPLING_IDS = [f"{name}={str(value)[:12]}" for name, value, _ in SAMPLING]

# Just inside the contract.
