"""The JSON that clients of Anthropic's Messages API send, as typed structs. Types and ranges of
Anthropic's own are checked here, all others by the processor's contract."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from headwater.services.runtime.request_limits import MAX_MESSAGE_PARTS, MAX_TOOLS

from ..wire.body import Body

U32 = 2**32 - 1
MAX_TOP_K = 2**31 - 1
TOOL_NAME = "1 to 64 letters, digits, _, - and ."

Flag = Annotated[bool, Meta(description="true or false")]
Whole = Annotated[int, Meta(ge=1, le=U32, description="a whole number, at least 1")]
Share = Annotated[float, Meta(ge=0, le=1, description="a number, 0…1")]


class TextBlock(Body, kw_only=True):
    """A block of the system prompt or of a tool's result; only text is served."""

    type: str
    text: str | None = None
    source: Any = None
    """Accepted so that a block of an unsupported type is refused by its type."""
    citations: Any = None
    cache_control: Any = None
    """A hint to keep the prompt's cached blocks; see `cache_hints`. It has no effect on answers."""


TextBlocks = Annotated[
    list[TextBlock],
    Meta(max_length=MAX_MESSAGE_PARTS, description=f"up to {MAX_MESSAGE_PARTS} text blocks"),
]


class Block(TextBlock, kw_only=True):
    """A block of a message, with the fields of its type."""

    thinking: str | None = None
    signature: str | None = None
    """Not read: it is the server's own mark of a block that the client sends back."""
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    tool_use_id: str | None = None
    content: (
        Annotated[str | TextBlocks, Meta(description="a string or a list of text blocks")] | None
    ) = None
    is_error: Flag | None = None
    """Accepted without effect: the content says what failed."""
    caller: Any = None


class Message(Body, kw_only=True):
    """One message of a conversation."""

    role: str
    content: Annotated[
        str
        | Annotated[
            list[Block],
            Meta(max_length=MAX_MESSAGE_PARTS, description=f"up to {MAX_MESSAGE_PARTS} blocks"),
        ],
        Meta(description="a string or a list of blocks"),
    ]


class Tool(Body, kw_only=True):
    """A tool of the client, or one that Anthropic hosts or defines, by its type."""

    name: Annotated[str, Meta(description=TOOL_NAME)] | None = None
    type: str | None = None
    description: str | None = None
    input_schema: (
        Annotated[dict[str, Any], Meta(description="a JSON Schema of an object")] | None
    ) = None
    strict: Flag | None = None
    cache_control: Any = None


class ToolChoice(Body, kw_only=True):
    """Whether tools may or must be called."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"], Meta(description="auto, any, tool or none")
    ]
    name: str | None = None
    disable_parallel_tool_use: Flag | None = None


class Thinking(Body, kw_only=True):
    """Whether the model thinks before it answers, and for how many tokens."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive"],
        Meta(description="enabled, disabled or adaptive"),
    ]
    budget_tokens: Whole | None = None
    display: (
        Annotated[Literal["summarized", "omitted"], Meta(description="summarized or omitted")]
        | None
    ) = None
    """`summarized` delivers the thoughts as they are; there is no shorter form."""


class OutputFormat(Body, kw_only=True):
    """Constraint on the answer."""

    type: Annotated[Literal["json_schema"], Meta(description="json_schema")]
    schema: Annotated[dict[str, Any], Meta(description="a JSON Schema")]


class OutputConfig(Body, kw_only=True):
    """Effort and form of the answer."""

    effort: (
        Annotated[
            Literal["low", "medium", "high", "xhigh", "max"],
            Meta(description="low, medium, high, xhigh or max"),
        ]
        | None
    ) = None
    format: Annotated[OutputFormat, Meta(description="an object with a schema")] | None = None


class CountTokensRequest(Body, kw_only=True):
    """The body of POST /v1/messages/count_tokens: all that the prompt is made of."""

    model: Annotated[str, Meta(description="a served model's name")]
    messages: Annotated[
        list[Message],
        Meta(
            min_length=1,
            max_length=MAX_MESSAGE_PARTS,
            description=f"a list of at least one message, at most {MAX_MESSAGE_PARTS}",
        ),
    ]
    system: (
        Annotated[str | TextBlocks, Meta(description="a string or a list of text blocks")] | None
    ) = None
    tools: (
        Annotated[
            list[Tool], Meta(max_length=MAX_TOOLS, description=f"a list of at most {MAX_TOOLS}")
        ]
        | None
    ) = None
    tool_choice: Annotated[ToolChoice, Meta(description="an object with a type")] | None = None
    thinking: Annotated[Thinking, Meta(description="an object with a type")] | None = None
    output_config: (
        Annotated[OutputConfig, Meta(description="an object with effort and format")] | None
    ) = None
    cache_control: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of POST /v1/messages."""

    max_tokens: Whole
    stop_sequences: Annotated[list[str], Meta(description="up to 16 strings")] | None = None
    stream: Flag | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: (
        Annotated[int, Meta(ge=0, le=MAX_TOP_K, description="a whole number of 31 bits")] | None
    ) = None
    metadata: Any = None
    service_tier: Any = None
    """It has no effect on the answer."""
