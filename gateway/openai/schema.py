"""The JSON that clients send, as typed structs. Types are checked here, ranges by the processor's
contract."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from headwater.services.runtime.request_limits import (
    MAX_BIASES,
    MAX_MESSAGE_PARTS,
    MAX_TEXTS,
    MAX_TOOLS,
)
from headwater.services.runtime.speculation import MAX_DRAFT_TOKENS, NAMES

from ..wire.body import Body

U32 = 2**32 - 1


Whole = Annotated[int, Meta(ge=0, le=U32)]
Flag = Annotated[bool, Meta(description="true or false")]
TokenId = Annotated[Whole, Meta(description="a token id")]
Truncation = Annotated[
    int, Meta(ge=-1, le=U32, description="a whole number, at least 1, or −1: what fits")
]


class Speculative(Struct, kw_only=True, forbid_unknown_fields=True):
    """Drafting of an answer's tokens."""

    mode: Annotated[Literal["auto", "off"], Meta(description="auto or off")] | None = None
    drafter: Annotated[str, Meta(description=" or ".join(NAMES))] | None = None
    max_tokens: (
        Annotated[Whole, Meta(description=f"a whole number, 1…{MAX_DRAFT_TOKENS}")] | None
    ) = None


class Sampling(Body, kw_only=True):
    """Sampling fields that chat and completions share. Absent ones take the model's defaults."""

    n: Annotated[Whole, Meta(description="a whole number, 1…128")] | None = None
    temperature: Annotated[float, Meta(description="a number, 0…2")] | None = None
    top_p: Annotated[float, Meta(description="a number above 0, up to 1")] | None = None
    top_k: (
        Annotated[
            int,
            Meta(
                ge=-(2**31),
                le=2**31 - 1,
                description="a whole number of 32 bits: −1, 0 or at least 1",
            ),
        ]
        | None
    ) = None
    min_p: Annotated[float, Meta(description="a number, 0…1")] | None = None
    presence_penalty: Annotated[float, Meta(description="a number, −2…2")] | None = None
    frequency_penalty: Annotated[float, Meta(description="a number, −2…2")] | None = None
    repetition_penalty: Annotated[float, Meta(description="a number, 1e-6…1e6")] | None = None
    seed: (
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a whole number of 64 bits")]
        | None
    ) = None
    stop: Annotated[str | list[str], Meta(description="a string or up to 16 strings")] | None = None
    stop_token_ids: (
        Annotated[
            list[TokenId], Meta(max_length=MAX_TEXTS, description=f"up to {MAX_TEXTS} token ids")
        ]
        | None
    ) = None
    bad_words: (
        Annotated[list[str], Meta(max_length=MAX_TEXTS, description=f"up to {MAX_TEXTS} strings")]
        | None
    ) = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, description="at least one token id")] | None
    ) = None
    logit_bias: (
        Annotated[
            dict[str, float],
            Meta(max_length=MAX_BIASES, description=f"up to {MAX_BIASES} numbers by token id"),
        ]
        | None
    ) = None
    ignore_eos: Flag | None = None
    min_tokens: Annotated[Whole, Meta(description="a whole number, 0…max_tokens")] | None = None
    max_tokens: Annotated[Whole, Meta(description="a whole number, at least 1")] | None = None
    prompt_logprobs: Annotated[Whole, Meta(description="a whole number, 0…20")] | None = None
    skip_special_tokens: Flag | None = None
    include_stop_str_in_output: Flag | None = None
    best_of: Annotated[Whole, Meta(description="a whole number, at least n")] | None = None
    use_beam_search: Flag | None = None
    length_penalty: Annotated[float, Meta(description="a number, −10…10")] | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: (
        Annotated[Literal["left", "right"], Meta(description="left or right")] | None
    ) = None
    thinking_token_budget: (
        Annotated[int, Meta(ge=-1, le=U32, description="a whole number of tokens, or −1: no limit")]
        | None
    ) = None
    speculative: (
        Annotated[
            Literal["auto", "off"] | Speculative,
            Meta(description="auto, off, or an object with mode, drafter and max_tokens"),
        ]
        | None
    ) = None


