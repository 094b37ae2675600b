"""Grammars of answers in gpt-oss's format, harmony."""

from __future__ import annotations

from collections.abc import Sequence

from . import harmony_parser as harmony
from .forms import ANY_TEXT, Form, OfferedTool, const, one_of, separated, sequence, tag
from .tool_format import ToolFormat


def _harmony_calls(tools: Sequence[OfferedTool], single: bool) -> Form:
    begin = f"{harmony.CHANNEL}commentary to=functions."
    behind = f" {harmony.CONSTRAIN}json{harmony.MESSAGE}"
    calls = [tag(f"{begin}{tool.name}{behind}", tool.arguments, "") for tool in tools]
    return separated(calls, harmony.CALL + harmony.NEXT, single)


def _harmony_free(tools: Sequence[OfferedTool], single: bool) -> Form:
    return one_of([_harmony_calls(tools, single), sequence(const(harmony.FINAL), ANY_TEXT)])


HARMONY = ToolFormat(
    signs=((harmony.CHANNEL, harmony.MESSAGE),),
    calls=_harmony_calls,
    free=_harmony_free,
    frame=harmony.FINAL,
)
