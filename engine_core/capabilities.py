"""Capabilities of an engine and of a request, and the pairs of them that are refused.

Each capability lists the capabilities before it in the table that it works beside; every other pair
is refused by the name of the later one. A platform may lack a capability, or a pair, by a flag.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

SIMULATED = "simulated executor"
W8A8 = "W8A8 weights"
INT8_ACTIVATIONS = "int8 activations"
ROUNDED_ACTIVATIONS = "rounded activations"
EXPERTS = "experts"
STATES = "state layers"
MIXED = "layers of several shapes"
LATENT = "latent attention"
FOREIGN = "modelling code of transformers"
ENCODER = "encoder"
TENSOR_PARALLEL = "tensor parallel"
PIPELINE_PARALLEL = "pipeline parallel"
STAGE_HOSTS = "stage hosts"
TREE = "tree numerics"
FP8_KV = "fp8 KV"
HOST_MEMORY = "host memory"
DISK = "disk"
PULL = "pull"
SPECULATION = "speculation"
DRAFT_MODEL = "draft model"
DRAFT_HEADS = "draft heads"
MTP = "multi-token prediction"
ADAPTERS = "adapters"
SLEEP = "sleep"

STREAM = "stream"
BEAMS = "beams"
SEEDS = "seeds"
CHOICES = "n > 1"
BEST_OF = "best of"
STOP_STRINGS = "stop strings"
PENALTIES = "penalties"
EDITED_LOGITS = "edited logits"
LOG_PROBABILITIES = "log probabilities"
PROMPT_LOG_PROBABILITIES = "prompt log probabilities"
GRAMMAR = "grammar"
THINKING_BUDGET = "thinking budget"
TOOLS = "tools"
IGNORE_EOS = "ignore_eos"

QUANTIZED = frozenset({W8A8, INT8_ACTIVATIONS, ROUNDED_ACTIVATIONS})
OF_MODEL = QUANTIZED | {EXPERTS}
"""Capabilities that depend on a model's weights and layers."""
OF_ANY_MODEL = OF_MODEL | {FOREIGN}
"""Capabilities that a model asks for, ours or transformers', where its engine has a cache."""
RANKS = frozenset({TENSOR_PARALLEL, PIPELINE_PARALLEL})
TIERS = frozenset({HOST_MEMORY, DISK, PULL})
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """A row of the table."""

    name: str
    fields: tuple[str, ...] = ()
    """Options of an engine, or fields of a request, that ask for it; empty: the model does."""
    off: str = "none"
    """Value of an option that does not ask for it, or several, as an error shows it."""
    beside: frozenset[str] = NONE
    """Names of the capabilities that it can be combined with, among those before it in the
    table."""
    beside_if: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names of more of them, by the flag of the platform that the pair needs."""
    flag: str = ""
    """Flag of the platform that it needs; empty: none."""

    def is_off(self, value: object) -> bool:
        """Whether a value of an option does not ask for it."""
        return str(value) in self.off.split(" or ")

    def works_beside(self, earlier: str, flags: object | None) -> bool:
        """Whether it works beside a capability before it, on a platform with these flags; None: on
        some platform."""
        return earlier in self.beside or any(
            earlier in names and _has(flags, flag) for flag, names in self.beside_if.items()
        )


ENGINE = (
    Capability(name=SIMULATED, fields=("executor",), off="single"),
    Capability(name=W8A8, beside=frozenset({SIMULATED})),
    Capability(
        name=INT8_ACTIVATIONS,
        fields=("activation_dtype",),
        beside=frozenset({SIMULATED, W8A8}),
    ),
    Capability(
        name=ROUNDED_ACTIVATIONS,
        fields=("activation_dtype",),
        beside=frozenset({SIMULATED, W8A8, INT8_ACTIVATIONS}),
    ),
    Capability(name=EXPERTS, beside=QUANTIZED | {SIMULATED}),
    Capability(name=STATES, beside=QUANTIZED | {SIMULATED, EXPERTS}),
    Capability(
        name=MIXED,
        off="layers of one shape",
        beside=frozenset({SIMULATED, INT8_ACTIVATIONS, ROUNDED_ACTIVATIONS, EXPERTS}),
    ),
    Capability(name=LATENT, beside=QUANTIZED | {SIMULATED, EXPERTS}),
    Capability(name=FOREIGN, off="headwater", beside=frozenset({SIMULATED, INT8_ACTIVATIONS})),
    Capability(name=ENCODER, off="a decoder", beside=frozenset({INT8_ACTIVATIONS})),
    Capability(
        name=TENSOR_PARALLEL,
        fields=("tensor_parallel_size",),
        off="1",
        beside=frozenset({INT8_ACTIVATIONS, ROUNDED_ACTIVATIONS, EXPERTS, MIXED}),
        beside_if={"rank_latents": frozenset({LATENT}), "rank_states": frozenset({STATES})},
        flag="parallel",
    ),
    Capability(
        name=PIPELINE_PARALLEL,
        fields=("pipeline_parallel_size",),
        off="1",
        beside=OF_MODEL | {LATENT, TENSOR_PARALLEL},
        beside_if={"stage_states": frozenset({STATES})},
        flag="stages",
    ),
    Capability(
        name=STAGE_HOSTS,
        fields=("stage_hosts",),
        off="0",
        beside=OF_MODEL | RANKS | {LATENT},
        flag="stage_hosts",
    ),
    Capability(
        name=TREE,
        fields=("numerics",),
        off="default",
        beside=RANKS | {W8A8, EXPERTS, STAGE_HOSTS},
        beside_if={"rank_states": frozenset({STATES})},
        flag="tree_numerics",
    ),
    Capability(
        name=HOST_MEMORY,
        fields=("kv_swap_memory",),
        off="0",
        beside=OF_ANY_MODEL | {SIMULATED, STATES, MIXED, LATENT, TREE},
        beside_if={"rank_slots": RANKS},
        flag="host_blocks",
    ),
    Capability(
        name=DISK,
        fields=("kv_disk_dir",),
        beside=OF_ANY_MODEL | {SIMULATED, STATES, MIXED, LATENT, TREE, HOST_MEMORY},
        beside_if={"rank_slots": RANKS},
        flag="disk_blocks",
    ),
    Capability(
        name=PULL,
        fields=("kv_peer_memory",),
        off="0",
        beside=OF_ANY_MODEL | {SIMULATED, LATENT, TREE, HOST_MEMORY, DISK},
        beside_if={"rank_slots": RANKS, "pulled_kinds": frozenset({STATES, MIXED})},
        flag="disk_blocks",
    ),
    Capability(
        name=FP8_KV,
        fields=("kv_cache_dtype",),
        off="auto",
        beside=OF_ANY_MODEL | RANKS | TIERS | {LATENT, STATES, STAGE_HOSTS, TREE},
        flag="fp8_kv",
    ),
    Capability(
        name=SPECULATION,
        fields=("max_draft_tokens",),
        off="0",
        # Engines draft by look-up unless an option turns it off; embedding requests are not
        # drafted.
        beside=OF_ANY_MODEL
        | RANKS
        | TIERS
        | {SIMULATED, STATES, MIXED, LATENT, ENCODER, STAGE_HOSTS, TREE, FP8_KV},
    ),
    Capability(
        name=DRAFT_MODEL,
        fields=("draft_model",),
        beside=OF_MODEL | {LATENT} | TIERS | {TREE, FP8_KV, SPECULATION},
        beside_if={"rank_drafts": frozenset({TENSOR_PARALLEL})},
        flag="draft_models",
    ),
    Capability(
        name=DRAFT_HEADS,
        fields=("draft_heads",),
        beside=OF_MODEL | TIERS | {TREE, FP8_KV, SPECULATION},
        beside_if={"rank_drafts": frozenset({TENSOR_PARALLEL})},
        flag="draft_heads",
    ),
    Capability(
        name=MTP,
        fields=("speculation",),
        off="auto or off",
        beside=OF_MODEL | TIERS | {STATES, LATENT, SPECULATION},
        flag="mtp",
    ),
    Capability(
        name=ADAPTERS,
        fields=("adapter_memory",),
        off="0",
        beside=TIERS
        | {SIMULATED, INT8_ACTIVATIONS, EXPERTS, FP8_KV}
        | {SPECULATION, DRAFT_MODEL, DRAFT_HEADS, MTP},
        beside_if={"rank_adapters": RANKS},
        flag="adapters",
    ),
    Capability(
        name=SLEEP,
        fields=("takes_turns", "resident"),
        off="False",
        beside=QUANTIZED | {SIMULATED, HOST_MEMORY, SPECULATION},
        flag="sleep",
    ),
)
"""Capabilities of an engine: its options and its model ask for them at start."""
EVERY_ENGINE = frozenset(each.name for each in ENGINE)

EVERY_DECODER = EVERY_ENGINE - {ENCODER}
"""Capabilities of engines that draw tokens."""
EVERY_DRAW = (
    EVERY_DECODER
    | {STREAM, SEEDS, CHOICES, BEST_OF, STOP_STRINGS, PENALTIES, EDITED_LOGITS}
    | {LOG_PROBABILITIES, PROMPT_LOG_PROBABILITIES}
)
"""Capabilities that every request allows whose tokens are drawn: all but beams and grammars."""
REQUEST = (
    Capability(name=STREAM, fields=("stream",), beside=EVERY_DECODER),
    Capability(name=BEAMS, fields=("use_beam_search",), beside=EVERY_DECODER | {STREAM}),
    Capability(
        name=SEEDS,
        fields=("temperature", "top_p", "top_k", "min_p", "seed"),
        beside=EVERY_DRAW | {BEAMS},
    ),
    Capability(name=CHOICES, fields=("n",), beside=EVERY_DRAW | {BEAMS}),
    Capability(name=BEST_OF, fields=("best_of",), beside=EVERY_DRAW - {STREAM}),
    Capability(
        name=STOP_STRINGS,
        fields=("stop", "include_stop_str_in_output"),
        beside=EVERY_DRAW | {BEAMS},
    ),
    Capability(
        name=PENALTIES,
        fields=("presence_penalty", "frequency_penalty", "repetition_penalty"),
        beside=EVERY_DRAW,
    ),
    Capability(
        name=EDITED_LOGITS,
        fields=("min_tokens", "bad_words", "allowed_token_ids", "logit_bias"),
        beside=EVERY_DRAW,
    ),
    Capability(name=LOG_PROBABILITIES, fields=("logprobs", "top_logprobs"), beside=EVERY_DRAW),
    Capability(
        name=PROMPT_LOG_PROBABILITIES,
        fields=("prompt_logprobs",),
        beside=EVERY_DRAW - {STREAM},
        flag="prompt_logprobs",
    ),
    Capability(name=GRAMMAR, fields=("structured_output",), beside=EVERY_DRAW),
    Capability(
        name=THINKING_BUDGET, fields=("thinking_token_budget",), beside=EVERY_DRAW | {GRAMMAR}
    ),
    Capability(
        name=TOOLS, fields=("tool_choice", "tools"), beside=EVERY_DRAW | {GRAMMAR, THINKING_BUDGET}
    ),
    Capability(name=IGNORE_EOS, fields=("ignore_eos",), beside=EVERY_DRAW | {BEAMS}),
)
"""Capabilities of a request: its fields ask for them."""
TABLE = (*ENGINE, *REQUEST)
BY_FIELD = {name: each for each in REQUEST for name in each.fields}
"""Capabilities of a request by the field that asks for them."""
EVERYWHERE = frozenset(
    {
        *("max_tokens", "stop_token_ids", "truncate_prompt_tokens", "truncation_side"),
        *("echo", "skip_special_tokens", "speculative", "length_penalty"),
    }
)
"""Fields of a request that work beside everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trio:
    """Three capabilities that are refused together on a platform without the flag, or on any,
    though each two of them work."""

    first: str
    second: frozenset[str]
    third: frozenset[str]
    """The refused capability is one of these."""
    flag: str = ""
    """Flag of the platform; empty: every platform refuses the three."""