class StreamOptions(Body, kw_only=True):
    """Extras of a stream."""

    include_obfuscation: Flag | None = None
    """Accepted without effect: nothing is padded."""
    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    resumable: Flag | None = None


class JsonSchemaFormat(Body, kw_only=True):
    """A schema and its name. Answers match it, whatever `strict` says; with `strict`, objects are
    closed unless the schema opens them."""

    schema: Annotated[dict[str, Any] | str, Meta(description="a JSON Schema")] | None = None
    name: str = ""
    description: str | None = None
    strict: Flag | None = None


class ResponseFormat(Body, kw_only=True):
    """Constraint on an answer, by its type."""

    type: Annotated[
        str, Meta(description="text, json_object, json_schema, regex, grammar or structural_tag")
    ]
    json_schema: Annotated[JsonSchemaFormat, Meta(description="an object with a schema")] | None = (
        None
    )
    schema: Annotated[dict[str, Any] | str, Meta(description="a JSON Schema")] | None = None
    pattern: Annotated[str, Meta(description="a regular expression")] | None = None
    grammar: Annotated[str, Meta(description="a Lark grammar")] | None = None
    format: Annotated[dict[str, Any], Meta(description="a format of a structural tag")] | None = (
        None
    )
    structures: (
        Annotated[list[dict[str, Any]], Meta(description="objects with begin, schema and end")]
        | None
    ) = None
    triggers: Annotated[list[str], Meta(description="strings that begin structures")] | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """Constraint on an answer: one of the first six fields."""

    json: Annotated[dict[str, Any] | str, Meta(description="a JSON Schema")] | None = None
    json_object: Flag | None = None
    regex: Annotated[str, Meta(description="a regular expression")] | None = None
    choice: Annotated[list[str], Meta(description="strings")] | None = None
    grammar: Annotated[str, Meta(description="a Lark grammar")] | None = None
    structural_tag: Annotated[dict[str, Any] | str, Meta(description="a structural tag")] | None = (
        None
    )
    whitespace_pattern: (
        Annotated[str, Meta(description="a regular expression, with JSON")] | None
    ) = None
    disable_any_whitespace: Flag | None = None
    disable_fallback: Flag | None = None
    """Accepted from vLLM's clients without effect: there is nothing to fall back to."""
    disable_additional_properties: Flag | None = None


class AgentHints(Body, kw_only=True):
    """Hints that Dynamo's clients send."""

    priority: Annotated[int, Meta(ge=-1000, le=1000, description="a whole number, -1000…1000")] = 0
    """Higher is more important."""
    osl: Annotated[int, Meta(ge=0, le=1 << 24, description="a number of tokens")] = 0
    """Expected length of the answer."""
    strict_priority: Any = None
    latency_sensitivity: Any = None
    speculative_prefill: Any = None
    """Accepted without effect, like the two fields before it."""


class Nvext(Body, kw_only=True):
    """Dynamo's extension of a body."""

    agent_hints: Annotated[AgentHints, Meta(description="an object of hints")] | None = None


class Hinted(Sampling, kw_only=True):
    """Hints on cached blocks, beside sampling."""

    session_id: (
        Annotated[str, Meta(max_length=256, description="a string of up to 256 characters")] | None
    ) = None
    """Name of the conversation: the next turn takes over the value of its cached blocks."""
    cache_ttl_seconds: (
        Annotated[int, Meta(ge=0, le=86_400, description="a whole number, 0…86400")] | None
    ) = None
    """Time for which the prompt's cached blocks are kept before others of the tenant."""
    nvext: Annotated[Nvext, Meta(description="an object with agent_hints")] | None = None


