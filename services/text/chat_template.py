"""Renders conversations by a model's own template, in a sandbox. Knows nothing about tokens.

Templates get the environment of Hugging Face's `apply_chat_template`: the same filters, globals and
whitespace rules.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from ..runtime.errors import BadRequest
from .counted_environment import STEPS, CountedEnvironment, Steps

MAX_RENDERED_LEN = 32 << 20
"""Largest number of characters of a rendered conversation."""
TEMPLATE_FAULTS = (
    *(jinja2.TemplateError, RuntimeError, MemoryError),
    *(AttributeError, TypeError, ValueError, LookupError, ArithmeticError),
)
"""Errors of templates and of the filters that they apply to values of other types."""
END_MARK = "\ufdd1\ufdd2"
"""Mark after a message that the answer continues, made of code points that Unicode reserves for
internal use."""


class ChatTemplateError(Exception):
    """A template that does not parse."""

    def __init__(self, error: jinja2.TemplateSyntaxError) -> None:
        super().__init__(f"the chat template does not parse: line {error.lineno}: {error.message}")


class GenerationBlock(Extension):
    """Block `{% generation %}…{% endgeneration %}`, which marks the assistant's words for training;
    here it only renders them."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`clock` returns the processor time of the thread that renders."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(error) from None
        self._special_tokens = dict(special_tokens)
        self._clock = clock
        self.source = source
        self.reads_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        """Whether the template shows the assistant its tools."""

    def mentions(self, word: str) -> bool:
        return word in self.source

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises `BadRequest` naming `messages` where the template refuses or
        fails."""
        steps = Steps(self._clock)
        messages = _with_end_marked(messages) if continue_final_message else messages
        context = {**self._special_tokens, "documents": None, **(variables or {})}
        context |= {"messages": messages, "tools": tools}
        context |= {
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            STEPS: steps,
        }
        try:
            rendered = _collect(self._template.generate(context), steps)
        except TEMPLATE_FAULTS as error:
            raise BadRequest(
                "messages", f"messages do not fit the model's chat template: {error}"
            ) from None
        return _cut_at_mark(rendered) if continue_final_message else rendered


def _environment() -> CountedEnvironment:
    environment = CountedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    # Of llama.cpp's templates; transformers has none.
    environment.filters["from_json"] = json.loads
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _collect(pieces: Iterable[str], steps: Steps) -> str:
    """Joins the output of a template, within the limits; the sandbox bounds `range` itself."""
    collected = []
    length = 0
    for piece in pieces:
        collected.append(piece)
        length += len(piece)
        if length > MAX_RENDERED_LEN:
            raise jinja2.TemplateError(f"it makes more than {MAX_RENDERED_LEN} characters of them")
        steps.check_time()
    return "".join(collected)


def _with_end_marked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark after the last one, since its text may occur again in what the
    template writes after it."""
    *others, final = messages
    return [*others, final | {"content": f"{final.get('content', '')}{END_MARK} "}]


def _cut_at_mark(rendered: str) -> str:
    """Cuts the prompt after the last message, so that the answer continues it."""
    text, mark, behind = rendered.rpartition(END_MARK)
    if not mark:
        raise BadRequest(
            "continue_final_message",
            "continue_final_message: the chat template does not show the last message",
        )
    # A template that trims messages has taken the space after the mark.
    return (text if behind.startswith(" ") else text.rstrip()).replace(END_MARK, "")