TRIOS = (
    Trio(
        first=TENSOR_PARALLEL,
        second=frozenset({DRAFT_MODEL, DRAFT_HEADS}),
        third=TIERS,
        flag="rank_draft_slots",
    ),
    # A slot of host memory holds a block of all ranks, and no states.
    Trio(first=TENSOR_PARALLEL, second=frozenset({STATES, MIXED}), third=TIERS),
    Trio(first=PIPELINE_PARALLEL, second=frozenset({STATES}), third=TIERS),
)


class Asked(NamedTuple):
    """A capability that options or a request ask for: the field and its value."""

    field: str
    value: object
    shown: str = ""
    """Name of it in errors about another capability; empty: its field and value."""

    def __str__(self) -> str:
        if self.shown:
            return self.shown
        is_word = isinstance(self.value, str) and self.value.isalnum()
        return f"{self.field} {self.value}" if is_word or type(self.value) is int else self.field


class Refusal(NamedTuple):
    """A refused capability: its field, the field's value, and what is allowed."""

    field: str
    value: object
    allowed: str


Asks = Mapping[str, Asked]
"""Keyed by name of a capability."""


def asked_of_options(options: object) -> dict[str, Asked]:
    """Capabilities that these options, or settings with the same names, ask for; those that the
    model asks for are not included."""
    found = {}
    for each in ENGINE:
        for name in each.fields if each.name not in OF_ANY_MODEL else ():
            value = getattr(options, name, None)
            if value is not None and (each.off == "none" or not each.is_off(value)):
                found[each.name] = Asked(name, value)
    return found


