"""Model classes of architectures, by the name in `config.json`.

A distribution of its own adds one through the entry-point group `headwater.models`: the entry's
name is the architecture's, its value an `Architecture`. Imports no model before it is asked for, so
that a process which needs a config alone starts without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..config import require
from ..weights.encoders.sentence_files import KEY as SENTENCE_KEY
from ..weights.formats.gguf_families import GgufFamily
from ..weights.json_object import read_object
from ..weights.model_config import ModelConfig
from .configs import (
    bert,
    cohere2,
    corrected_moe,
    gemma,
    gemma3,
    gemma4,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    granite_hybrid,
    labels,
    lfm2,
    llama,
    llama4,
    ministral3,
    mixtral,
    olmo,
    opt,
    phi3,
    qwen3_next,
    qwen_moe,
    smollm3,
    starcoder2,
)

ENTRY_POINTS = "headwater.models"
FOREIGN = "headwater.engine_core.models.foreign.model:ForeignModel"
MODEL_CODE = "headwater_model_code"
"""Field of a converted model's `config.json`: one of `MODEL_CODES`."""
AUTO = "auto"
TRANSFORMERS = "transformers"
MODEL_CODES = (AUTO, "headwater", TRANSFORMERS)
"""Owners of the modelling code of a model. `auto`: Headwater, or transformers where Headwater has
none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    model: str
    """`module:Class`, see `Model`."""
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    """From what `config.json` says. Raises `ConfigError`."""
    family: str = ""
    """Its models, for people."""
    model_types: tuple[str, ...] = ()
    """Values of `model_type` that name the architecture where `architectures` is missing."""
    limits: tuple[str, ...] = ()
    """Limits of its models, for people."""
    is_text_part: bool = False
    """Whether it is the text part of a model that reads images too."""
    gguf: Mapping[str, GgufFamily] = field(default_factory=dict)
    """Its GGUF files, by their `general.architecture`. Those of this room are in `FAMILIES`."""


def _own(
    model: str,
    read_config: Callable[[Mapping[str, Any]], ModelConfig],
    family: str,
    *model_types: str,
    limits: tuple[str, ...] = (),
    is_text_part: bool = False,
) -> Architecture:
    """An architecture of this room."""
    return Architecture(
        model=f"headwater.engine_core.models.{model}",
        read_config=read_config,
        family=family,
        model_types=model_types,
        limits=limits,
        is_text_part=is_text_part,
    )


_DECODER = "decoder:Decoder"
_WIDTH_NORMS = ("tensor parallel on CPUs alone, and not with `--numerics tree`",)
_CHUNKS = ("8,192 positions, those of a chunk",)
_DENSE = ("weights that are not packed",)
_PACKED_IN_GGUF = ("weights packed in GGUF, or not at all",)
_STATES = ("not with `--numerics tree`", "one process: no ranks, no stages")
_CONVS = ("CPUs alone", *_STATES)
_QWEN35 = "qwen3_next:Qwen35"
_MIXED = ("not with `--numerics tree`", "one process: no ranks, no stages")
_LLAMA = "Llama 2 and 3, SmolLM2, TinyLlama, Yi, Aquila, XVERSE, R1-Distill-Llama"
_QWEN2 = "Qwen2, Qwen2.5, QwQ, R1-Distill-Qwen"
ARCHITECTURES = {
    "BertForSequenceClassification": _own(
        "encoders.bert:BertClassifier",
        bert.read_bert_classifier,
        "BERT as a reranker or a classifier: ms-marco-MiniLM",
    ),
    "BertModel": _own("encoders.bert:Bert", bert.read_bert, "BERT, MiniLM, BGE, E5", "bert"),
    "Cohere2ForCausalLM": _own(
        "cohere2:Cohere2", cohere2.read_cohere2, "Command R7B, Command A", "cohere2"
    ),
    "Ernie4_5ForCausalLM": _own(_DECODER, llama.read_ernie45, "ERNIE 4.5 (dense)", "ernie4_5"),
    "Ernie4_5_MoeForCausalLM": _own(
        _DECODER,
        corrected_moe.read_ernie45_moe,
        "ERNIE 4.5 (experts)",
        "ernie4_5_moe",
    ),
    "Exaone4ForCausalLM": _own("olmo2:Olmo2", olmo.read_exaone4, "EXAONE 4", "exaone4"),
    "GPT2LMHeadModel": _own("gpt2:Gpt2", gpt2.read_gpt2, "GPT-2", "gpt2", limits=_PACKED_IN_GGUF),
    "GPTNeoXForCausalLM": _own(
        "gpt_neox:GptNeoX",
        gpt_neox.read_gpt_neox,
        "GPT-NeoX, Pythia",
        "gpt_neox",
        limits=_PACKED_IN_GGUF,
    ),
    "GemmaForCausalLM": _own(_DECODER, gemma.read_gemma, "Gemma 1", "gemma"),
    "Gemma2ForCausalLM": _own("gemma3:Gemma3", gemma.read_gemma2, "Gemma 2", "gemma2"),
    "Gemma3ForCausalLM": _own(
        "gemma3:Gemma3", gemma3.read_gemma3, "Gemma 3 270M and 1B", "gemma3_text"
    ),
    "Gemma3ForConditionalGeneration": _own(
        "gemma3:Gemma3", gemma3.read_gemma3, "Gemma 3 4B, 12B, 27B", "gemma3", is_text_part=True
    ),
    "Gemma4ForCausalLM": _own(
        "gemma4:Gemma4",
        gemma4.read_gemma4,
        "Gemma 4 (text)",
        "gemma4_text",
        limits=_MIXED,
    ),
    "Gemma4ForConditionalGeneration": _own(
        "gemma4:Gemma4",
        gemma4.read_gemma4,
        "Gemma 4 E2B, E4B, 26B-A4B, 31B",
        "gemma4",
        limits=_MIXED,
        is_text_part=True,
    ),
    "Glm4ForCausalLM": _own("glm4:Glm4", glm4.read_glm4, "GLM-4 (dense)", "glm4"),
    "Glm4MoeForCausalLM": _own(
        _DECODER,
        corrected_moe.read_glm4_moe,
        "GLM-4.5, 4.6, 4.7",
        "glm4_moe",
    ),
    "GptOssForCausalLM": _own(
        "gpt_oss:GptOss", gpt_oss.read_gpt_oss, "gpt-oss 20B and 120B", "gpt_oss"
    ),
    "GraniteForCausalLM": _own(
        _DECODER, granite.read_granite, "Granite 3 and 4 (dense)", "granite"
    ),
    "GraniteMoeHybridForCausalLM": _own(
        "granite_hybrid:GraniteHybrid",
        granite_hybrid.read_granite_hybrid,
        "Granite 4 with Mamba-2 (H Micro, Tiny, Small)",
        "granitemoehybrid",
        limits=_CONVS,
    ),
    "GraniteMoeForCausalLM": _own(
        _DECODER,
        mixtral.read_granite_moe,
        "Granite 3 (experts)",
        "granitemoe",
    ),
    "HYV3ForCausalLM": _own(_DECODER, corrected_moe.read_hy3, "Hy3", "hy_v3"),
    "InternLM3ForCausalLM": _own(_DECODER, llama.read_internlm3, "InternLM 3", "internlm3"),
    "Lfm2ForCausalLM": _own("lfm2:Lfm2", lfm2.read_lfm2, "LFM2", "lfm2", limits=_CONVS),
    "Llama4ForCausalLM": _own(
        "llama4:Llama4",
        llama4.read_llama4,
        "Llama 4 (text)",
        "llama4_text",
        limits=_CHUNKS,
    ),
    "Llama4ForConditionalGeneration": _own(
        "llama4:Llama4",
        llama4.read_llama4,
        "Llama 4 Scout, Maverick",
        "llama4",
        is_text_part=True,
        limits=_CHUNKS,
    ),
    "LlamaForCausalLM": _own(_DECODER, llama.read_llama, _LLAMA, "llama"),
    "MPNetModel": _own("encoders.mpnet:MPNet", bert.read_mpnet, "MPNet", "mpnet", limits=_DENSE),
    "MiniMaxM2ForCausalLM": _own(
        _DECODER,
        corrected_moe.read_minimax_m2,
        "MiniMax M2",
        "minimax_m2",
        limits=_WIDTH_NORMS,
    ),
    "Ministral3ForCausalLM": _own(
        _DECODER, ministral3.read_ministral3, "Ministral 3", "ministral3"
    ),
    "MinistralForCausalLM": _own(_DECODER, llama.read_mistral, "Ministral 8B", "ministral"),
    "Mistral3ForConditionalGeneration": _own(
        _DECODER,
        ministral3.read_ministral3,
        "Mistral Small 3.1 and later, Ministral 3",
        "mistral3",
        is_text_part=True,
    ),
    "MistralForCausalLM": _own(_DECODER, llama.read_mistral, "Mistral 7B, Nemo, Small", "mistral"),
    "MixtralForCausalLM": _own(_DECODER, mixtral.read_mixtral, "Mixtral", "mixtral"),
    "OPTForCausalLM": _own("opt:Opt", opt.read_opt, "OPT", "opt"),
    "Olmo2ForCausalLM": _own(
        "olmo2:Olmo2", olmo.read_olmo2, "OLMo 2", "olmo2", limits=_WIDTH_NORMS
    ),
    "Olmo3ForCausalLM": _own(
        "olmo2:Olmo2", olmo.read_olmo3, "OLMo 3", "olmo3", limits=_WIDTH_NORMS
    ),
    "OlmoeForCausalLM": _own(_DECODER, mixtral.read_olmoe, "OLMoE", "olmoe", limits=_WIDTH_NORMS),
    "Phi3ForCausalLM": _own(_DECODER, phi3.read_phi3, "Phi-3, 3.5, 4, 4-mini", "phi3"),
    "Qwen2ForCausalLM": _own(_DECODER, llama.read_qwen2, _QWEN2, "qwen2"),
    "Qwen2MoeForCausalLM": _own(
        _DECODER,
        qwen_moe.read_qwen2_moe,
        "Qwen1.5-MoE, Qwen2 (experts)",
        "qwen2_moe",
    ),
    "Qwen2_5_VLForConditionalGeneration": _own(
        _DECODER, llama.read_qwen2, "Qwen2.5-VL", "qwen2_5_vl", is_text_part=True
    ),
    "Qwen3ForCausalLM": _own(
        _DECODER, llama.read_qwen3, "Qwen3 (dense), Qwen3-Embedding, Qwen3-Reranker", "qwen3"
    ),
    "Qwen3ForSequenceClassification": _own(
        _DECODER,
        labels.classifier(llama.read_qwen3),
        "Qwen3 as a reranker or a classifier",
    ),
    "Qwen3MoeForCausalLM": _own(
        _DECODER,
        qwen_moe.read_qwen3_moe,
        "Qwen3 (experts): 30B-A3B, 235B-A22B, Coder",
        "qwen3_moe",
    ),
    "Qwen3NextForCausalLM": _own(
        "qwen3_next:Qwen3Next",
        qwen3_next.read_qwen3_next,
        "Qwen3-Next, Qwen3-Coder-Next",
        "qwen3_next",
        limits=_STATES,
    ),
    "Qwen3VLForConditionalGeneration": _own(
        _DECODER, llama.read_qwen3, "Qwen3-VL (dense)", "qwen3_vl", is_text_part=True
    ),
    "Qwen3_5ForCausalLM": _own(
        _QWEN35, qwen3_next.read_qwen3_5, "Qwen3.5 (dense)", "qwen3_5_text", limits=_STATES
    ),
    "Qwen3_5ForConditionalGeneration": _own(
        _QWEN35,
        qwen3_next.read_qwen3_5,
        "Qwen3.5 and Qwen3.6 (dense)",
        "qwen3_5",
        limits=_STATES,
        is_text_part=True,
    ),
    "Qwen3_5MoeForCausalLM": _own(
        _QWEN35,
        qwen3_next.read_qwen3_5_moe,
        "Qwen3.5 (experts)",
        "qwen3_5_moe_text",
        limits=_STATES,
    ),
    "Qwen3_5MoeForConditionalGeneration": _own(
        _QWEN35,
        qwen3_next.read_qwen3_5_moe,
        "Qwen3.5 and Qwen3.6 (experts): 35B-A3B",
        "qwen3_5_moe",
        limits=_STATES,
        is_text_part=True,
    ),
    "RobertaForSequenceClassification": _own(
        "encoders.bert:RobertaClassifier",
        bert.read_roberta_classifier,
        "RoBERTa as a reranker or a classifier",
    ),
    "RobertaModel": _own("encoders.bert:Bert", bert.read_roberta, "RoBERTa", "roberta"),
    "SeedOssForCausalLM": _own(_DECODER, llama.read_seed_oss, "Seed-OSS", "seed_oss"),
    "SmolLM3ForCausalLM": _own(_DECODER, smollm3.read_smollm3, "SmolLM3", "smollm3"),
    "Starcoder2ForCausalLM": _own(
        "starcoder2:Starcoder2", starcoder2.read_starcoder2, "StarCoder 2", "starcoder2"
    ),
    "XLMRobertaForSequenceClassification": _own(
        "encoders.bert:RobertaClassifier",
        bert.read_roberta_classifier,
        "XLM-RoBERTa as a reranker or a classifier: bge-reranker-v2-m3",
    ),
    "XLMRobertaModel": _own(
        "encoders.bert:Bert",
        bert.read_roberta,
        "XLM-RoBERTa, bge-m3 (dense), multilingual E5",
        "xlm-roberta",
    ),
}
OTHER_NAMES = {
    "BertForMaskedLM": "BertModel",
    "BertForPreTraining": "BertModel",
    "MPNetForMaskedLM": "MPNetModel",
    "RobertaForMaskedLM": "RobertaModel",
    "XLMRobertaForMaskedLM": "XLMRobertaModel",
    "GPT2Model": "GPT2LMHeadModel",
    "AquilaForCausalLM": "LlamaForCausalLM",
    "AquilaModel": "LlamaForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
    "YiForCausalLM": "LlamaForCausalLM",
    "Qwen2_5_VLModel": "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLModel": "Qwen3VLForConditionalGeneration",
}
"""Names of checkpoints whose model is an architecture above."""
BASE = "Model"
"""Ending of the names of models without a head, in the place of `ForCausalLM`."""


def read_config(folder: Path) -> ModelConfig:
    """Raises `ConfigError` naming what is not served."""
    return config_of(read_object(folder / "config.json"))


def config_of(hf_config: Mapping[str, Any]) -> ModelConfig:
    """As `read_config`, from the file's content."""
    name = architecture_of(hf_config)
    if is_foreign(hf_config):
        from .foreign.read import read_foreign  # noqa: PLC0415  # needs torch

        own = {key: value for key, value in hf_config.items() if key != MODEL_CODE}
        return read_foreign(own, name)
    architecture = find(name)
    text = _text_of(hf_config) if architecture.is_text_part else hf_config
    _check_switches(text)
    model = architecture.read_config({**text, "architectures": [name]})
    return labels.with_judgement(model, sentence_of(hf_config))


