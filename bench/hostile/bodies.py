"""The list of hostile bodies: a name, the attack that sends it, and a sentence for
docs/security.md."""

from __future__ import annotations

from dataclasses import dataclass

from . import constraints, posts, values
from .attack import Attack
from .batch_attack import Batch
from .grpc_attacks import Calls, HeadReferences, UnreadCalls, costly_kwargs, small_chat
from .rest_attacks import OpenHeads, Posts


@dataclass(frozen=True, slots=True)
class HostileBody:
    name: str
    attack: Attack
    what: str


BODIES = (
    HostileBody(
        "exponents",
        Posts(posts.value(values.exponents)),
        "600,000 numbers `1e308` in an unknown field, 3.6 MB",
    ),
    HostileBody(
        "exponents-gzip",
        Posts(posts.gzipped(values.exponents)),
        "the same body as gzip, 5 kB",
    ),
    HostileBody(
        "exponents-grpc",
        Calls(costly_kwargs, 4, pause=0.2),
        "the same numbers in `chat_template_kwargs_json` of a gRPC call",
    ),
    HostileBody(
        "nested",
        Posts(posts.template_value(values.nested), 12, 0.1),
        "lists in each other, 900 deep, for the chat template",
    ),
    HostileBody(
        "many-nested",
        Posts(posts.value(values.many_nested)),
        "30,000 lists of depth 60",
    ),
    HostileBody(
        "keys",
        Posts(posts.value(values.keys)),
        "an object with 250,000 names",
    ),
    HostileBody(
        "escapes",
        Posts(posts.value(values.escapes)),
        r"a string of 600,000 escapes (`\u0061`)",
    ),
    HostileBody(
        "digits",
        Posts(posts.value(values.digits)),
        "a number of three million digits",
    ),
    HostileBody(
        "many-digits",
        Posts(posts.value(values.many_digits)),
        "900 numbers of 4,000 digits",
    ),
    HostileBody(
        "long-text",
        Posts(posts.value(values.long_text)),
        "one string of 3 MiB",
    ),
    HostileBody(
        "broken-end",
        Posts(posts.broken_end),
        "JSON of 3 MB without its last brace",
    ),
    HostileBody(
        "slow-bodies",
        Posts(posts.value(values.nested), 100, bytes_per_second=20),
        "100 bodies, 20 bytes a second each",
    ),
    HostileBody(
        "gzip-then-chunked",
        Posts(posts.doubled_coding("gzip, chunked"), 12, 0.1),
        "`Transfer-Encoding: gzip, chunked`",
    ),
    HostileBody(
        "chunked-twice",
        Posts(posts.doubled_coding("chunked, chunked"), 12, 0.1),
        "`Transfer-Encoding: chunked, chunked`",
    ),
    HostileBody(
        "gzip-bomb",
        Posts(posts.bomb),
        "64 MiB in 64 kB of gzip",
    ),
    HostileBody(
        "long-prompt",
        Posts(posts.long_prompt),
        "a prompt of 400 kB, beyond the context",
    ),
    HostileBody(
        "one-bad-prompt",
        Posts(posts.one_bad_prompt),
        "200 good prompts and one beyond the context",
    ),
    HostileBody(
        "unknown-model",
        Posts(posts.unknown_model, 12, 0.1),
        "a model that is not served",
    ),
    HostileBody(
        "refused-schemas-12",
        Posts(posts.schema(constraints.exploding_schema), 12),
        "schemas that are refused after two seconds of a core, on 12 connections",
    ),
    HostileBody(
        "refused-schemas-24",
        Posts(posts.schema(constraints.exploding_schema), 24),
        "the same on 24 connections",
    ),
    HostileBody(
        "slow-schemas-40",
        Posts(posts.schema(constraints.slow_schema), 40),
        "good schemas that take half a second to compile, on 40 connections",
    ),
    HostileBody(
        "endless-schemas",
        Posts(posts.schema(constraints.endless_schema), 12),
        "schemas that nothing finite matches",
    ),
    HostileBody(
        "large-enums",
        Posts(posts.schema(constraints.large_enum), 12),
        "enums of 10,000 values",
    ),
    HostileBody(
        "alternatives",
        Posts(posts.schema(constraints.many_alternatives), 12),
        "`anyOf` of 2,000 objects",
    ),
    HostileBody(
        "bad-regexes",
        Posts(posts.regex(constraints.bad_regex), 12),
        "regular expressions with an open group",
    ),
    HostileBody(
        "exploding-regexes",
        Posts(posts.regex(constraints.exploding_regex), 12),
        "repetitions in each other, a million states",
    ),
    HostileBody(
        "backtracking-regexes",
        Posts(posts.regex(constraints.backtracking_regex), 12),
        "regular expressions that make others backtrack",
    ),
    HostileBody(
        "template-kwargs",
        Posts(posts.template_kwargs),
        "40,000 variables for the chat template",
    ),
    HostileBody("tools", Posts(posts.many_tools), "400 tools of 40 parameters"),
    HostileBody(
        "cut-history",
        Posts(posts.cut_history),
        "2,000 tool calls in the history, with cut arguments",
    ),
    HostileBody(
        "open-heads",
        OpenHeads(500),
        "500 connections that stop within a head",
    ),
    HostileBody(
        "grpc-calls",
        Calls(small_chat, 3000),
        "3,000 gRPC calls at once",
    ),
    HostileBody(
        "grpc-unread",
        UnreadCalls(4, 250),
        "1,000 gRPC calls with a flow control window of 0",
    ),
    HostileBody(
        "hpack-references",
        HeadReferences(4, 20),
        "80 gRPC heads of 15,000 references to a header of 4 kB",
    ),
    HostileBody(
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
NAMES = tuple(body.name for body in BODIES)


def named(name: str) -> HostileBody:
    return BODIES[NAMES.index(name)]
