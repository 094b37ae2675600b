"""Answers of a load beside those of its requests when each is served alone."""

from __future__ import annotations

from headwater.engine_core.request import FinishReason
from tests.engine_core.replay.cases import Built
from tests.engine_core.replay.loads import Load
from tests.engine_core.replay.recording import Answer, Stream, plain_answers, record


def wrong_answers(built: Built, load: Load, plain: Built | None = None) -> tuple[Stream, str]:
    """The stream of a load, and its requests whose answers are not, to the bit, those that
    `plain`, or the executor itself, gives them alone. Empty: all are."""
    stream, answers = record(built, load)
    alone = plain_answers(plain or built, load.requests)
    wrong = [key for key, answer in answers.items() if not _is_right(answer, alone[key])]
    return stream, f"requests {wrong} are answered otherwise than alone" if wrong else ""


def _is_right(answer: Answer, alone: Answer) -> bool:
    if answer.reason is FinishReason.CANCELLED:
        return answer.begins(alone)
    return answer == alone
