"""`headwater chat`: a conversation in the terminal over any OpenAI-compatible server, streamed,
with its history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
from rich.console import Console

from ..runtime.printable import LAYOUT, printable, shown
from .answer_stream import AnswerStream, ChatError, Chunk, sentence_of
from .cluster_unreachable import WITHOUT_ANSWER, unreached

HELP = (
    "/new starts over, /system TEXT sets the system message, /model lists the models and /model "
    "NAME takes another, "
    "/quit leaves (or Ctrl-D); Ctrl-C stops an answer"
)


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
        self._client = client
        self._options = options
        self._is_resumable = True
        """As far as the server has not said otherwise."""
        self.start_over(system)

    def models(self) -> list[str]:
        """Ids of the models that the server lists. Raises `ChatError`."""
        return served_models(self._client)

    def start_over(self, system: str = "") -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, question: str) -> Iterator[str]:
        """Pieces of the answer; what came of it joins the history even when the reader leaves
        early."""
        messages = [*self.messages, {"role": "user", "content": question}]
        body = {"model": self.model, "messages": messages, "stream": True, **self._options}
        answer = ""
        self.engine = {}
        try:
            for chunk in self._chunks(body):
                self.usage = chunk.get("usage") or self.usage
                self.engine = (chunk.get("receipt") or {}).get("engine") or self.engine
                for choice in chunk.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        answer += piece
                        yield piece
        finally:
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
            line = console.input("\n[bold cyan]you ›[/] ").strip()
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
        elif line.startswith("/"):
            console.print(f"[dim]{HELP}[/]")
        elif line:
            _answer(chat, line, console)


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
    console.print("[bold green]model ›[/] ", end="")
    try:
        for piece in chat.ask(question):
            console.out(printable(piece, keep=LAYOUT), end="", highlight=False)
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
            f"[dim]{counts}, {chat.usage['completion_tokens']} answered{_steps(chat.engine)}[/]"
        )


def _steps(engine: dict[str, Any]) -> str:
    """How many tokens a step of the engine brought, and how many of them were drafted."""
    if not engine:
        return ""
    drafted = engine["draft_tokens"]
    accepted = engine["accepted_tokens"]
    drafts = f" ({accepted} of {drafted} drafted accepted)" if drafted else ""
    return f", {engine['tokens_per_step']:.1f} tokens a step{drafts}"
