"""Grammars of calls in the format of GLM-4."""

from __future__ import annotations

from collections.abc import Sequence

from .forms import Form, OfferedTool, one_of, separated, tag
from .glm4_parser import NEXT
from .tool_format import ToolFormat

_NO_CALL = (
    r"([A-Za-z0-9_.\-]+([^A-Za-z0-9_.\- \t\r\n](?s:.*)|[ \t\r\n]+([^{ \t\r\n](?s:.*))?)?"
    r"|[^A-Za-z0-9_.\- \t\r\n](?s:.*))?"
)
"""Pattern of text in which `{` does not follow a first word, as it does in a call."""


def _glm4_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    calls = [tag(f"{tool.name}\n", tool.arguments, "") for tool in tools]
    return separated(calls, NEXT, single)


def _glm4_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    text = {"type": "regex", "pattern": _NO_CALL}
    return one_of([_glm4_calls(tools, single), text])


GLM4 = ToolFormat(signs=(("<|observation|>", "# 可用工具"),), calls=_glm4_calls, free=_glm4_free)
