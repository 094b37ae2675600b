"""The list of hostile bodies, and harmless ones for comparison: a name, the function that sends it,
and a sentence for docs/costly_requests.md."""

from __future__ import annotations

from dataclasses import dataclass

from . import constraints, ollama_posts, posts, values
from .attack import Attack
from .batch_attack import Batch
from .controls import OwnWork
from .grpc_attacks import Calls, HeadReferences, UnreadCalls, costly_kwargs, small_chat
from .rest_attacks import OpenHeads, Posts


@dataclass(frozen=True, slots=True)
class Body:
    name: str
    attack: Attack
    what: str


CONTROLS = (
    Body(
        "control-client",
        OwnWork(),
        "nothing, from a client that computes without a pause",
    ),
    Body(
        "control-posts",
        Posts(posts.small_completion, 12, 0.1),
        "harmless: completions of one token, on 12 connections",
    ),
    Body(
        "control-grpc",
        Calls(small_chat, 12, pause=0.1),
        "harmless: chats of one token over gRPC, 12 at once",
    ),
)
"""Harmless clients: what any traffic costs the neighbour. They have no goals."""
BODIES = (
    Body(
        "exponents",
        Posts(posts.value(values.exponents)),
        "600,000 numbers `1e308` in an unknown field, 3.6 MB",
    ),
    Body(
        "exponents-gzip",
        Posts(posts.gzipped(values.exponents)),
        "the same body as gzip, 5 kB",
    ),
    Body(
        "exponents-grpc",
        Calls(costly_kwargs, 4, pause=0.2),
        "the same numbers in `chat_template_kwargs_json` of a gRPC call",
    ),
    Body(
        "nested",
        Posts(posts.template_value(values.nested), 12, 0.1),
        "lists in each other, 900 deep, for the chat template",
    ),
    Body(
        "many-nested",
        Posts(posts.value(values.many_nested)),
        "30,000 lists of depth 60",
    ),
    Body(
        "keys",
        Posts(posts.value(values.keys)),
        "an object with 250,000 names",
    ),
    Body(
        "escapes",
        Posts(posts.value(values.escapes)),
        r"a string of 600,000 escapes (`\u0061`)",
    ),
    Body(
        "digits",
        Posts(posts.value(values.digits)),
        "a number of three million digits",
    ),
    Body(
        "many-digits",
        Posts(posts.value(values.many_digits)),
        "900 numbers of 4,000 digits",
    ),
    Body(
        "long-text",
        Posts(posts.value(values.long_text)),
        "one string of 3 MiB",
    ),
    Body(
        "broken-end",
        Posts(posts.broken_end),
        "JSON of 3 MB without its last brace",
    ),
    Body(
        "slow-bodies",
        Posts(posts.value(values.nested), 100, bytes_per_second=20),
        "100 bodies, 20 bytes a second each",
    ),
    Body(
        "gzip-then-chunked",
        Posts(posts.doubled_coding("gzip, chunked"), 12, 0.1),
        "`Transfer-Encoding: gzip, chunked`",
    ),
    Body(
        "chunked-twice",
        Posts(posts.doubled_coding("chunked, chunked"), 12, 0.1),
        "`Transfer-Encoding: chunked, chunked`",
    ),
    Body(
        "gzip-bomb",
        Posts(posts.bomb),
        "64 MiB in 64 kB of gzip",
    ),
    Body(
        "long-prompt",
        Posts(posts.long_prompt),
        "a prompt of 400 kB, beyond the context",
    ),
    Body(
        "one-bad-prompt",
        Posts(posts.one_bad_prompt),
        "200 good prompts and one beyond the context",
    ),
    Body(
        "unknown-model",
        Posts(posts.unknown_model, 12, 0.1),
        "a model that is not served",
    ),
    Body(
        "refused-schemas-12",
        Posts(posts.schema(constraints.exploding_schema), 12),
        "schemas that are refused after two seconds of a core, on 12 connections",
    ),
    Body(
        "refused-schemas-24",
        Posts(posts.schema(constraints.exploding_schema), 24),
        "the same on 24 connections",
    ),
    Body(
        "slow-schemas-40",
        Posts(posts.schema(constraints.slow_schema), 40),
        "good schemas that take half a second to compile, on 40 connections",
    ),
    Body(
        "endless-schemas",
        Posts(posts.schema(constraints.endless_schema), 12),
        "schemas that nothing finite matches",
    ),
    Body(
        "large-enums",
        Posts(posts.schema(constraints.large_enum), 12),
        "enums of 10,000 values",
    ),
    Body(
        "alternatives",
        Posts(posts.schema(constraints.many_alternatives), 12),
        "`anyOf` of 2,000 objects",
    ),
    Body(
        "bad-regexes",
        Posts(posts.regex(constraints.bad_regex), 12),
        "regular expressions with an open group",
    ),
    Body(
        "exploding-regexes",
        Posts(posts.regex(constraints.exploding_regex), 12),
        "repetitions in each other, a million states",
    ),
    Body(
        "backtracking-regexes",
        Posts(posts.regex(constraints.backtracking_regex), 12),
        "regular expressions that make others backtrack",
    ),
    Body(
        "template-kwargs",
        Posts(posts.template_kwargs),
        "40,000 variables for the chat template",
    ),
    Body("tools", Posts(posts.many_tools), "400 tools of 40 parameters"),
    Body(
        "cut-history",
        Posts(posts.cut_history),
        "2,000 tool calls in the history, with cut arguments",
    ),
    Body(
        "ollama-options",
        Posts(ollama_posts.options),
        "`/api/generate` with 250,000 options that do not exist",
    ),
    Body(
        "ollama-history",
        Posts(ollama_posts.history),
        "`/api/chat` with 3,000 tool calls whose results name no call",
    ),
    Body(
        "ollama-schemas",
        Posts(ollama_posts.schema(constraints.exploding_schema), 12),
        "`/api/chat` with the schemas of `refused-schemas-12`",
    ),
    Body(
        "ollama-inputs",
        Posts(ollama_posts.inputs),
        "`/api/embed` with 60,000 texts",
    ),
    Body(
        "open-heads",
        OpenHeads(500),
        "500 connections that stop within a head",
    ),
    Body(
        "grpc-calls",
        Calls(small_chat, 3000),
        "3,000 gRPC calls at once",
    ),
    Body(
        "grpc-unread",
        UnreadCalls(4, 250),
        "1,000 gRPC calls with a flow control window of 0",
    ),
    Body(
        "hpack-references",
        HeadReferences(4, 20),
        "80 gRPC heads of 15,000 references to a header of 4 kB",
    ),
    Body(
        "hpack-long-heads",
        HeadReferences(4, 1, 450_000),
        "4 gRPC heads of 450,000 references to a header of 4 kB",
    ),
    Body(
        "batch-lines",
        Batch(
            (
                posts.value(values.exponents),
                posts.value(values.many_nested),
                posts.long_prompt,
            ),
            6,
        ),
        "a batch of six lines: numbers, lists and long prompts as above",
    ),
)
CONTROL_NAMES = tuple(body.name for body in CONTROLS)
NAMES = tuple(body.name for body in BODIES)
ALL_NAMES = CONTROL_NAMES + NAMES


def named(name: str) -> Body:
    return (*CONTROLS, *BODIES)[ALL_NAMES.index(name)]
