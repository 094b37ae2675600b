"""Names of formats that settings accept: ours, and vLLM's names where they differ."""

from __future__ import annotations

from collections.abc import Mapping

from .reasoning_parser import REASONING_FORMATS
from .tool_formats import TOOL_FORMATS

TOOL_ALIASES: Mapping[str, str] = {
    "cohere_command3": "command",
    "ernie45": "hermes",
    "granite-20b-fc": "granite_20b_fc",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mimo": "qwen3_coder",
    "minimax": "minimax_m1",
    "openai": "gpt_oss",
    "phi4_mini_json": "phi4_mini",
    "poolside_v1": "glm45",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
REASONING_ALIASES: Mapping[str, str] = {
    "cohere_command3": "command",
    "deepseek_v3": "qwen3",
    "deepseek_v4": "qwen3",
    "ernie45": "qwen3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "holo2": "qwen3",
    "kimi_k2": "think",
    "mimo": "qwen3",
    "minimax_m2": "deepseek_r1",
    "mistral": "magistral",
    "nemotron_v3": "qwen3",
    "olmo3": "deepseek_r1",
    "openai_gptoss": "gpt_oss",
    "poolside_v1": "qwen3",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
}
TOOL_CHOICES = ("auto", "none", *TOOL_FORMATS, *TOOL_ALIASES)
REASONING_CHOICES = ("auto", "none", *REASONING_FORMATS, *REASONING_ALIASES)
