"""The JSON that clients of Ollama's API send, as typed structs. Types are checked here, ranges by
the processor's contract."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from headwater.services.runtime.request_limits import MAX_MESSAGE_PARTS, MAX_TEXTS, MAX_TOOLS

from ..wire.body import Body

Flag = Annotated[bool, Meta(description="true or false")]
Number = Annotated[float, Meta(description="a number")]
Whole = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="a whole number of 32 bits")]
ModelName = Annotated[str, Meta(description="a served model's name")]
KeepAlive = Annotated[
    float | str, Meta(description="a number of seconds, or a duration such as 5m")
]


class Options(Body, kw_only=True):
    """Settings of one answer. Absent ones take the model's defaults."""

    temperature: Annotated[float, Meta(description="a number, 0…2")] | None = None
    top_p: Annotated[float, Meta(description="a number above 0, up to 1")] | None = None
    top_k: Whole | None = None
    min_p: Annotated[float, Meta(description="a number, 0…1")] | None = None
    presence_penalty: Annotated[float, Meta(description="a number, −2…2")] | None = None
    frequency_penalty: Annotated[float, Meta(description="a number, −2…2")] | None = None
    repeat_penalty: Annotated[float, Meta(description="a number, 1e-6…1e6")] | None = None
    repeat_last_n: Whole | None = None
    seed: (
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a whole number of 64 bits")]
        | None
    ) = None
    stop: Annotated[str | list[str], Meta(description="a string or up to 16 strings")] | None = None
    num_predict: (
        Annotated[
            Whole, Meta(description="a whole number, at least 1, or −1: what the context leaves")
        ]
        | None
    ) = None


class Call(Body, kw_only=True):
    """The function of a call, and its arguments."""

    name: str
    arguments: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    index: int | None = None
    """Accepted without effect: calls stand in their order."""


class ToolCall(Body, kw_only=True):
    """A call in an assistant's earlier message."""

    function: Annotated[Call, Meta(description="an object with name and arguments")]
    id: str = ""
    type: Annotated[Literal["function"], Meta(description="function")] = "function"


class Message(Body, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str = ""
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Function(Body, kw_only=True):
    """Function of a tool."""

    name: Annotated[str, Meta(description="1 to 64 letters, digits, _, - and .")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], Meta(description="a JSON Schema of an object")] | None = (
        None
    )


class Tool(Body, kw_only=True):
    """A function that the answer may call."""

    function: Annotated[Function, Meta(description="an object with a name")]
    type: Annotated[Literal["function"], Meta(description="function")] = "function"


class Answering(Body, kw_only=True):
    """Fields that chat and generate share."""

    model: ModelName
    stream: Flag | None = None
    """Absent: the answer is a stream."""
    format: Annotated[str | dict[str, Any], Meta(description="json or a JSON Schema")] | None = None
    think: (
        Annotated[
            bool | Literal["low", "medium", "high", "max"],
            Meta(description="true, false, low, medium, high or max"),
        ]
        | None
    ) = None
    options: Annotated[Options, Meta(description="an object")] | None = None
    keep_alive: KeepAlive | None = None
    logprobs: Flag | None = None
    top_logprobs: (
        Annotated[int, Meta(ge=0, le=2**32 - 1, description="a whole number, 0…20")] | None
    ) = None


class ChatRequest(Answering, kw_only=True):
    """The body of POST /api/chat. Without messages it loads the model."""

    messages: (
        Annotated[
            list[Message],
            Meta(
                max_length=MAX_MESSAGE_PARTS,
                description=f"a list of at most {MAX_MESSAGE_PARTS} messages",
            ),
        ]
        | None
    ) = None
    tools: (
        Annotated[
            list[Tool], Meta(max_length=MAX_TOOLS, description=f"a list of at most {MAX_TOOLS}")
        ]
        | None
    ) = None


class GenerateRequest(Answering, kw_only=True):
    """The body of POST /api/generate. Without a prompt it loads the model."""

    prompt: str | None = None
    suffix: str | None = None
    """Text behind the gap that the answer fills; empty: there is none."""
    system: str | None = None
    raw: Flag | None = None
    """Whether the prompt is given to the model without its chat template."""


class Embedding(Body, kw_only=True):
    """Fields that both endpoints of vectors share."""

    model: ModelName
    keep_alive: KeepAlive | None = None


class EmbedRequest(Embedding, kw_only=True):
    """The body of POST /api/embed. Without input it loads the model."""

    input: (
        Annotated[
            str
            | Annotated[
                list[str], Meta(max_length=MAX_TEXTS, description=f"up to {MAX_TEXTS} strings")
            ],
            Meta(description=f"a string or a list of up to {MAX_TEXTS} strings, none empty"),
        ]
        | None
    ) = None
    truncate: Flag | None = None
    """Whether what exceeds the context is left out; absent: it is."""
    dimensions: (
        Annotated[
            int,
            Meta(ge=0, le=2**32 - 1, description="a whole number, up to the model's hidden size"),
        ]
        | None
    ) = None


class EmbeddingsRequest(Embedding, kw_only=True):
    """The body of POST /api/embeddings, the predecessor of /api/embed. Without a prompt it loads
    the model."""

    prompt: str | None = None


class ShowRequest(Body, kw_only=True):
    """The body of POST /api/show."""

    model: ModelName | None = None
    name: ModelName | None = None
    """Predecessor of `model`."""