class Answering(Hinted, kw_only=True):
    """Fields that chat and completions share besides sampling."""

    model: Annotated[str, Meta(description="a served model's name")]
    stream: Flag | None = None
    stream_options: Annotated[StreamOptions, Meta(description="an object, with stream")] | None = (
        None
    )
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
    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None
    response_format: Annotated[ResponseFormat, Meta(description="an object with a type")] | None = (
        None
    )
    structured_outputs: (
        Annotated[StructuredOutputs, Meta(description="an object of one kind")] | None
    ) = None
    guided_json: Annotated[dict[str, Any] | str, Meta(description="a JSON Schema")] | None = None
    guided_regex: Annotated[str, Meta(description="a regular expression")] | None = None
    guided_choice: Annotated[list[str], Meta(description="strings")] | None = None
    guided_grammar: Annotated[str, Meta(description="a Lark grammar")] | None = None
    guided_whitespace_pattern: (
        Annotated[str, Meta(description="a regular expression, with JSON")] | None
    ) = None
    guided_decoding_backend: Any = None
    """Name of a grammar library. It has no effect: there is one."""
    structural_tag: Annotated[dict[str, Any] | str, Meta(description="a structural tag")] | None = (
        None
    )
    regex: Annotated[str, Meta(description="a regular expression")] | None = None
    ebnf: Annotated[str, Meta(description="a grammar in GBNF")] | None = None
    json_schema: Annotated[dict[str, Any] | str, Meta(description="a JSON Schema")] | None = None
    no_stop_trim: Flag | None = None
    """SGLang's name for `include_stop_str_in_output`; the three fields before it are SGLang's as
    well."""
    user: Any = None
    metadata: Any = None
    service_tier: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    """It has no effect on the answer, as OpenAI's other fields about users and prices."""


class ContentPart(Body, kw_only=True):
    """A part of a message; only text is served."""

    type: str
    text: str | None = None
    refusal: str | None = None
    """The text of a part of that type."""


class FunctionCall(Body, kw_only=True):
    """The function of a tool call."""

    name: str
    arguments: str | None = ""


class LegacyCall(Body, kw_only=True):
    """A call as it was before there were tools; clients also send back empty ones."""

    name: str = ""
    arguments: str | None = ""


class CustomCall(Body, kw_only=True):
    """The custom tool of a tool call, and the text that it took."""

    name: str
    input: str = ""


class ToolCall(Body, kw_only=True):
    """A call in an assistant's earlier message."""

    function: (
        Annotated[FunctionCall, Meta(description="an object with name and arguments")] | None
    ) = None
    custom: Annotated[CustomCall, Meta(description="an object with name and input")] | None = None
    id: str = ""
    type: Annotated[Literal["function", "custom"], Meta(description="function or custom")] = (
        "function"
    )


