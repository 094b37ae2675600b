"""Every pair of capabilities is served or refused as the table says, by the name of the later one:
options of an engine when it starts, fields of a request before anything is computed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core import capabilities as table
from headwater.engine_core.capabilities import (
    ENGINE,
    REQUEST,
    TABLE,
    TRIOS,
    Asked,
    asked_of_options,
    refusals_of_engine,
    refusals_of_request,
    refused_fields,
)
from headwater.engine_core.devices import cpu, cuda
from headwater.engine_core.options import ExecutorOptions
from headwater.engine_core.platforms.capabilities import Capabilities
from headwater.proto.common_pb2 import Sampling, StructuredOutput
from headwater.services.processor.parameters import check_sampling
from headwater.services.runtime.errors import BadRequest
from headwater.services.text.model_limits import ModelLimits
from tests.combinations.cells import CELLS

LEAST = Capabilities(dtypes=("float32",), max_head_dim=64)
"""A platform that has no flag."""
PATH = Path("/folder")
OPTIONS: dict[str, dict[str, Any]] = {
    table.SIMULATED: {"executor": "simulated"},
    table.TENSOR_PARALLEL: {"tensor_parallel_size": 2},
    table.PIPELINE_PARALLEL: {"pipeline_parallel_size": 3},
    table.STAGE_HOSTS: {"stage_hosts": 1},
    table.TREE: {"numerics": "tree"},
    table.FP8_KV: {"kv_cache_dtype": "fp8"},
    table.HOST_MEMORY: {"kv_swap_memory": 4096},
    table.DISK: {"kv_disk_dir": PATH},
    table.PULL: {"kv_peer_memory": 8192},
    table.SPECULATION: {"max_draft_tokens": 3},
    table.DRAFT_MODEL: {"draft_model": PATH},
    table.DRAFT_HEADS: {"draft_heads": PATH},
    table.MTP: {"speculation": "mtp"},
    table.ADAPTERS: {"adapter_memory": 65536},
    table.SLEEP: {"takes_turns": True},
}
"""Options that ask for each capability that is asked for by options."""
OF_MODEL = {
    table.W8A8: Asked("quantization", "compressed-tensors", "weights of W8A8"),
    table.INT8_ACTIVATIONS: Asked("activation_dtype", "auto", "activations in int8"),
    table.ROUNDED_ACTIVATIONS: Asked("activation_dtype", "auto", "activations in fp8"),
    table.EXPERTS: Asked("num_experts", 8, "a model with 8 experts"),
    table.STATES: Asked("layer_types", 3, "a model with 3 state layers"),
    table.MIXED: Asked("architectures", "Gemma4ForCausalLM", "layers of several shapes"),
    table.LATENT: Asked("kv_lora_rank", 512, "latent attention"),
    table.FOREIGN: Asked("model_code", "transformers", "the modelling code of transformers"),
    table.ENCODER: Asked("architectures", "BertModel", "the encoder"),
}
SIMULATED = "executor simulated"
FOREIGN = "the modelling code of transformers"
ENCODER = "architectures BertModel: a decoder"
REFUSED_OF_ENGINE = {
    (table.SIMULATED, table.ENCODER): f"{ENCODER} with {SIMULATED}",
    (table.W8A8, table.ENCODER): f"{ENCODER} with weights of W8A8",
    (table.ROUNDED_ACTIVATIONS, table.ENCODER): f"{ENCODER} with activations in fp8",
    (table.EXPERTS, table.ENCODER): f"{ENCODER} with a model with 8 experts",
    (table.FOREIGN, table.ENCODER): f"{ENCODER} with {FOREIGN}",
    (table.ENCODER, table.TENSOR_PARALLEL): "tensor_parallel_size 2: 1 with the encoder",
    (table.ENCODER, table.PIPELINE_PARALLEL): "pipeline_parallel_size 3: 1 with the encoder",
    (table.ENCODER, table.STAGE_HOSTS): "stage_hosts 1: 0 with the encoder",
    (table.ENCODER, table.TREE): "numerics tree: default with the encoder",
    (table.ENCODER, table.HOST_MEMORY): "kv_swap_memory 4096: 0 with the encoder",
    (table.ENCODER, table.DISK): "kv_disk_dir /folder: none with the encoder",
    (table.ENCODER, table.PULL): "kv_peer_memory 8192: 0 with the encoder",
    (table.ENCODER, table.FP8_KV): "kv_cache_dtype fp8: auto with the encoder",
    (table.ENCODER, table.DRAFT_MODEL): "draft_model /folder: none with the encoder",
    (table.ENCODER, table.DRAFT_HEADS): "draft_heads /folder: none with the encoder",
    (table.ENCODER, table.ADAPTERS): "adapter_memory 65536: 0 with the encoder",
    (table.SIMULATED, table.TENSOR_PARALLEL): f"tensor_parallel_size 2: 1 with {SIMULATED}",
    (table.SIMULATED, table.PIPELINE_PARALLEL): f"pipeline_parallel_size 3: 1 with {SIMULATED}",
    (table.SIMULATED, table.STAGE_HOSTS): f"stage_hosts 1: 0 with {SIMULATED}",
    (table.SIMULATED, table.TREE): f"numerics tree: default with {SIMULATED}",
    (table.SIMULATED, table.FP8_KV): f"kv_cache_dtype fp8: auto with {SIMULATED}",
    (table.SIMULATED, table.DRAFT_MODEL): f"draft_model /folder: none with {SIMULATED}",
    (table.SIMULATED, table.DRAFT_HEADS): f"draft_heads /folder: none with {SIMULATED}",
    (table.W8A8, table.TENSOR_PARALLEL): "tensor_parallel_size 2: 1 with weights of W8A8",
    (table.INT8_ACTIVATIONS, table.TREE): "numerics tree: default with activations in int8",
    (table.ROUNDED_ACTIVATIONS, table.TREE): "numerics tree: default with activations in fp8",
    (table.W8A8, table.FOREIGN): "model_code transformers: headwater with weights of W8A8",
    (table.ROUNDED_ACTIVATIONS, table.FOREIGN): (
        "model_code transformers: headwater with activations in fp8"
    ),
    (
        table.EXPERTS,
        table.FOREIGN,
    ): "model_code transformers: headwater with a model with 8 experts",
    **{
        (kind, other): f"{refused} with {shown}"
        for kind, shown in (
            (table.STATES, "a model with 3 state layers"),
            (table.MIXED, "layers of several shapes"),
        )
        for other, refused in (
            (table.FOREIGN, "model_code transformers: headwater"),
            (table.STAGE_HOSTS, "stage_hosts 1: 0"),
            (table.DRAFT_MODEL, "draft_model /folder: none"),
            (table.DRAFT_HEADS, "draft_heads /folder: none"),
            (table.ADAPTERS, "adapter_memory 65536: 0"),
            (table.ENCODER, "architectures BertModel: a decoder"),
        )
    },
    **{
        (table.MIXED, other): f"{refused} with layers of several shapes"
        for other, refused in (
            (table.PIPELINE_PARALLEL, "pipeline_parallel_size 3: 1"),
            (table.TREE, "numerics tree: default"),
            (table.FP8_KV, "kv_cache_dtype fp8: auto"),
        )
    },
    **{
        (table.LATENT, other): f"{refused} with latent attention"
        for other, refused in (
            (table.FOREIGN, "model_code transformers: headwater"),
            (table.ENCODER, "architectures BertModel: a decoder"),
            (table.TREE, "numerics tree: default"),
            (table.DRAFT_HEADS, "draft_heads /folder: none"),
            (table.ADAPTERS, "adapter_memory 65536: 0"),
        )
    },
    **{
        (other, table.LATENT): f"kv_lora_rank 512: none with {shown}"
        for other, shown in (
            (table.STATES, "a model with 3 state layers"),
            (table.MIXED, "layers of several shapes"),
        )
    },
    **{
        (other, table.MIXED): f"architectures Gemma4ForCausalLM: layers of one shape with {shown}"
        for other, shown in (
            (table.W8A8, "weights of W8A8"),
            (table.STATES, "a model with 3 state layers"),
        )
    },
    (table.FOREIGN, table.TENSOR_PARALLEL): f"tensor_parallel_size 2: 1 with {FOREIGN}",
    (table.FOREIGN, table.PIPELINE_PARALLEL): f"pipeline_parallel_size 3: 1 with {FOREIGN}",
    (table.FOREIGN, table.STAGE_HOSTS): f"stage_hosts 1: 0 with {FOREIGN}",
    (table.FOREIGN, table.TREE): f"numerics tree: default with {FOREIGN}",
    (table.FOREIGN, table.DRAFT_MODEL): f"draft_model /folder: none with {FOREIGN}",
    (table.FOREIGN, table.DRAFT_HEADS): f"draft_heads /folder: none with {FOREIGN}",
    (table.FOREIGN, table.ADAPTERS): f"adapter_memory 65536: 0 with {FOREIGN}",
    (table.STAGE_HOSTS, table.HOST_MEMORY): "kv_swap_memory 4096: 0 with stage_hosts 1",
    (table.STAGE_HOSTS, table.DISK): "kv_disk_dir /folder: none with stage_hosts 1",
    (table.STAGE_HOSTS, table.PULL): "kv_peer_memory 8192: 0 with stage_hosts 1",
    (table.STAGE_HOSTS, table.DRAFT_MODEL): "draft_model /folder: none with stage_hosts 1",
    (table.STAGE_HOSTS, table.DRAFT_HEADS): "draft_heads /folder: none with stage_hosts 1",
    (table.PIPELINE_PARALLEL, table.DRAFT_MODEL): (
        "draft_model /folder: none with pipeline_parallel_size 3"
    ),
    (table.PIPELINE_PARALLEL, table.DRAFT_HEADS): (
        "draft_heads /folder: none with pipeline_parallel_size 3"
    ),
    (table.DRAFT_MODEL, table.DRAFT_HEADS): "draft_heads /folder: none with draft_model",
    **{
        (other, table.MTP): f"speculation mtp: auto or off with {shown}"
        for other, shown in (
            (table.SIMULATED, SIMULATED),
            (table.MIXED, "layers of several shapes"),
            (table.FOREIGN, FOREIGN),
            (table.ENCODER, "the encoder"),
            (table.TENSOR_PARALLEL, "tensor_parallel_size 2"),
            (table.PIPELINE_PARALLEL, "pipeline_parallel_size 3"),
            (table.STAGE_HOSTS, "stage_hosts 1"),
            (table.TREE, "numerics tree"),
            (table.FP8_KV, "kv_cache_dtype fp8"),
            (table.DRAFT_MODEL, "draft_model"),
            (table.DRAFT_HEADS, "draft_heads"),
        )
    },
    **{
        (other, table.ADAPTERS): f"adapter_memory 65536: 0 with {shown}"
        for other, shown in (
            (table.W8A8, "weights of W8A8"),
            (table.ROUNDED_ACTIVATIONS, "activations in fp8"),
            (table.FOREIGN, FOREIGN),
            (table.STAGE_HOSTS, "stage_hosts 1"),
            (table.TREE, "numerics tree"),
        )
    },
    **{
        (other, table.SLEEP): f"takes_turns True: False with {shown}"
        for other, shown in (
            (table.LATENT, "latent attention"),
            (table.EXPERTS, "a model with 8 experts"),
            (table.STATES, "a model with 3 state layers"),
            (table.MIXED, "layers of several shapes"),
            (table.LATENT, "latent attention"),
            (table.FOREIGN, FOREIGN),
            (table.ENCODER, "the encoder"),
            (table.TENSOR_PARALLEL, "tensor_parallel_size 2"),
            (table.PIPELINE_PARALLEL, "pipeline_parallel_size 3"),
            (table.STAGE_HOSTS, "stage_hosts 1"),
            (table.TREE, "numerics tree"),
            (table.DISK, "kv_disk_dir"),
            (table.PULL, "kv_peer_memory 8192"),
            (table.FP8_KV, "kv_cache_dtype fp8"),
            (table.DRAFT_MODEL, "draft_model"),
            (table.DRAFT_HEADS, "draft_heads"),
            (table.MTP, "speculation mtp"),
            (table.ADAPTERS, "adapter_memory 65536"),
        )
    },
}
"""The pairs of an engine that are refused on every platform, each with field, value and what is
allowed."""
FIELDS: dict[str, dict[str, Any]] = {
    table.STREAM: {},
    table.BEAMS: {"use_beam_search": True},
    table.SEEDS: {"seed": 5, "top_k": 4},
    table.CHOICES: {"n": 2},
    table.BEST_OF: {"best_of": 3},
    table.STOP_STRINGS: {"stop": ["x"]},
    table.PENALTIES: {"presence_penalty": 1.0},
    table.EDITED_LOGITS: {"bad_words": ["x"]},
    table.LOG_PROBABILITIES: {"logprobs": True},
    table.PROMPT_LOG_PROBABILITIES: {"prompt_logprobs": 2},
    table.GRAMMAR: {"structured_output": StructuredOutput(regex="a")},
    table.THINKING_BUDGET: {"thinking_token_budget": 9},
    table.IGNORE_EOS: {"ignore_eos": True},
}
"""Fields of sampling that ask for each capability; a stream is asked for beside them, and tools in
a conversation: `test_answer_grammar.py` has their refusals."""
REFUSED_OF_REQUEST = {
    (table.STREAM, table.BEST_OF): "best_of with stream",
    (table.STREAM, table.PROMPT_LOG_PROBABILITIES): "prompt_logprobs with stream",
    (table.BEAMS, table.PENALTIES): "presence_penalty with use_beam_search",
    (table.BEAMS, table.EDITED_LOGITS): "bad_words with use_beam_search",
    (table.BEAMS, table.LOG_PROBABILITIES): "logprobs with use_beam_search",
    (table.BEAMS, table.PROMPT_LOG_PROBABILITIES): "prompt_logprobs with use_beam_search",
    (table.BEAMS, table.GRAMMAR): "structured_output with use_beam_search",
    (table.BEAMS, table.THINKING_BUDGET): "thinking_token_budget with use_beam_search",
    (table.GRAMMAR, table.IGNORE_EOS): "ignore_eos with structured_output",
    (table.THINKING_BUDGET, table.IGNORE_EOS): "ignore_eos with thinking_token_budget",
}
LIMITS = ModelLimits(vocab_size=1000, max_model_len=100)


def pairs(rows: tuple[table.Capability, ...], *left_out: str) -> list[tuple[str, str]]:
    names = [row.name for row in rows if row.name not in left_out]
    return list(itertools.combinations(names, 2))


def asked(*names: str) -> dict[str, Asked]:
    """Engine capabilities, through the options that ask for them."""
    options = {key: value for name in names for key, value in OPTIONS.get(name, {}).items()}
    given = {name: OF_MODEL[name] for name in names if name in OF_MODEL}
    found = asked_of_options(replace(ExecutorOptions(model_folder=PATH), **options)) | given
    assert found.keys() - {table.SPECULATION} == set(names) - {table.SPECULATION}
    return found


@pytest.mark.parametrize("pair", pairs(ENGINE), ids=" x ".join)
def test_a_pair_of_an_engine_is_served_or_refused_by_name(pair: tuple[str, str]) -> None:
    expected = REFUSED_OF_ENGINE.get(pair)
    found = [
        f"{name} {value}: {allowed}" for name, value, allowed in refusals_of_engine(asked(*pair))
    ]
    assert found == ([] if expected is None else [expected])


@pytest.mark.parametrize("pair", pairs(REQUEST, table.TOOLS), ids=" x ".join)
def test_a_pair_of_a_request_is_served_or_refused_by_name(pair: tuple[str, str]) -> None:
    sampling = Sampling(temperature=0.5)
    for name in pair:
        sampling.MergeFrom(Sampling(**FIELDS[name]))
    expected = REFUSED_OF_REQUEST.get(pair)
    if expected is None:
        check_sampling(sampling, LIMITS, stream=table.STREAM in pair)
        return
    with pytest.raises(BadRequest) as refused:
        check_sampling(sampling, LIMITS, stream=table.STREAM in pair)
    other = expected.split(" with ")[1]
    assert str(refused.value) == f"{expected}; allowed: without {other}"
    assert refused.value.param == expected.split(" ")[0]


@pytest.mark.parametrize("other", [table.BEAMS, table.IGNORE_EOS])
def test_enforced_calls_are_refused_beside_beams_and_exclude_ignore_eos(other: str) -> None:
    field = FIELDS[other]
    both = {table.TOOLS: Asked("tool_choice", True), other: Asked(*next(iter(field.items())))}
    [(name, sentence)] = refusals_of_request(both)
    order = (
        ("tool_choice", "use_beam_search")
        if other == table.BEAMS
        else ("ignore_eos", "tool_choice")
    )
    assert name == order[0]
    assert sentence == f"{order[0]} with {order[1]}; allowed: without {order[1]}"


def test_a_request_works_beside_every_engine_that_draws_tokens() -> None:
    everything = {row.name: Asked("field", 1) for row in ENGINE if row.name != table.ENCODER}
    assert refused_fields(everything, cpu.capabilities) == ()


def test_an_encoder_refuses_every_field_about_what_is_drawn() -> None:
    refused = refused_fields({table.ENCODER: OF_MODEL[table.ENCODER]}, cpu.capabilities)
    fields = [name for row in REQUEST for name in row.fields]
    assert refused == tuple((name, "this engine has the encoder") for name in fields)


@pytest.mark.parametrize("row", [row for row in ENGINE if row.flag], ids=lambda row: row.name)
def test_what_a_platform_lacks_is_refused_by_its_name(row: table.Capability) -> None:
    [(name, value, allowed)] = refusals_of_engine(asked(row.name), LEAST, "plain")
    [[field, asked_value]] = OPTIONS[row.name].items()
    shown = asked_value if isinstance(asked_value, int) else str(asked_value)
    assert (name, value, allowed) == (field, shown, f"{row.off} on the platform plain")
    flags = replace(LEAST, **{row.flag: True})
    assert list(refusals_of_engine(asked(row.name), flags, "plain")) == []


def test_a_platform_without_scores_of_prompts_refuses_their_field_alone() -> None:
    flags = replace(LEAST, prompt_logprobs=False)
    assert refused_fields({}, flags) == (
        ("prompt_logprobs", "the platform of this engine lacks it"),
    )


@pytest.mark.parametrize("row", [row for row in ENGINE if row.beside_if], ids=lambda row: row.name)
def test_a_pair_that_needs_a_flag_is_refused_on_a_platform_without_it(
    row: table.Capability,
) -> None:
    for flag, names in row.beside_if.items():
        for name in names:
            both = asked(name, row.name)
            flags = replace(cpu.capabilities, fp8_kv=True, host_blocks=True, rank_draft_slots=True)
            assert list(refusals_of_engine(both, flags, "plain")) == []
            [refused] = refusals_of_engine(both, replace(flags, **{flag: False}), "plain")
            assert refused.allowed == f"{row.off} with {both[name]}"


@pytest.mark.parametrize("third", sorted(table.TIERS))
@pytest.mark.parametrize("second", [table.DRAFT_MODEL, table.DRAFT_HEADS])
def test_three_that_do_not_go_together_are_refused_though_each_two_do(
    second: str, third: str
) -> None:
    three = (table.TENSOR_PARALLEL, second, third)
    for two in itertools.combinations(three, 2):
        assert list(refusals_of_engine(asked(*two), cuda.capabilities, "cuda")) == []
    [refused] = refusals_of_engine(asked(*three), cuda.capabilities, "cuda")
    [field] = OPTIONS[third]
    [drafter] = OPTIONS[second]
    assert refused.field == field
    assert refused.allowed.endswith(
        f" with {drafter} and tensor_parallel_size 2 on the platform cuda"
    )
    assert [trio.flag for trio in TRIOS] == ["rank_draft_slots", "", ""]


@pytest.mark.parametrize(
    ("layers", "ranks"),
    [
        (table.STATES, table.TENSOR_PARALLEL),
        (table.STATES, table.PIPELINE_PARALLEL),
        (table.MIXED, table.TENSOR_PARALLEL),
    ],
)
@pytest.mark.parametrize("third", sorted(table.TIERS - {table.HOST_MEMORY}))
def test_a_tier_is_refused_beside_such_layers_of_ranks_on_every_platform(
    third: str, layers: str, ranks: str
) -> None:
    three = (layers, ranks, third)
    for two in itertools.combinations(three, 2):
        assert list(refusals_of_engine(asked(*two), cpu.capabilities, "cpu")) == []
    [refused] = refusals_of_engine(asked(*three), cpu.capabilities, "cpu")
    assert refused.field in OPTIONS[third]
    of_both = asked(layers, ranks)
    assert refused.allowed.endswith(f"with {of_both[layers]} and {of_both[ranks]}")


def test_every_field_of_sampling_has_a_row_or_works_beside_everything() -> None:
    fields = {field.name for field in Sampling.DESCRIPTOR.fields}
    of_rows = {name for row in REQUEST for name in row.fields}
    assert not of_rows & table.EVERYWHERE
    assert fields - of_rows == table.EVERYWHERE, "a field is of a row, or of EVERYWHERE"


def test_names_of_the_table_are_there_once_and_are_known() -> None:
    names = [row.name for row in TABLE]
    assert len(set(names)) == len(names)
    for row in TABLE:
        listed = row.beside.union(*row.beside_if.values())
        assert listed <= set(names), row.name


def test_a_pair_is_refused_where_its_cell_of_the_combinations_is() -> None:
    """Cells of weights are apart: what they are beside depends on how activations are rounded. No
    cell asks for two architectures of one model."""
    names = {row.name for row in TABLE} - table.QUANTIZED
    refused = {*REFUSED_OF_ENGINE, *REFUSED_OF_REQUEST, (table.BEAMS, table.TOOLS)}
    cells = {
        frozenset((cell.first.name, cell.second.name))
        for cell in CELLS.values()
        if cell.refused is not None and {cell.first.name, cell.second.name} <= names
    }
    with_cells = {name for cell in CELLS.values() for name in (cell.first.name, cell.second.name)}
    of_table = {frozenset(pair) for pair in refused if set(pair) <= with_cells & names}
    architectures = {row.name for row in TABLE if row.name in OF_MODEL}
    assert cells == {pair for pair in of_table if not pair <= architectures}
