"""Fields that would change the answer if they were served, and are not: refused by name rather than
ignored. Paths of endpoints that do not exist, where another endpoint would answer them.

They are OpenAI's fields, and those of vLLM's and SGLang's servers. Fields without effect on the
answer are accepted and not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.services.runtime.errors import UnsupportedField

TEXT_ONLY = "only text is served"
NO_PLUG_INS = "this version takes no code or parameters of extensions"
VECTORS = "in base64 vectors are little-endian float32"
FILES_EXPIRE = "files are kept for 30 days, or until they are deleted"
NOT_SERVED = {
    # OpenAI's.
    "audio": TEXT_ONLY,
    "expires_after": FILES_EXPIRE,
    "output_expires_after": FILES_EXPIRE,
    "modalities": TEXT_ONLY,
    "prediction": "this version does not speculate on given text",
    "web_search_options": "this version searches nothing",
    "moderation": "this version judges no texts",
    "context_management": "`truncation` leaves out the oldest turns",
    "messages[].audio": TEXT_ONLY,
    "tools[].defer_loading": "all tools are shown at once",
    # vLLM's.
    "ec_transfer_params": "the cluster moves no encoders' caches",
    "embed_dtype": VECTORS,
    "enable_response_messages": "the answer's items say what was put in and out",
    "endianness": VECTORS,
    "kv_transfer_params": "the cluster itself decides where a prompt is computed",
    "logits_processors": NO_PLUG_INS,
    "logprob_token_ids": "`top_logprobs` reports the likeliest tokens",
    "lora": "an adapter is served as a model by name: `model`",
    "media_io_kwargs": TEXT_ONLY,
    "mm_processor_kwargs": TEXT_ONLY,
    "previous_input_messages": "a turn goes on by `previous_response_id`",
    "prompt_embeds": "a prompt is text or token ids",
    "repetition_detection": "answers end by `stop` and `max_tokens`",
    "return_prompt_text": "`return_token_ids` and /detokenize return the prompt",
    "vllm_xargs": NO_PLUG_INS,
    "watermarking": "this version marks no answers",
    "messages[].partial": "`continue_final_message` goes on with the last message",
    "messages[].prefix": "`continue_final_message` goes on with the last message",
    # SGLang's.
    "custom_logit_processor": NO_PLUG_INS,
    "custom_params": NO_PLUG_INS,
    "lora_path": "an adapter is served as a model by name: `model`",
    "return_hidden_states": "/v1/embeddings tells them of prompts",
    "separate_reasoning": "thoughts come as `reasoning_content`; `include_reasoning` leaves "
    "them out",
    "session_params": "a prompt that goes on where another ended finds its cache",
    "stop_regex": "`stop` takes strings",
    "stream_reasoning": "in a stream thoughts come as they are written",
}
HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
}
"""Values of unsupported fields that have no effect, besides empty values and false."""
MATTERS_ELSEWHERE = {
    "parallel_tool_calls": True,
    "include_reasoning": True,
    "add_generation_prompt": True,
    "verbosity": "medium",
    "truncation": "disabled",
}
"""Fields of some endpoints only, with their values that have no effect."""

WITHOUT_EFFECT = ("max_tool_calls",)
"""Fields of one endpoint that have no effect there either."""


PATHS_NOT_SERVED = {
    "/v1/responses/compact": "`truncation` of /v1/responses leaves out the oldest turns"
}
"""Paths of OpenAI's that another route would take for the id of an object, each with an
alternative."""


def check_served(name: str, path: str, value: Any) -> bool:
    """Whether the field is one of these and has a value without effect. Raises `UnsupportedField`
    for another value of the field at `path`, which is `name` with indices."""
    if name not in NOT_SERVED:
        return False
    # Whether a flag was asked to be off matters only where it is on by default.
    asks_nothing = value in HARMLESS[name] if name in HARMLESS else not value
    if value is not None and not asks_nothing:
        raise UnsupportedField(path, NOT_SERVED[name])
    return True


def check_misplaced(name: str, value: Any, where: str) -> None:
    """Checks a field of another endpoint. Raises `UnsupportedField`."""
    without_effect = (MATTERS_ELSEWHERE[name],) if name in MATTERS_ELSEWHERE else ("auto", "none")
    if value and value not in without_effect:
        raise UnsupportedField(name, where)
