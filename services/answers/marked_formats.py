"""Table of the formats of calls that are regular: fixed texts stand around a call, its name and its
arguments.

White space in the texts is how the models write it; readers take any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Texts around each argument, where arguments are no JSON object."""

    begin: str
    name_end: str
    end: str
    between: str = "\n"
    """Text behind each argument."""
    margin: str = ""
    """Text on both sides of a value that is no part of it."""
    text_sign: str = ""
    """Text behind the name of an argument whose value is a string without quotes."""
    json_sign: str = ""
    """Text behind the name of an argument whose value is JSON."""

    @property
    def name_marks(self) -> tuple[str, str]:
        """Mark behind a name, and the mark before the value; empty where there is one mark."""
        at = max(self.name_end.rfind("<"), 0)
        return (self.name_end[:at].rstrip(), self.name_end[at:]) if at else (self.name_end, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedFormat:
    """Texts with which one family writes calls."""

    signs: tuple[str, ...]
    """Texts all of which occur in the chat templates of the family."""
    begin: str
    """Text before the name of a function."""
    name_prefix: str = ""
    """Text that models write before each name; readers accept calls without it."""
    name_end: str
    """Text behind the name."""
    end: str
    """Text behind the arguments."""
    between: str = ""
    """Text between two calls, or between two sections of one call each."""
    section: tuple[str, str] = ("", "")
    """Texts around all calls, or around each call."""
    has_section_each: bool = False
    """Whether each call has its own section marks."""
    is_name_bare: bool = False
    """Whether nothing but white space, an argument or the end of the call marks the end of a
    name."""
    id_pattern: str = ""
    """Regular expression of text that may be between the name and `name_end`."""
    parameters: Parameters | None = None
    """How arguments are written one by one; None: as one JSON object."""

    @property
    def opening(self) -> str:
        """Text with which an answer's first call begins."""
        return (self.section[0] or self.begin).strip()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the format, any of which may be a token."""
        own = [*self.section, self.begin, self.name_end, self.end]
        parameters = self.parameters
        if parameters is not None:
            own += [parameters.begin, *parameters.name_marks, parameters.end]
        return tuple(dict.fromkeys(mark.strip() for mark in own if mark.strip()))


def _dsml(section: str) -> MarkedFormat:
    return MarkedFormat(
        signs=("｜DSML｜", f"{section}>"),
        section=(f"<｜DSML｜{section}>\n", f"</｜DSML｜{section}>"),
        begin='<｜DSML｜invoke name="',
        name_end='">\n',
        end="</｜DSML｜invoke>\n",
        parameters=Parameters(
            begin='<｜DSML｜parameter name="',
            text_sign='" string="true',
            json_sign='" string="false',
            name_end='">',
            end="</｜DSML｜parameter>",
        ),
    )


def _glm(gap: str, signs: tuple[str, ...], tags: str = "{}") -> MarkedFormat:
    """Format of GLM; `tags` says how its tags are called."""
    return MarkedFormat(
        signs=signs,
        begin=f"<{tags.format('tool_call')}>",
        name_end=gap,
        is_name_bare=True,
        end=f"</{tags.format('tool_call')}>",
        between="\n" if gap else "",
        parameters=_key_and_value(gap, tags),
    )


def _key_and_value(gap: str, tags: str) -> Parameters:
    key, value = (tags.format(name) for name in ("arg_key", "arg_value"))
    return Parameters(
        begin=f"<{key}>", name_end=f"</{key}>{gap}<{value}>", end=f"</{value}>", between=gap
    )


def _hy(signs: tuple[str, ...], tags: str) -> MarkedFormat:
    section, call = (tags.format(name) for name in ("tool_calls", "tool_call"))
    return MarkedFormat(
        signs=signs,
        section=(f"<{section}>\n", f"</{section}>"),
        begin=f"<{call}>",
        name_end=f"<{tags.format('tool_sep')}>\n",
        end=f"</{call}>\n",
        parameters=_key_and_value("\n", tags),
    )


_FUNCTION = "<function="
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

MARKED_FORMATS: Mapping[str, MarkedFormat] = {
    "seed_oss": MarkedFormat(
        signs=("<seed:tool_call>",),
        section=("<seed:tool_call>\n", "\n</seed:tool_call>"),
        has_section_each=True,
        begin=_FUNCTION,
        name_end=">\n",
        end="</function>",
        between="\n",
        parameters=Parameters(begin="<parameter=", name_end=">", end="</parameter>"),
    ),
    "qwen3_coder": MarkedFormat(
        signs=("<tool_call>", _FUNCTION),
        section=("<tool_call>\n", "\n</tool_call>"),
        has_section_each=True,
        begin=_FUNCTION,
        name_end=">\n",
        end="</function>",
        between="\n",
        parameters=Parameters(begin="<parameter=", name_end=">", end="</parameter>", margin="\n"),
    ),
    "hy_v3": _hy(("<tool_sep", ":opensource"), "{}:opensource"),
    "hy_v3_preview": _hy(("<tool_sep>",), "{}"),
    "longcat_xml": _glm("\n", ("<longcat_arg_key>",), "longcat_{}"),
    "step3": MarkedFormat(
        signs=("<steptml:invoke",),
        section=("<｜tool_calls_begin｜>\n", "<｜tool_calls_end｜>"),
        begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
        name_end='">',
        end="</steptml:invoke><｜tool_call_end｜>\n",
        parameters=Parameters(
            begin='<steptml:parameter name="',
            name_end='">',
            end="</steptml:parameter>",
            between="",
        ),
    ),
    "solar_open2": MarkedFormat(
        signs=("<|tool_arg:start|>",),
        begin="<|tool_call:start|>",
        name_end="\n",
        is_name_bare=True,
        end="<|tool_call:end|>",
        between="\n",
        parameters=Parameters(
            begin="<|tool_arg:start|>", name_end="<|tool_arg:value|>", end="<|tool_arg:end|>"
        ),
    ),
    "glm47": _glm("", ("</arg_key><arg_value>",)),
    "glm45": _glm("\n", ("<arg_key>",)),
    "minimax_m2": MarkedFormat(
        signs=("<minimax:tool_call>",),
        section=("<minimax:tool_call>\n", "</minimax:tool_call>"),
        begin='<invoke name="',
        name_end='">\n',
        end="</invoke>\n",
        parameters=Parameters(begin='<parameter name="', name_end='">', end="</parameter>"),
    ),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v3": MarkedFormat(
        signs=("<｜tool▁sep｜>", "```json"),
        section=_DEEPSEEK_SECTION,
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        name_end="\n```json\n",
        end="\n```<｜tool▁call▁end｜>",
        between="\n",
    ),
    "deepseek_v31": MarkedFormat(
        signs=("<｜tool▁sep｜>",),
        section=_DEEPSEEK_SECTION,
        begin="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
    ),
    "kimi_k2": MarkedFormat(
        signs=("<|tool_call_argument_begin|>",),
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        begin="<|tool_call_begin|>",
        name_prefix="functions.",
        id_pattern=":[0-9]{1,4}",
        name_end="<|tool_call_argument_begin|>",
        end="<|tool_call_end|>",
    ),
    "functionary_v31": MarkedFormat(
        signs=("<function=", "</function>"), begin=_FUNCTION, name_end=">", end="</function>"
    ),
}
"""Formats, in the order in which their signs are looked for."""