def refusals_of_engine(
    asked: Asks, flags: object | None = None, platform: str = ""
) -> Iterator[Refusal]:
    """Refused capabilities of an engine, in the order of the table. `flags`: those of its platform,
    whose name is `platform`; None: the platform is not known yet."""
    where = f"on the platform {platform}"
    for row in ENGINE:
        if row.name not in asked:
            continue
        if not _has(flags, row.flag):
            yield _refusal(row, asked, where)
        for other in _refused_beside(row, asked, flags):
            yield _refusal(row, asked, f"with {other}")
        for trio in TRIOS:
            is_served = trio.flag and _has(flags, trio.flag)
            if row.name in trio.third and trio.first in asked and not is_served:
                for second in sorted(trio.second & asked.keys()):
                    others = f"with {asked[second]} and {asked[trio.first]}"
                    yield _refusal(row, asked, f"{others} {where}" if trio.flag else others)


def _refusal(row: Capability, asked: Asks, where: str) -> Refusal:
    name, value, _ = asked[row.name]
    return Refusal(name, value if isinstance(value, int) else str(value), f"{row.off} {where}")


def refusals_of_request(asked: Asks) -> Iterator[tuple[str, str]]:
    """Refused fields of a request, in the order of the table, each with the sentence about it:
    whatever engine answers it."""
    for row in REQUEST:
        for other in _refused_beside(row, asked, None) if row.name in asked else ():
            name = asked[row.name].field
            yield name, f"{name} with {other.field}; allowed: without {other.field}"


def refused_fields(asked: Asks, flags: object) -> tuple[tuple[str, str], ...]:
    """Fields that requests of an engine may not have, each with the reason. `asked`: the engine's
    capabilities; `flags`: those of its platform."""
    found = []
    for each in REQUEST:
        for name in each.fields:
            if not _has(flags, each.flag):
                found.append((name, "the platform of this engine lacks it"))
            for other in _refused_beside(each, asked, flags):
                found.append((name, f"this engine has {other}"))
    return tuple(found)


def _refused_beside(row: Capability, asked: Asks, flags: object | None) -> Iterator[Asked]:
    """Asked capabilities before `row` in the table that cannot be combined with it."""
    for earlier in TABLE[: TABLE.index(row)]:
        if earlier.name in asked and not row.works_beside(earlier.name, flags):
            yield asked[earlier.name]


def _has(flags: object | None, flag: str) -> bool:
    return flags is None or not flag or bool(getattr(flags, flag))
