"""The JSON of POST /v1/responses, as typed structs. Types are checked here, ranges by the
processor's contract."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from headwater.services.runtime.request_limits import MAX_MESSAGE_PARTS, MAX_TOOLS

from ..wire.body import Body
from .schema import Flag, Hinted, StructuredOutputs, Whole

ALLOWED_INPUT = f"a string or a list of up to {MAX_MESSAGE_PARTS} items"
TOOL_NAME = "1 to 64 letters, digits, _, - and ."
HostedType = Literal[
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]
"""Types of tools that OpenAI runs or defines. None of them is served."""
ToolType = Literal["function", "custom", "namespace"] | HostedType


class InputItem(Body, kw_only=True):
    """A message, a call, its result or reasoning, by type. The type decides which fields count."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: Any = None
    """A string or parts; the outputs of hosted tools have forms of their own."""
    action: Any = None
    operation: Any = None
    """Arguments of a call of a hosted tool, as of `action`."""
    summary: list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: Any = None


class InputPart(Body, kw_only=True):
    """A part of a message; only text is served."""

    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None


class ResponseFormatOfTool(Body, kw_only=True):
    """Text that a custom tool takes."""

    type: Annotated[Literal["text", "grammar"], Meta(description="text or grammar")] = "text"
    definition: (
        Annotated[str, Meta(description="a Lark grammar or a regular expression")] | None
    ) = None
    syntax: Annotated[Literal["lark", "regex"], Meta(description="lark or regex")] | None = None


class ToolFields(Body, kw_only=True):
    """Fields of a function that the answer may call, or of a custom tool, which takes text."""

    name: Annotated[str, Meta(description=TOOL_NAME)] | None = None
    description: str | None = None
    format: Annotated[ResponseFormatOfTool, Meta(description="an object with a type")] | None = None
    parameters: Annotated[dict[str, Any], Meta(description="a JSON Schema of an object")] | None = (
        None
    )
    strict: Flag | None = None
    defer_loading: Flag | None = None
    """Whether a search is to find the tool first. It has no effect: all tools are shown at once."""


class GroupedTool(ToolFields, kw_only=True):
    """A function or a custom tool of a namespace."""

    type: Annotated[Literal["function", "custom"], Meta(description="function or custom")]


class ResponseTool(ToolFields, kw_only=True):
    """A function, a custom tool, a namespace of them, or a tool that OpenAI hosts."""

    type: Annotated[
        ToolType, Meta(description="function, custom, namespace, or a type of a hosted tool")
    ]
    tools: (
        Annotated[
            list[GroupedTool],
            Meta(max_length=MAX_TOOLS, description=f"up to {MAX_TOOLS} functions"),
        ]
        | None
    ) = None


class NamedResponseTool(Body, kw_only=True):
    """A tool by its name."""

    name: str
    namespace: str | None = None
    type: Annotated[Literal["function", "custom"], Meta(description="function or custom")]


class ResponseToolChoice(Body, kw_only=True):
    """The tool that is to be called, or those that may be."""

    type: Annotated[
        Literal["function", "custom", "allowed_tools"],
        Meta(description="function, custom or allowed_tools"),
    ]
    name: str | None = None
    namespace: str | None = None
    mode: Annotated[Literal["auto", "required"], Meta(description="auto or required")] | None = None
    tools: (
        Annotated[
            list[NamedResponseTool],
            Meta(min_length=1, description="at least one tool, by its name"),
        ]
        | None
    ) = None


class TextFormat(Body, kw_only=True):
    """Constraint on the text of the answer."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        Meta(description="text, json_object or json_schema"),
    ]
    name: str | None = None
    schema: (
        Annotated[dict[str, Any], Meta(description="a JSON Schema, with type json_schema")] | None
    ) = None
    strict: Flag | None = None
    description: str | None = None


class TextOptions(Body, kw_only=True):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Body, kw_only=True):
    """Amount of reasoning."""

    effort: str | None = None
    summary: (
        Annotated[
            Literal["auto", "detailed"],
            Meta(description="auto or detailed: the answer has all thoughts, never a summary"),
        ]
        | None
    ) = None


class ResponseStreamOptions(Body, kw_only=True):
    """Extras of a stream."""

    include_obfuscation: Flag | None = None
    resumable: Flag | None = None


class ConversationId(Body, kw_only=True):
    """A conversation by its id."""

    id: str


class ResponsesRequest(Hinted, kw_only=True):
    """The body of POST /v1/responses."""

    model: Annotated[str, Meta(description="a served model's name")]
    input: (
        str
        | Annotated[list[InputItem], Meta(max_length=MAX_MESSAGE_PARTS, description=ALLOWED_INPUT)]
    )
    instructions: str | None = None
    previous_response_id: (
        Annotated[str, Meta(max_length=128, description="the id of a response")] | None
    ) = None
    store: Flag | None = None
    stream: Flag | None = None
    stream_options: (
        Annotated[ResponseStreamOptions, Meta(description="an object, with stream")] | None
    ) = None
    max_output_tokens: Annotated[Whole, Meta(description="a whole number, at least 1")] | None = (
        None
    )
    tools: (
        Annotated[
            list[ResponseTool],
            Meta(max_length=MAX_TOOLS, description=f"up to {MAX_TOOLS} functions"),
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[
            str | ResponseToolChoice,
            Meta(description="auto, none, required, or an object that names functions"),
        ]
        | None
    ) = None
    parallel_tool_calls: Flag | None = None
    structured_outputs: (
        Annotated[StructuredOutputs, Meta(description="an object of one kind")] | None
    ) = None
    text: Annotated[TextOptions, Meta(description="an object with a format")] | None = None
    reasoning: Annotated[Reasoning, Meta(description="an object with an effort")] | None = None
    include: Annotated[list[str], Meta(description="names of what else is answered")] | None = None
    top_logprobs: Annotated[Whole, Meta(description="a whole number, 0…20")] | None = None
    metadata: (
        Annotated[dict[str, str], Meta(max_length=16, description="up to 16 strings by name")]
        | None
    ) = None
    truncation: (
        Annotated[Literal["auto", "disabled"], Meta(description="auto or disabled")] | None
    ) = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    max_tool_calls: Annotated[Whole, Meta(description="a whole number")] | None = None
    """Limit on calls of the tools that OpenAI runs itself. It has no effect: all calls here are the
    client's."""
    background: Flag | None = None
    conversation: (
        Annotated[str | ConversationId, Meta(description="the id of a conversation")] | None
    ) = None
    prompt: Any = None
    cache_salt: (
        Annotated[str, Meta(max_length=1024, description="a string of up to 1024 characters")]
        | None
    ) = None
    priority: Annotated[int, Meta(ge=0, le=1000, description="a whole number, 0…1000")] | None = (
        None
    )
    request_id: (
        Annotated[str, Meta(max_length=256, description="a string of up to 256 characters")] | None
    ) = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="an object")] | None = None

    @property
    def conversation_id(self) -> str | None:
        given = self.conversation
        return given.id if isinstance(given, ConversationId) else given