def is_foreign(hf_config: Mapping[str, Any]) -> bool:
    """Whether the modelling code of a config's model is that of transformers: its `MODEL_CODE` says
    so, or there is no other. Raises `ConfigError`."""
    code = hf_config.get(MODEL_CODE, AUTO)
    require(code in MODEL_CODES, MODEL_CODE, code, " or ".join(MODEL_CODES))
    if code != AUTO:
        return bool(code == TRANSFORMERS)
    name = architecture_of(hf_config)
    if name in ARCHITECTURES or name in entry_points(group=ENTRY_POINTS).names:
        return False
    from .foreign.library import knows  # noqa: PLC0415  # needs torch

    return knows(hf_config, name)


def sentence_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Content of files of sentence-transformers that were beside a converted model's config; empty:
    there were none. See `read_sentence_files`."""
    found: Mapping[str, Any] = hf_config.get(SENTENCE_KEY, {})
    return found


def code_of(config: ModelConfig) -> str:
    """`module:Class` of a config's model, see `Model`. Raises `ConfigError`."""
    return find(config.architecture).model if config.foreign is None else FOREIGN


def architecture_of(hf_config: Mapping[str, Any]) -> str:
    """The architecture that a config names, which may not be served."""
    names = hf_config.get("architectures")
    given = names[0] if isinstance(names, list) and names else names
    if not isinstance(given, str) or not given:
        kind = hf_config.get("model_type")
        known = (name for name, each in ARCHITECTURES.items() if kind in each.model_types)
        return next(known, "")
    if given in OTHER_NAMES:
        return OTHER_NAMES[given]
    headed = given.removesuffix(BASE) + "ForCausalLM"
    return headed if given.endswith(BASE) and headed in ARCHITECTURES else given


