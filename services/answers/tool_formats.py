"""Formats in which families of models write calls, and the family of a chat template.

Formats that are regular are rows of the tables in `marked_formats`, `object_formats`,
`list_formats`, `gemma_formats` and `pythonic_formats`; the others have a parser of their own, in
`…_parser` files.
"""

from __future__ import annotations

from collections.abc import Mapping

from .gemma_formats import GEMMA_FORMATS
from .gemma_grammar import gemma_format
from .glm4_grammar import GLM4
from .harmony_grammar import HARMONY
from .json_grammar import LLAMA, MISTRAL, XLAM, list_format, object_format
from .list_formats import LIST_FORMATS
from .marked_formats import MARKED_FORMATS, MarkedFormat
from .marked_grammar import marked_format
from .object_formats import OBJECT_FORMATS
from .pythonic_formats import PYTHONIC_FORMATS
from .pythonic_grammar import PYTHONIC, section_format
from .tool_format import ToolFormat


def format_of_template(template: str | None) -> str:
    """Name of the family by its chat template; Hermes where the template gives no sign."""
    found = (
        name
        for name, form in TOOL_FORMATS.items()
        if any(all(text in (template or "") for text in sign) for sign in form.signs)
    )
    return next(found, "hermes")


# The parser of the older format reads this one, too.
_TEKKEN = MarkedFormat(
    signs=("[TOOL_CALLS]", "[ARGS]"), begin="[TOOL_CALLS]", name_end="[ARGS]", end=""
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {
    **{name: marked_format(form) for name, form in MARKED_FORMATS.items()},
    "gpt_oss": HARMONY,
    **{name: gemma_format(form) for name, form in GEMMA_FORMATS.items()},
    "mistral_tekken": marked_format(_TEKKEN),
    "mistral": MISTRAL,
    **{name: list_format(form) for name, form in LIST_FORMATS.items() if name != "mistral"},
    **{name: section_format(form) for name, form in PYTHONIC_FORMATS.items()},
    "xlam": XLAM,
    **{name: object_format(form) for name, form in OBJECT_FORMATS.items()},
    "pythonic": PYTHONIC,
    "llama3_json": LLAMA,
    "glm4": GLM4,
}
"""Formats, in the order in which their signs are looked for."""
