"""Formats in which families of models write calls, as grammars, and the family of a chat template.

Formats that are regular are rows of the tables in `marked_formats`, `object_formats`, `list_formats`,
`gemma_formats` and `pythonic_formats`; the others have a parser of their own, in `…_parser` files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from . import harmony_parser as harmony
from .forms import Form, OfferedTool
from .gemma_formats import GEMMA_FORMATS, GemmaFormat
from .gemma_grammar import gemma_calls, gemma_free
from .glm4_grammar import glm4_calls, glm4_free
from .harmony_grammar import harmony_calls, harmony_free
from .json_grammar import (
    json_calls,
    list_calls,
    list_free,
    llama_calls,
    llama_free,
    mistral_free,
    object_calls,
    object_free,
    xlam_calls,
    xlam_free,
)
from .list_formats import LIST_FORMATS, ListFormat
from .marked_formats import MARKED_FORMATS, MarkedFormat
from .marked_grammar import marked_calls, marked_free
from .object_formats import OBJECT_FORMATS, ObjectFormat
from .pythonic_formats import PYTHONIC_FORMATS, PythonicFormat
from .pythonic_grammar import pythonic_calls, pythonic_free, section_calls, section_free


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """Format in which one family writes calls."""

    signs: tuple[tuple[str, ...], ...]
    """Sets of texts; all texts of at least one of them occur in the chat templates of the
    family."""
    calls: Callable[[Sequence[OfferedTool], bool], Form]
    """Grammar of an answer of nothing but calls; of exactly one call where the second argument says
    so."""
    free: Callable[[Sequence[OfferedTool], bool], Form]
    """Grammar of an answer that may call, and whose calls match their schemas."""
    opening: str = ""
    """Text with which calls begin anywhere in an answer; empty where they begin otherwise."""
    frame: str = ""
    """Text before content, where answers without calls have one."""
    is_json: bool = False
    """Whether a call is JSON from its first character, as other answers may be."""

    def instead(self, tools: Sequence[OfferedTool], single: bool) -> Form:
        """Grammar of an answer of nothing but calls, as an alternative to another constraint, JSON
        for example."""
        return json_calls(tools, single) if self.is_json else self.calls(tools, single)


def format_of_template(template: str | None) -> str:
    """Name of the family by its chat template; Hermes where the template gives no sign."""
    found = (
        name
        for name, form in TOOL_FORMATS.items()
        if any(all(text in (template or "") for text in sign) for sign in form.signs)
    )
    return next(found, "hermes")


def _marked(form: MarkedFormat) -> ToolFormat:
    return ToolFormat(
        signs=(form.signs,),
        calls=partial(marked_calls, form),
        free=partial(marked_free, form),
        opening=form.opening,
    )


def _objects(form: ObjectFormat) -> ToolFormat:
    return ToolFormat(
        signs=(form.signs,),
        calls=partial(object_calls, form),
        free=partial(object_free, form),
        opening=form.begin.strip(),
    )


def _listed(form: ListFormat) -> ToolFormat:
    return ToolFormat(
        signs=(form.signs,),
        calls=partial(list_calls, form),
        free=partial(list_free, form),
        opening=form.begin,
    )


def _gemma(form: GemmaFormat) -> ToolFormat:
    return ToolFormat(
        signs=((form.begin,),),
        calls=partial(gemma_calls, form),
        free=partial(gemma_free, form),
        opening=form.begin,
    )


def _pythonic(form: PythonicFormat) -> ToolFormat:
    return ToolFormat(
        signs=tuple((sign,) for sign in form.signs),
        calls=partial(section_calls, form),
        free=partial(section_free, form),
        opening=form.begin,
    )


# The parser of the older format reads this one, too.
_TEKKEN = MarkedFormat(
    signs=("[TOOL_CALLS]", "[ARGS]"), begin="[TOOL_CALLS]", name_end="[ARGS]", end=""
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    **{name: _marked(form) for name, form in MARKED_FORMATS.items()},
    "gpt_oss": ToolFormat(
        signs=((harmony.CHANNEL, harmony.MESSAGE),),
        calls=harmony_calls,
        free=harmony_free,
        frame=harmony.FINAL,
    ),
    **{name: _gemma(form) for name, form in GEMMA_FORMATS.items()},
    "mistral_tekken": _marked(_TEKKEN),
    # It writes no text before calls.
    "mistral": replace(_listed(LIST_FORMATS["mistral"]), free=mistral_free, opening=""),
    **{name: _listed(form) for name, form in LIST_FORMATS.items() if name != "mistral"},
    **{name: _pythonic(form) for name, form in PYTHONIC_FORMATS.items()},
    "xlam": ToolFormat(signs=(('"tool_call_name"',),), calls=xlam_calls, free=xlam_free),
    **{name: _objects(form) for name, form in OBJECT_FORMATS.items()},
    "pythonic": ToolFormat(
        signs=(("<|python_start|>",), ("func_name1(",)), calls=pythonic_calls, free=pythonic_free
    ),
    "llama3_json": ToolFormat(
        signs=(("<|python_tag|>",), ('"parameters": dictionary',)),
        calls=llama_calls,
        free=llama_free,
        is_json=True,
    ),
    "glm4": ToolFormat(
        signs=(("<|observation|>", "# 可用工具"),), calls=glm4_calls, free=glm4_free
    ),
}
"""Formats, in the order in which their signs are looked for."""