def has_no_head(hf_config: Mapping[str, Any]) -> bool:
    """Whether a config names a model without a head."""
    names = hf_config.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]).endswith(BASE)


def _check_switches(hf_config: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a switch as text, of which any counts as true."""
    for name, value in hf_config.items():
        is_text = isinstance(value, str) and value.lower() in ("true", "false")
        require(not is_text, name, value, "true or false, not as text")


def _text_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a model's text part; old ones have its fields among the others."""
    text = hf_config.get("text_config")
    if text is None:
        return hf_config
    require(isinstance(text, Mapping), "text_config", text, "an object")
    whole = {name: hf_config[name] for name in _OF_ALL_PARTS if name in hf_config}
    return {**text, **whole}


_OF_ALL_PARTS = ("tie_word_embeddings", "quantization_config", "compression_config")
"""Fields of the whole config that hold for its `text_config` too."""


def gguf_of_others() -> dict[str, GgufFamily]:
    """Families of GGUF files that entry points add, by `general.architecture`."""
    found: dict[str, GgufFamily] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        found |= entry.load().gguf
    return found


def find(name: str) -> Architecture:
    """Raises `ConfigError` for an architecture that is not served."""
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    others = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    require(name in others, "architectures", name, ", ".join([*ARCHITECTURES, *sorted(others)]))
    architecture: Architecture = others[name].load()
    return architecture
