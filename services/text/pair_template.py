"""Text of a pair that a model of tokens judges: a chat template whose roles are a query and a
document. Knows no tokens."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..runtime.errors import BadRequest
from ..runtime.settings import SettingError, require
from .chat_template import ChatTemplate

QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    '<|im_start|>user\n{%- set system = messages | selectattr("role", "eq", "system") | list %}\n'
    '{{ "\\n" }}<Instruct>: {{ system[0].content if system else "Given a web search query, '
    'retrieve relevant passages that answer the query" }}\n'
    '<Query>: {{ (messages | selectattr("role", "eq", "query") | first).content }}\n'
    '<Document>: {{ (messages | selectattr("role", "eq", "document") | first).content }}<|im_end|>\n'
    '<|im_start|>assistant\n<think>\n\n</think>{{ "\\n\\n" }}'
)
"""Template of Qwen3-Reranker's model card, 2025. Files of the model have it in later revisions
alone."""
BUILT_IN = {
    "Qwen3ForCausalLM": QWEN3_RERANKER,
    "Qwen3ForSequenceClassification": QWEN3_RERANKER,
}
"""Keyed by architecture, the template of a model whose own has no such roles."""
QUERY = "\ue000"
DOCUMENT = "\ue001"
"""Stand for the texts of a pair while the template is rendered."""
SHOWN = "a template that shows a query and a document once each, in this order"
_ROLES = [re.compile(f"[\"']{role}[\"']") for role in ("query", "document")]


class PairTemplate:
    """A template, split at the two texts."""

    def __init__(self, template: ChatTemplate) -> None:
        """Raises `SettingError` for a template that does not show both texts once, the query
        first."""
        self._template = template
        try:
            parts = self._parts("")
        except BadRequest as error:
            raise SettingError("chat_template", template.source, str(error)) from None
        require(parts is not None, "chat_template", template.source, SHOWN)

    def around(self, instruction: str) -> tuple[str, str, str]:
        """Texts before the query, between the two, and behind the document. Empty: the template's
        own instruction. Raises `BadRequest` for one that changes which texts are shown."""
        parts = self._parts(instruction)
        if parts is None:
            raise BadRequest.of("instruction", instruction, SHOWN)
        return parts

    def _parts(self, instruction: str) -> tuple[str, str, str] | None:
        messages = [{"role": "system", "content": instruction}] if instruction else []
        messages += [
            {"role": "query", "content": QUERY},
            {"role": "document", "content": DOCUMENT},
        ]
        before, _, rest = self._template.render(messages).partition(QUERY)
        between, is_shown, behind = rest.partition(DOCUMENT)
        return (before, between, behind) if is_shown and DOCUMENT not in behind else None


def pair_template(
    own: ChatTemplate | None, architecture: str, compiled: Callable[[str], ChatTemplate]
) -> PairTemplate | None:
    """The template of a model's pairs: its own where that has roles of a query and a document, else
    that of its architecture; None: a pair is two texts between special tokens."""
    if own is not None and all(role.search(own.source) for role in _ROLES):
        return PairTemplate(own)
    source = BUILT_IN.get(architecture)
    return None if source is None else PairTemplate(compiled(source))
