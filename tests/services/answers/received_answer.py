"""What a client puts together of an answer's parts."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from headwater.proto.common_pb2 import AnswerFormat
from headwater.services.answers.parser import AnswerParser
from headwater.services.answers.parts import Parts


@dataclass
class ReceivedAnswer:
    """What a client has put together."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    def take(self, parts: Parts) -> None:
        self.content += parts.content
        self.reasoning += parts.reasoning
        for call in parts.calls:
            if call.index == len(self.names):
                assert call.name
                self.names.append("")
                self.arguments.append("")
            self.names[call.index] += call.name
            self.arguments[call.index] += call.arguments

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [
            (name, json.loads(arguments))
            for name, arguments in zip(self.names, self.arguments, strict=True)
        ]


def receive(answer_format: AnswerFormat, pieces: list[str]) -> ReceivedAnswer:
    parser = AnswerParser(answer_format)
    received = ReceivedAnswer()
    for piece in pieces:
        received.take(parser.push(piece))
    received.take(parser.flush())
    return received


def cut(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]
