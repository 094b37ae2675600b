"""`headwater chat`: a conversation in the terminal over any OpenAI-compatible server, streamed,
with its history."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from ..runtime.printable import LAYOUT, printable, shown
from .answer_stream import AnswerStream, ChatError, Chunk, sentence_of
from .cluster_unreachable import WITHOUT_ANSWER, unreached
from .word_wrap import WordWrap

MAX_TEMPERATURE = 2
DEFAULT_FILE = "chat.json"
PROMPT = "model › "
HELP = (
    "/new starts over, /system TEXT sets the system message, /model lists the models and /model "
    "NAME takes another, /temperature NUMBER sets it, /save FILE writes the conversation as JSON, "
    "/quit leaves (or Ctrl-D); a line that ends with \\ goes on in the next; Ctrl-C stops an answer"
)


class Thought(str):
    """Text of an answer that is a thought, and no content."""


class Chat:
    """A conversation with one model. Knows nothing about the terminal."""

    def __init__(
        self, client: httpx.Client, model: str, *, system: str = "", options: dict[str, Any]
    ) -> None:
        self.model = model
        self.messages: list[dict[str, str]] = []
        self.usage: dict[str, Any] = {}
        """Usage of the last answer."""
        self.engine: dict[str, Any] = {}
        """The engine's part of the last answer's receipt; empty where the server sends none."""
        self.seconds = 0.0
        """Time from the first piece of the last answer to its end."""
        self._client = client
        self._options = dict(options)
        self._is_resumable = True
        """Whether streams can be resumed; true until the server refuses."""
        self.start_over(system)

    def models(self) -> list[str]:
        """Ids of the models that the server lists. Raises `ChatError`."""
        return served_models(self._client)

    def set_temperature(self, text: str) -> None:
        """Raises `ChatError` for what is no temperature."""
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= MAX_TEMPERATURE:
            raise ChatError(f"the temperature is {text!r}; allowed: 0…{MAX_TEMPERATURE}")
        self._options["temperature"] = value

    def save(self, path: Path) -> None:
        """Writes model and messages as the body of a request has them. Raises `OSError`."""
        content = {"model": self.model, "messages": self.messages}
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n")

    def start_over(self, system: str = "") -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> Iterator[str]:
        """Pieces of the answer; what came of it joins the history even when the reader leaves
        early."""
        messages = [*self.messages, {"role": "user", "content": question}]
        body = {"model": self.model, "messages": messages, "stream": True, **self._options}
        answer = ""
        began = 0.0
        self.engine = {}
        try:
            for chunk in self._chunks(body):
                self.usage = chunk.get("usage") or self.usage
                self.engine = (chunk.get("receipt") or {}).get("engine") or self.engine
                for choice in chunk.get("choices", ()):
                    if thought := choice["delta"].get("reasoning_content"):
                        began = began or time.monotonic()
                        yield Thought(thought)
                    if piece := choice["delta"].get("content"):
                        began = began or time.monotonic()
                        answer += piece
                        yield piece
        finally:
            self.seconds = time.monotonic() - began if began else 0.0
            if answer:
                self.messages.append({"role": "user", "content": question})
                self.messages.append({"role": "assistant", "content": answer})

    def _chunks(self, body: dict[str, Any]) -> Iterator[Chunk]:
        """Asks for a stream that can be resumed, unless the server has refused one."""
        options = (
            {"include_usage": True, "resumable": True}
            if self._is_resumable
            else {"include_usage": True}
        )
        try:
            yield from AnswerStream(self._client, body | {"stream_options": options}).chunks()
        except ChatError as refusal:
            if not self._is_resumable or "resumable" not in str(refusal):
                raise
            self._is_resumable = False
            yield from self._chunks(body)


def first_model(client: httpx.Client) -> str:
    """The id of the first model that the server lists. Raises `ChatError` when it lists none, or is
    not there."""
    models = served_models(client)
    if not models:
        raise ChatError("the server serves no model yet")
    return models[0]


def served_models(client: httpx.Client) -> list[str]:
    """Ids of the models that the server lists. Raises `ChatError`."""
    try:
        reply = client.get("models")
    except WITHOUT_ANSWER as failure:
        raise ChatError(unreached(client.base_url, failure)) from None
    if reply.is_error:
        raise ChatError(sentence_of(reply))
    return [str(each["id"]) for each in reply.json()["data"]]


def converse(chat: Chat, console: Console) -> None:
    """Reads questions and prints answers until the person leaves."""
    console.print(f"[bold]{shown(chat.model)}[/]  [dim]{HELP}[/]")
    while True:
        try:
            line = _question(console)
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line in ("/quit", "/exit"):
            return
        command, _, rest = line.partition(" ")
        if command in ("/new", "/system"):
            chat.start_over(rest.strip() if command == "/system" else "")
        elif command == "/model":
            _choose_model(chat, rest.strip(), console)
        elif command in ("/temperature", "/save"):
            _set_or_save(chat, command, rest.strip(), console)
        elif line.startswith("/"):
            console.print(f"[dim]{HELP}[/]")
        elif line:
            _answer(chat, line, console)


def _question(console: Console) -> str:
    """Reads what the person types, of several lines where each but the last ends with a backslash.
    Raises `EOFError`, `KeyboardInterrupt`."""
    text = console.input("\n[bold cyan]you ›[/] ").strip()
    while text.endswith("\\"):
        text = f"{text[:-1]}\n{console.input('[bold cyan]  ›[/] ').rstrip()}"
    return text


def _set_or_save(chat: Chat, command: str, rest: str, console: Console) -> None:
    try:
        if command == "/temperature":
            chat.set_temperature(rest)
            console.print(f"[dim]temperature {shown(rest)}[/]")
        else:
            chat.save(Path(rest or DEFAULT_FILE).expanduser())
            console.print(f"[dim]saved: {shown(rest or DEFAULT_FILE)}[/]")
    except (ChatError, OSError) as error:
        console.print(f"[red]{shown(str(error))}[/]")


def _choose_model(chat: Chat, name: str, console: Console) -> None:
    """Takes another model for the next turns; the history stays. Without a name, or with an unknown
    one, lists them."""
    try:
        models = chat.models()
    except (ChatError, httpx.HTTPError) as error:
        console.print(f"[red]{shown(str(error))}[/]")
        return
    if name in models:
        chat.model = name
        console.print(f"[bold]{shown(name)}[/]")
        return
    if name:
        console.print(f"[red]no model {shown(name)} is served[/]")
    for each in models:
        console.print(f"{'*' if each == chat.model else ' '} {shown(each)}", highlight=False)


def _answer(chat: Chat, question: str, console: Console) -> None:
    console.print(f"[bold green]{PROMPT}[/]", end="")
    shown_answer = _ShownAnswer(console)
    try:
        for piece in chat.ask(question):
            shown_answer.show(piece)
        shown_answer.end()
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/]", end="")
    except (ChatError, httpx.HTTPError) as error:
        console.print(f"\n[red]{shown(str(error))}[/]", end="")
    console.print()
    details = chat.usage.get("prompt_tokens_details") or {}
    if chat.usage:
        counts = (
            f"{chat.usage['prompt_tokens']} prompt tokens "
            f"({details.get('cached_tokens', 0)} cached)"
        )
        console.print(
            f"[dim]{counts}{_speed(chat)}, {chat.usage['completion_tokens']} answered"
            f"{_steps(chat.engine)}[/]"
        )


class _ShownAnswer:
    """Writes an answer as it comes; thoughts are dim, and a line is empty between them and the
    answer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._wrap = WordWrap(console.width, len(PROMPT))
        self._style: str | None = None

    def show(self, piece: str) -> None:
        style = "dim" if isinstance(piece, Thought) else None
        if self._style and not style:
            self.end()
            self._console.out("\n\n", end="")
            self._wrap = WordWrap(self._console.width)
        self._style = style
        self._out(self._wrap.push(printable(piece, keep=LAYOUT)))

    def end(self) -> None:
        """Writes what is held back of the last word."""
        self._out(self._wrap.flush())

    def _out(self, text: str) -> None:
        self._console.out(text, end="", highlight=False, style=self._style)


def _speed(chat: Chat) -> str:
    """Tokens a second behind the first one."""
    num_later = chat.usage["completion_tokens"] - 1
    return f", {num_later / chat.seconds:.1f} tokens/s" if num_later > 0 < chat.seconds else ""


def _steps(engine: dict[str, Any]) -> str:
    """Tokens of the answer for each step of the engine, and how many of them were drafted."""
    if not engine:
        return ""
    drafted = engine["draft_tokens"]
    accepted = engine["accepted_tokens"]
    drafts = f" ({accepted} of {drafted} drafted accepted)" if drafted else ""
    return f", {engine['tokens_per_step']:.1f} tokens a step{drafts}"
