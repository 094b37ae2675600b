"""The capabilities: each one an object, in the order of the table. Add one here and its row
exists."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import torch

from headwater.engine_core.executors.ranks.rank_devices import most_ranks
from tests.combinations.capability import Answer, Aside, Capability, Fields, Move, Promise, Refused
from tests.combinations.fitted_options import FEWEST_RANKS, OWN_MODEL, RANDOM_HEADS
from tests.combinations.weight_capabilities import (
    FP8_BLOCK_WEIGHTS,
    FP8_WEIGHTS,
    GGUF_WEIGHTS,
    INT4_WEIGHTS,
    W8A8_WEIGHTS,
    refused_beside,
)
from tests.combinations.weights_folder import MXFP4

CHUNK = 16
TIGHT_BLOCKS = 25
"""Blocks of an engine whose cache holds one context of `MAX_MODEL_LEN` and no more."""
DISK_DIR = Path(tempfile.gettempdir()) / f"headwater-combinations-{os.getpid()}"
"""Each engine has a folder of its own in it."""
atexit.register(shutil.rmtree, DISK_DIR, ignore_errors=True)
WIDTH = 3
BEAM_TOKENS = 16
"""A search asks all stages for each token of each beam."""
TEMPERATURE = 0.25
"""Low enough for penalties of logits to matter to random weights too."""
PATTERN = "([a-e] ){32,36}"
GRAMMAR_TOKENS = 44
"""A trained model takes one for each letter. Fewer may all have been said when a replica is
lost."""
PLACES = ["Ulm", "Oulu", "Graz", "Lima", "Perth"]
WEATHER = {
    "type": "object",
    "properties": {
        "place": {"enum": PLACES},
        "days": {"type": "array", "items": {"enum": PLACES}, "minItems": 1, "maxItems": 2},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
PEER_BYTES = 6 << 20
PACE = {"simulated_prefill_seconds": 0.003, "simulated_step_seconds": 0.008}
"""Slow enough for blocks to be pulled, and for answers to run while others are routed."""
MOST_BLOCKS = "the source that has most of the prompt is asked"
ONE_CHOICE = "a request with several choices stays where its prompt was computed"


def _stops_before_the_end(without: Answer) -> Fields:
    """A stop string out of the answer: of all pieces before its last part the one that comes
    latest. What repeats itself there ends where it begins to. A call ends inside its arguments
    alone."""
    if without.calls:
        arguments = without.calls[0][1]
        return {"stop": [max((p for p in PLACES if p in arguments), key=arguments.index)]}
    text = without.text
    pieces = (text[begin : begin + 6] for begin in range(len(text) * 3 // 4 + 1))
    return {"stop": [max(pieces, key=text.index)]}


def _calls_the_tool(answer: Answer) -> bool:
    """The call is whole, unless a stop string cut it."""
    return bool(answer.calls) and all(
        name == "weather" and (answer.stop_reason or json.loads(arguments)["place"] in PLACES)
        for name, arguments in answer.calls
    )


CHUNKED_PREFILL = Capability(
    name="chunked prefill",
    promise=Promise.SAME,
    options={"long_prefill_chunk": CHUNK},
    settings=frozenset({"max_num_batched_tokens"}),
    took_place=lambda answer: answer.num_prefill_steps > 1,
)
PREFIX_HIT = Capability(
    name="prefix hit",
    promise=Promise.SAME,
    moves=frozenset({Move.WARM}),
    took_place=lambda answer: answer.num_cached_tokens > 0,
    beside={"encoder": Aside(because="an encoder caches nothing")},
)
PREEMPTION = Capability(
    name="preemption",
    promise=Promise.SAME,
    options={"num_blocks": TIGHT_BLOCKS},
    moves=frozenset({Move.CROWD}),
    settings=frozenset({"kv_cache_memory", "gpu_memory_utilization"}),
    took_place=lambda answer: answer.num_preemptions > 0,
    beside={
        "beams": Aside(
            because="a search asks for one token at a time, whose blocks are free a step later"
        ),
        "window layers": Aside(
            because="pages behind a window go back, so that both answers find theirs"
        ),
        "encoder": Aside(because="an encoder keeps no blocks that another request wants"),
        "MXFP4 experts": Aside(because="the answer repeats a token and is drafted", is_on_gpu=True),
        **dict.fromkeys(
            ("pull", "hand-over"),
            Aside(because="its company ends while blocks are on their way", is_on_gpu=True),
        ),
    },
)
HOST_MEMORY = Capability(
    name="host memory",
    promise=Promise.SAME,
    options={"num_blocks": TIGHT_BLOCKS, "kv_swap_memory": 64 << 20},
    moves=frozenset({Move.WARM, Move.FLOOD}),
    took_place=lambda answer: answer.num_swapped_in > 0 and answer.num_cached_tokens > 0,
    beside={
        "pull": Aside(because=MOST_BLOCKS),
        "hand-over": Aside(because=MOST_BLOCKS),
    },
    refused_on_cpu=Refused(field="kv_swap_memory", says="allowed: 0 on the platform cpu"),
)
DISK = Capability(
    name="disk",
    promise=Promise.SAME,
    options={
        "num_blocks": TIGHT_BLOCKS,
        "kv_disk_dir": DISK_DIR,
        "simulated_prefill_seconds": 0.003,
    },
    moves=frozenset({Move.WARM, Move.FLOOD}),
    settings=frozenset({"kv_disk_memory"}),
    needs_slow_prompts=True,
    took_place=lambda answer: 0 < answer.num_from_disk <= answer.num_cached_tokens,
    beside={
        "host memory": Aside(because="what lies in both comes from memory"),
        "pull": Aside(because=MOST_BLOCKS),
        "hand-over": Aside(because=MOST_BLOCKS),
    },
)
PULL = Capability(
    name="pull",
    promise=Promise.SAME,
    options={"kv_peer_memory": PEER_BYTES, "num_blocks": TIGHT_BLOCKS} | PACE,
    moves=frozenset({Move.LENT}),
    roles=("both", "both"),
    needs_slow_prompts=True,
    took_place=lambda answer: answer.num_pulled_tokens > 0,
)
HAND_OVER = Capability(
    name="hand-over",
    promise=Promise.SAME,
    options={"kv_peer_memory": PEER_BYTES, "kv_peer_direct": "auto"} | PACE,
    moves=frozenset({Move.HAND_OVER}),
    roles=("prefill", "decode"),
    needs_slow_prompts=True,
    took_place=lambda answer: answer.num_hand_overs > 0 and answer.num_pulled_tokens > 0,
    beside={
        "copy-on-write": Aside(because=ONE_CHOICE),
        "n > 1": Aside(because=ONE_CHOICE),
        "beams": Aside(because="a search goes on at the engine that computed its prompt"),
    },
)
FP8_KV = Capability(
    name="fp8 KV",
    promise=Promise.OWN,
    options={"kv_cache_dtype": "fp8"},
    took_place=lambda answer: answer.kv_format == "fp8",
    may_coincide=True,
    is_simulated=False,
    refused_on_cpu=Refused(
        field="kv_cache_dtype", says="kv_cache_dtype is 'fp8'; allowed: auto on the platform cpu"
    ),
)
SEEDS = Capability(
    name="seeds",
    promise=Promise.OWN,
    asks={"temperature": TEMPERATURE, "seed": 5},
    sampling=frozenset({"temperature", "seed", "top_k", "top_p", "min_p"}),
    took_place=lambda answer: len(set(answer.token_ids)) > 1,
    beside={"beams": Aside(because="a search draws nothing")},
)
PENALTIES = Capability(
    name="penalties",
    promise=Promise.OWN,
    asks={"presence_penalty": -2.0, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    sampling=frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty"}),
    is_simulated=False,
    took_place=lambda answer: len(set(answer.token_ids)) > 1,
    beside={
        "beams": Refused(
            field="presence_penalty", says="presence_penalty with use_beam_search; allowed: without"
        )
    },
)
LOG_PROBABILITIES = Capability(
    name="log probabilities",
    promise=Promise.SAME,
    asks={"logprobs": True, "top_logprobs": 3},
    sampling=frozenset({"logprobs", "top_logprobs", "prompt_logprobs"}),
    is_simulated=False,
    took_place=lambda answer: len(answer.logprobs) == len(answer.token_ids) > 0,
    beside={
        "beams": Refused(field="logprobs", says="logprobs with use_beam_search; allowed: without")
    },
)
CHOICES = Capability(
    name="n > 1",
    promise=Promise.SAME,
    asks={"n": WIDTH},
    needs={"temperature": TEMPERATURE, "seed": 6},
    is_above_engine=True,
    sampling=frozenset({"n", "best_of"}),
    took_place=lambda answer: (
        len({tuple(ids) for ids in (answer.token_ids, *answer.others)}) == WIDTH
    ),
)
COPY_ON_WRITE = Capability(
    name="copy-on-write",
    promise=Promise.SAME,
    asks={"n": WIDTH},
    needs={"temperature": TEMPERATURE, "seed": 6},
    is_above_engine=True,
    took_place=lambda answer: answer.num_copied_blocks > 0,
)
BEAMS = Capability(
    name="beams",
    promise=Promise.OWN,
    asks={"use_beam_search": True, "best_of": WIDTH, "max_tokens": BEAM_TOKENS},
    is_above_engine=True,
    sampling=frozenset({"use_beam_search", "length_penalty"}),
    took_place=lambda answer: answer.num_searches > len(answer.token_ids),
)
STOP_STRINGS = Capability(
    name="stop strings",
    promise=Promise.CUT,
    asks_after=_stops_before_the_end,
    is_above_engine=True,
    sampling=frozenset({"stop", "include_stop_str_in_output"}),
    took_place=lambda answer: answer.finish_reason == "stop" and bool(answer.stop_reason),
)
GRAMMAR = Capability(
    name="grammar",
    promise=Promise.OWN,
    asks={"structured_outputs": {"regex": PATTERN}, "max_tokens": GRAMMAR_TOKENS},
    is_above_engine=True,
    sampling=frozenset({"structured_output"}),
    took_place=lambda answer: bool(re.fullmatch(f"{PATTERN}|[a-e ]*", answer.text)),
    beside={
        "tools": Aside(because="an enforced call is the whole answer"),
        "beams": Refused(
            field="structured_output",
            says="structured_output with use_beam_search; allowed: without",
        ),
    },
)
TOOLS = Capability(
    name="tools",
    promise=Promise.OWN,
    asks={
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 120,
    },
    is_above_engine=True,
    took_place=_calls_the_tool,
    beside={
        "beams": Refused(
            field="tool_choice",
            says="tool_choice with use_beam_search; allowed: without use_beam_search",
        ),
    },
)
RESUME = Capability(
    name="resume on another replica",
    promise=Promise.SAME,
    moves=frozenset({Move.LOSS}),
    took_place=lambda answer: answer.num_replicas > 1 and answer.num_tokens_before_loss > 0,
    beside={"encoder": Aside(because="another replica computes the whole text")},
)
SPECULATION = Capability(
    name="speculation",
    promise=Promise.SAME,
    asks={"speculative": "auto"},
    moves=frozenset({Move.REPEAT}),
    settings=frozenset({"max_draft_tokens", "simulated_draft_acceptance"}),
    sampling=frozenset({"speculative"}),
    took_place=lambda answer: answer.num_accepted_tokens > 0,
    beside={
        "beams": Aside(because="a search asks for one token at a time"),
        "draft heads": Aside(
            because="the request names the heads, and random ones draft right by chance alone"
        ),
        "multi-token prediction": Aside(
            because="the request names the layer, and a random one drafts right by chance alone"
        ),
        "encoder": Aside(because="an encoder decodes nothing"),
    },
)
BY_LOOK_UP = "rows under a grammar are drafted by look-up alone"
DRAFT_MODEL = Capability(
    name="draft model",
    promise=Promise.SAME,
    options={"draft_model": OWN_MODEL},
    asks={"speculative": {"drafter": "draft_model"}},
    is_probed=True,
    is_simulated=False,
    # It drafts without the adapter, whose tokens it guesses by chance.
    took_place=lambda answer: (
        answer.num_accepted_tokens > 0 or bool(answer.adapter and answer.num_draft_tokens)
    ),
    beside={
        "beams": Aside(because="a search asks for one token at a time"),
        "grammar": Aside(because=BY_LOOK_UP),
        "tools": Aside(because=BY_LOOK_UP),
    },
)
DRAFT_HEADS = Capability(
    name="draft heads",
    promise=Promise.SAME,
    options={"draft_heads": RANDOM_HEADS},
    asks={"speculative": {"drafter": "draft_heads"}},
    is_probed=True,
    is_simulated=False,
    # Random heads draft right by chance alone.
    took_place=lambda answer: answer.num_draft_tokens > 0,
    beside={
        "beams": Aside(because="a search asks for one token at a time"),
        "grammar": Aside(because=BY_LOOK_UP),
        "tools": Aside(because=BY_LOOK_UP),
        "draft model": Refused(field="draft_heads", says="none with draft_model"),
    },
)

MOST_RANKS = most_ranks(os.environ, torch.cuda.device_count())
"""On GPUs; ranks may take turns on one."""
HAS_FEW_GPUS = MOST_RANKS < 2
RANKS_OF_BOTH = 4
"""Ranks that divide both the layers' widths and the layers."""
TOO_FEW_GPUS = f"allowed: at most {MOST_RANKS} ranks on this machine"
TENSOR_PARALLEL = Capability(
    name="tensor parallel",
    promise=Promise.NEAR,
    # Each rank's part of a sum is rounded; without that, parts are float32.
    promise_where_rounded=Promise.OWN,
    may_coincide=True,
    options={"tensor_parallel_size": FEWEST_RANKS},
    refused_on_gpu=Refused(field="tensor_parallel_size", says=TOO_FEW_GPUS)
    if HAS_FEW_GPUS
    else None,
    is_simulated=False,
    took_place=lambda answer: answer.num_ranks >= 2,
    beside={
        "pipeline parallel": Refused(
            field="tensor_parallel_size", says=TOO_FEW_GPUS, is_on_gpu=True
        )
    }
    if MOST_RANKS < RANKS_OF_BOTH
    else {},
)
PIPELINE_PARALLEL = Capability(
    name="pipeline parallel",
    promise=Promise.SAME,
    options={"pipeline_parallel_size": 2},
    refused_on_gpu=Refused(field="pipeline_parallel_size", says=TOO_FEW_GPUS)
    if HAS_FEW_GPUS
    else None,
    is_simulated=False,
    took_place=lambda answer: answer.num_ranks >= 2,
    beside={
        name: Refused(field=field, says="none with pipeline_parallel_size 2")
        for name, field in (("draft model", "draft_model"), ("draft heads", "draft_heads"))
    },
)
TREE_NUMERICS = Capability(
    name="tree numerics",
    promise=Promise.NEAR,
    # Products of bfloat16 are rounded elsewhere.
    promise_where_rounded=Promise.OWN,
    options={"numerics": "tree"},
    is_simulated=False,
    took_place=lambda answer: answer.numerics == "tree",
    may_coincide=True,
    beside={
        **{
            name: Refused(
                field="numerics", says="allowed: default with activations in int8", is_on_cpu=True
            )
            for name in ("int4 weights", "GGUF weights")
        },
        W8A8_WEIGHTS.name: Refused(
            field="numerics", says="allowed: default with activations in int8"
        ),
        FP8_BLOCK_WEIGHTS.name: Refused(
            field="numerics", says="allowed: default with activations in fp8", is_on_gpu=True
        ),
    },
)

