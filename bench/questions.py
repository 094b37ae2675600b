"""Questions that a chat model asks itself: it continues its chat template at the place of the
user's words (Xu et al., "Magpie", 2024). Every second one begins with given words, so that answers
are of many kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headwater.services.text.model import TextModel

Say = Callable[[Sequence[list[int]], float, int], list[list[int]]]
"""Continues prompts at a temperature by so many tokens at most; an end token is the last of a
continuation."""
QUESTION_TOKENS = 80
MARK = "\N{PILCROW SIGN}"
"""Stands for a user's words while a chat template is taken apart."""
OPENINGS = (
    "What is", "What are", "What should I", "What happens", "Why", "Why do", "Why is", "How do I", "How can I",
    "How does", "How many", "Who is", "Who invented", "When did", "Where can I", "Which", "Is it", "Can you explain",
    "Could you write", "Explain", "Explain the difference between", "Describe", "Define", "Compare", "Summarize",
    "List", "Name three", "Give me", "Give an example of", "Give me a recipe", "Tell me", "Tell "
                                                                                          "me a "
                                                                                          "story about",
    "Suggest", "Recommend", "Write", "Write a poem", "Write a short story", "Write a letter", "Write an email",
    "Write a paragraph", "Write a function", "Write a program in", "Write a query", "Create", "Plan", "Translate",
    "Rewrite", "Correct", "Calculate", "Solve", "Classify", "Help me", "I need", "I want to", "My", "Please",
)  # fmt: skip
"""First words of questions to an assistant. Without them a small model mostly asks for advice."""
FREE_TEMPERATURE = 1.0
"""Temperature of questions that begin with no given words."""
OPENED_TEMPERATURE = 0.8
"""Temperature of questions that begin with given words: they differ by these already."""


def own_questions(text: TextModel, say: Say, count: int) -> list[list[int]]:
    """Prompts with at most `count` different questions, up to the place of the answer."""
    assert text.chat_template is not None
    before, *_, behind = text.chat_template.render([{"role": "user", "content": MARK}]).split(MARK)
    openings = [OPENINGS[i // 2 % len(OPENINGS)] if i % 2 else "" for i in range(count)]
    starts = [
        text.tokenizer.encode(before + opening, add_special_tokens=False) for opening in openings
    ]
    after = text.tokenizer.encode(behind, add_special_tokens=False)
    stops = text.eos_token_ids
    prompts = dict[tuple[int, ...], None]()
    for some, temperature in ((starts[::2], FREE_TEMPERATURE), (starts[1::2], OPENED_TEMPERATURE)):
        asked = list(zip(some, say(some, temperature, QUESTION_TOKENS), strict=True))
        # A question that was cut off is none, unless the model ends no question.
        for start, said in [each for each in asked if each[1][-1] in stops] or asked:
            prompts[*start, *(token for token in said if token not in stops), *after] = None
    return [list(prompt) for prompt in prompts]