class Message(Body, kw_only=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Alias of the field before."""
    refusal: str | None = None
    """Text in which an assistant refused to answer."""
    annotations: Any = None
    audio: Any = None
    """Accepted as clients send answers back: null, or empty."""
    function_call: (
        Annotated[LegacyCall, Meta(description="an object with name and arguments")] | None
    ) = None


class Function(Body, kw_only=True):
    """Function of a tool."""

    name: Annotated[str, Meta(description="1 to 64 letters, digits, _, - and .")]
    description: str | None = None
    parameters: Annotated[dict[str, Any], Meta(description="a JSON Schema of an object")] | None = (
        None
    )
    strict: Flag | None = None


class TextGrammar(Body, kw_only=True):
    """Constraint on the text that a custom tool takes."""

    definition: Annotated[str, Meta(description="a Lark grammar or a regular expression")]
    syntax: Annotated[Literal["lark", "regex"], Meta(description="lark or regex")]


class CustomFormat(Body, kw_only=True):
    """Text that a custom tool takes."""

    type: Annotated[Literal["text", "grammar"], Meta(description="text or grammar")] = "text"
    grammar: (
        Annotated[TextGrammar, Meta(description="an object with definition and syntax")] | None
    ) = None


class CustomTool(Body, kw_only=True):
    """A tool that takes text."""

    name: Annotated[str, Meta(description="1 to 64 letters, digits, _, - and .")]
    description: str | None = None
    format: Annotated[CustomFormat, Meta(description="an object with a type")] | None = None


class Tool(Body, kw_only=True):
    """A function that the answer may call, or a tool that takes text."""

    function: Annotated[Function, Meta(description="an object with a name")] | None = None
    custom: Annotated[CustomTool, Meta(description="an object with a name")] | None = None
    type: Annotated[Literal["function", "custom"], Meta(description="function or custom")] = (
        "function"
    )


Messages = Annotated[
    list[Message],
    Meta(
        max_length=MAX_MESSAGE_PARTS,
        description=f"a list of at least one message, at most {MAX_MESSAGE_PARTS}",
    ),
]
Tools = Annotated[
    list[Tool],
    Meta(min_length=1, max_length=MAX_TOOLS, description=f"at least one tool, at most {MAX_TOOLS}"),
]


class ToolName(Body, kw_only=True):
    """The tool that is to be called."""

    name: str


class NamedTool(Body, kw_only=True):
    """A tool by its name."""

    function: Annotated[ToolName, Meta(description="an object with a name")] | None = None
    custom: Annotated[ToolName, Meta(description="an object with a name")] | None = None
    type: Annotated[Literal["function", "custom"], Meta(description="function or custom")] = (
        "function"
    )


class AllowedTools(Body, kw_only=True):
    """Tools of which some may, or must, be called."""

    mode: Annotated[Literal["auto", "required"], Meta(description="auto or required")]
    tools: Annotated[
        list[NamedTool], Meta(min_length=1, description="at least one tool, by its name")
    ]


class ToolChoice(Body, kw_only=True):
    """The tool that is to be called, or those that may be."""

    type: Annotated[
        Literal["function", "custom", "allowed_tools"],
        Meta(description="function, custom or allowed_tools"),
    ] = "function"
    function: Annotated[ToolName, Meta(description="an object with a name")] | None = None
    custom: Annotated[ToolName, Meta(description="an object with a name")] | None = None
    allowed_tools: (
        Annotated[AllowedTools, Meta(description="an object with a mode and tools")] | None
    ) = None


class ChatCompletionRequest(Answering, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    tools: Tools | None = None
    documents: (
        Annotated[list[dict[str, Any]], Meta(description="objects with title and text")] | None
    ) = None
    echo: Flag | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    add_special_tokens: Flag | None = None
    chat_template: (
        Annotated[str, Meta(description="a Jinja template, or the name of one of the model's")]
        | None
    ) = None
    """Template in place of the model's, where the operator trusts those of clients."""
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    tool_choice: (
        Annotated[
            str | ToolChoice,
            Meta(description="auto, none, required, or an object that names functions"),
        ]
        | None
    ) = None
    parallel_tool_calls: Flag | None = None
    functions: (
        Annotated[
            list[Function],
            Meta(
                min_length=1, max_length=MAX_TOOLS, description=f"at least one, at most {MAX_TOOLS}"
            ),
        ]
        | None
    ) = None
    """Predecessor of `tools`; the next field is that of `tool_choice`."""
    function_call: (
        Annotated[str | ToolName, Meta(description="auto, none, or an object with a name")] | None
    ) = None
    include_reasoning: Flag | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    max_completion_tokens: (
        Annotated[Whole, Meta(description="a whole number, at least 1")] | None
    ) = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[Whole, Meta(description="a whole number, 0…20")] | None = None


class CompletionRequest(Answering, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(description="a string, a list of strings, token ids, or a list of lists of token ids"),
    ]
    suffix: Annotated[str, Meta(description="the text behind the gap")] | None = None
    """Text behind the gap that the answer fills; empty: there is none."""
    echo: Flag | None = None
    logprobs: Annotated[Whole, Meta(description="a whole number, 0…20")] | None = None
    add_special_tokens: Flag | None = None


class TokenizeRequest(Body, kw_only=True):
    """The body of POST /tokenize: a prompt or messages."""

    model: Annotated[str, Meta(description="a served model's name")] | None = None
    """Name of the model; None: the only one that is served."""
    prompt: Annotated[str, Meta(description="a string")] | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    add_special_tokens: Flag | None = None
    chat_template: (
        Annotated[str, Meta(description="a Jinja template, or the name of one of the model's")]
        | None
    ) = None
    """Template in place of the model's, where the operator trusts those of clients."""
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="an object")] | None = None
    return_token_strs: Flag | None = None


class DetokenizeRequest(Body, kw_only=True):
    """The body of POST /detokenize."""

    model: Annotated[str, Meta(description="a served model's name")] | None = None
    """Name of the model; None: the only one that is served."""
    tokens: Annotated[list[TokenId], Meta(description="token ids")]