ONE_ARCHITECTURE = Aside(because="a model has one architecture")
EXPERTS = Capability(
    name="experts",
    promise=Promise.OWN,
    model={
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        # Whole tiles of packed weights on GPUs.
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    is_simulated=False,
    took_place=lambda answer: answer.num_experts > 0,
    beside={
        "MXFP4 experts": ONE_ARCHITECTURE,
        "state layers": ONE_ARCHITECTURE,
        "window layers": ONE_ARCHITECTURE,
        "latent attention": ONE_ARCHITECTURE,
        "encoder": ONE_ARCHITECTURE,
        "multi-token prediction": Aside(because="its model has experts in any case"),
    },
)

MXFP4_EXPERTS = Capability(
    name="MXFP4 experts",
    promise=Promise.OWN,
    model={
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 64,
        "quantization_config": {"quant_method": MXFP4},
    },
    options={"quantization": MXFP4},
    is_simulated=False,
    took_place=lambda answer: answer.num_experts > 0 and answer.weights == MXFP4,
    beside={
        **refused_beside(
            MXFP4,
            {
                "int4": "int4",
                "fp8": "fp8",
                "GGUF": "gguf",
                "FP8 block": "fp8",
                "W8A8": "compressed-tensors",
            },
        ),
    },
)

WITH_STATES = "with a model with 2 state layers"

ADAPTERS = Capability(
    name="adapters",
    promise=Promise.OWN,
    options={"adapter_memory": 16 << 20},
    asks={"adapter": True},
    took_place=lambda answer: bool(answer.adapter),
    beside={
        W8A8_WEIGHTS.name: Refused(
            field="adapter_memory",
            says="allowed: 0 with weights whose tokens are rounded to int8, each with one scale",
        ),
        FP8_BLOCK_WEIGHTS.name: Refused(
            field="adapter_memory", says="allowed: 0 with activations in fp8", is_on_gpu=True
        ),
        "tree numerics": Refused(field="adapter_memory", says="allowed: 0 with numerics tree"),
        "state layers": Refused(field="adapter_memory", says=f"allowed: 0 {WITH_STATES}"),
    },
)

STATE_LAYERS = Capability(
    name="state layers",
    promise=Promise.OWN,
    model={
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        # Two stages have keys and values each.
        "layer_types": ["linear_attention", "full_attention"] * 2,
        # Products with numerics tree have eight leaves.
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
    },
    is_simulated=False,
    took_place=lambda answer: answer.num_state_layers > 0,
    beside={
        "draft model": Refused(field="draft_model", says=f"allowed: none {WITH_STATES}"),
        "draft heads": Refused(field="draft_heads", says=f"allowed: none {WITH_STATES}"),
        "pull": Refused(field="kv_peer_memory", says=f"allowed: 0 {WITH_STATES}", is_on_gpu=True),
        "hand-over": Refused(
            field="kv_peer_memory", says=f"allowed: 0 {WITH_STATES}", is_on_gpu=True
        ),
        **{
            name: Refused(
                field="activation_dtype", says="no norm or activation is rounded", is_on_gpu=True
            )
            for name in (W8A8_WEIGHTS.name, FP8_BLOCK_WEIGHTS.name)
        },
        "window layers": ONE_ARCHITECTURE,
        "latent attention": ONE_ARCHITECTURE,
        "encoder": ONE_ARCHITECTURE,
        "MXFP4 experts": Refused(
            field="quantization",
            says="allowed: auto: the weights of the model folder are not packed",
        ),
    },
)

SLEEP = Capability(
    name="sleep",
    promise=Promise.SAME,
    options={"takes_turns": True},
    moves=frozenset({Move.SLEEP}),
    took_place=lambda answer: answer.num_sleeps > 0 and answer.num_preemptions > 0,
    beside={"beams": Aside(because="a search asks for one token at a time, between two sleeps")}
    | {
        name: Refused(field="takes_turns", says=f"takes_turns is True; allowed: False with {shown}")
        for name, shown in {
            "disk": "kv_disk_dir",
            "pull": "kv_peer_memory",
            "hand-over": "kv_peer_memory",
            "fp8 KV": "kv_cache_dtype fp8",
            "draft model": "draft_model",
            "draft heads": "draft_heads",
            "tensor parallel": "tensor_parallel_size",
            "pipeline parallel": "pipeline_parallel_size",
            "tree numerics": "numerics tree",
            "experts": "a model with 8 experts",
            "MXFP4 experts": "a model with 8 experts",
            "adapters": "adapter_memory",
            "state layers": "a model with 2 state layers",
            "latent attention": "latent attention",
            "multi-token prediction": "a model with 8 experts",
        }.items()
    },
)

WINDOW_LAYERS = Capability(
    name="window layers",
    promise=Promise.OWN,
    model={
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "sliding_window": 24,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10_000.0,
    },
    is_simulated=False,
    took_place=lambda answer: answer.num_window_layers > 0,
    beside={
        "encoder": ONE_ARCHITECTURE,
        "latent attention": ONE_ARCHITECTURE,
        "MXFP4 experts": Refused(
            field="quantization",
            says="allowed: auto: the weights of the model folder are not packed",
        ),
    },
)

WITH_LATENTS = "with latent attention"

LATENT_ATTENTION = Capability(
    name="latent attention",
    promise=Promise.OWN,
    model={
        "architectures": ["MiniCPM3ForCausalLM"],
        "model_type": "minicpm3",
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 64,
    },
    is_simulated=False,
    took_place=lambda answer: answer.latent_rank > 0,
    beside={
        "encoder": ONE_ARCHITECTURE,
        "multi-token prediction": ONE_ARCHITECTURE,
        "draft heads": Refused(field="draft_heads", says=f"allowed: none {WITH_LATENTS}"),
        "tree numerics": Refused(field="numerics", says=f"allowed: default {WITH_LATENTS}"),
        "adapters": Refused(field="adapter_memory", says=f"allowed: 0 {WITH_LATENTS}"),
        **{
            name: Refused(
                field="activation_dtype", says="no norm or activation is rounded", is_on_gpu=True
            )
            for name in (W8A8_WEIGHTS.name, FP8_BLOCK_WEIGHTS.name)
        },
        "MXFP4 experts": Refused(
            field="quantization",
            says="allowed: auto: the weights of the model folder are not packed",
        ),
    },
)

WITH_ENCODER = "with the encoder"
DRAWN = (
    *(
        ("seeds", "temperature"),
        ("penalties", "presence_penalty"),
        ("log probabilities", "logprobs"),
    ),
    *(
        ("copy-on-write", "n"),
        ("n > 1", "n"),
        ("beams", "use_beam_search"),
        ("stop strings", "stop"),
    ),
    *(("grammar", "structured_output"), ("tools", "tool_choice")),
)
"""Capabilities of what is drawn, each with the field that is refused."""

ENCODER = Capability(
    name="encoder",
    promise=Promise.OWN,
    model={
        "architectures": ["BertModel"],
        "model_type": "bert",
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "hidden_act": "gelu",
    },
    is_simulated=False,
    took_place=lambda answer: len(answer.vector) > 0,
    beside={
        "chunked prefill": Refused(
            field="long_prefill_chunk", says="allowed: 0 with a model that caches nothing"
        ),
        "host memory": Refused(field="kv_swap_memory", says=f"allowed: 0 {WITH_ENCODER}"),
        "fp8 KV": Refused(field="kv_cache_dtype", says=f"allowed: auto {WITH_ENCODER}"),
        "disk": Refused(field="kv_disk_dir", says=f"allowed: none {WITH_ENCODER}"),
        "pull": Refused(field="kv_peer_memory", says=f"allowed: 0 {WITH_ENCODER}"),
        "hand-over": Refused(field="kv_peer_memory", says=f"allowed: 0 {WITH_ENCODER}"),
        "draft model": Refused(field="draft_model", says=f"allowed: none {WITH_ENCODER}"),
        "draft heads": Refused(field="draft_heads", says=f"allowed: none {WITH_ENCODER}"),
        "tensor parallel": Refused(field="tensor_parallel_size", says=f"allowed: 1 {WITH_ENCODER}"),
        "pipeline parallel": Refused(
            field="pipeline_parallel_size", says=f"allowed: 1 {WITH_ENCODER}"
        ),
        "tree numerics": Refused(field="numerics", says=f"allowed: default {WITH_ENCODER}"),
        "adapters": Refused(field="adapter_memory", says=f"allowed: 0 {WITH_ENCODER}"),
        W8A8_WEIGHTS.name: Refused(
            field="architectures", says="allowed: a decoder with weights whose tokens are rounded"
        ),
        FP8_BLOCK_WEIGHTS.name: Refused(
            field="architectures", says="allowed: a decoder with activations in", is_on_gpu=True
        ),
        "sleep": Refused(field="takes_turns", says=f"allowed: False {WITH_ENCODER}"),
        "MXFP4 experts": Refused(
            field="quantization",
            says="allowed: auto: the weights of the model folder are not packed",
        ),
        # An engine says which fields it refuses, so that no stage above it is asked.
        **{
            name: Refused(
                field=field, says="this engine has the encoder", is_on_cpu=True, is_on_gpu=True
            )
            for name, field in DRAWN
        },
    },
)

GLM: Fields = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    # Whole tiles of packed weights on GPUs.
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
}
MTP = Capability(
    name="multi-token prediction",
    promise=Promise.SAME,
    options={"speculation": "mtp"},
    asks={"speculative": {"drafter": "mtp"}},
    model=GLM,
    base=Capability(
        name="model with a layer for it",
        stands_for="multi-token prediction",
        promise=Promise.OWN,
        model=GLM,
        took_place=lambda answer: True,
    ),
    is_probed=True,
    is_simulated=False,
    # Random layers draft right by chance alone.
    took_place=lambda answer: answer.num_draft_tokens > 0,
    beside={
        "beams": Aside(because="a search asks for one token at a time"),
        "grammar": Aside(because=BY_LOOK_UP),
        "tools": Aside(because=BY_LOOK_UP),
        **{
            name: Refused(field="speculation", says=f"allowed: auto or off with {shown}")
            for name, shown in {
                "fp8 KV": "kv_cache_dtype fp8",
                "draft model": "draft_model",
                "draft heads": "draft_heads",
                "tensor parallel": "tensor_parallel_size",
                "pipeline parallel": "pipeline_parallel_size",
                "tree numerics": "numerics tree",
                "encoder": "the encoder",
                "MXFP4 experts": "GptOssForCausalLM, whose checkpoints have none",
                "window layers": "Gemma3ForCausalLM, whose checkpoints have none",
            }.items()
        },
    },
)

CAPABILITIES = (
    CHUNKED_PREFILL,
    PREFIX_HIT,
    PREEMPTION,
    HOST_MEMORY,
    DISK,
    PULL,
    HAND_OVER,
    FP8_KV,
    SEEDS,
    PENALTIES,
    LOG_PROBABILITIES,
    COPY_ON_WRITE,
    CHOICES,
    BEAMS,
    STOP_STRINGS,
    GRAMMAR,
    TOOLS,
    RESUME,
    SPECULATION,
    DRAFT_MODEL,
    DRAFT_HEADS,
    INT4_WEIGHTS,
    FP8_WEIGHTS,
    GGUF_WEIGHTS,
    FP8_BLOCK_WEIGHTS,
    W8A8_WEIGHTS,
    TENSOR_PARALLEL,
    PIPELINE_PARALLEL,
    TREE_NUMERICS,
    EXPERTS,
    MXFP4_EXPERTS,
    ADAPTERS,
    STATE_LAYERS,
    WINDOW_LAYERS,
    SLEEP,
    LATENT_ATTENTION,
    ENCODER,
    MTP,
)
