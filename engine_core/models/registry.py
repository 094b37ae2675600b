"""Model classes of architectures, by the name in `config.json`.

A distribution of its own adds one through the entry-point group `headwater.models`: the entry's
name is the architecture's, its value an `Architecture`. Imports no model before it is asked for, so
that a process which needs a config alone starts without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ..config import require
from ..weights.encoders.sentence_files import KEY as SENTENCE_KEY
from ..weights.formats.gguf_families import GgufFamily
from ..weights.json_object import read_object
from ..weights.model_config import ModelConfig
from .architecture import OF_SHAPES, Architecture, own
from .configs import (
    cohere2,
    gemma,
    gemma3,
    gemma4,
    gpt2,
    gpt_neox,
    granite,
    llama,
    ministral3,
    olmo,
    opt,
    phi3,
    smollm3,
    starcoder2,
    tasks,
)
from .encoders.architectures import ENCODER_ARCHITECTURES
from .experts.architectures import MIXTURES
from .latent.architectures import LATENT_ARCHITECTURES
from .states.architectures import STATE_ARCHITECTURES

ENTRY_POINTS = "headwater.models"
FOREIGN = "headwater.engine_core.models.foreign.model:ForeignModel"
MODEL_CODE = "headwater_model_code"
"""Field of a converted model's `config.json`: one of `MODEL_CODES`."""
AUTO = "auto"
TRANSFORMERS = "transformers"
MODEL_CODES = (AUTO, "headwater", TRANSFORMERS)
"""Owners of the modelling code of a model. `auto`: Headwater, or transformers where Headwater has
none."""


_DECODER = "decoder:Decoder"
_WIDTH_NORMS = ("not with `--numerics tree`",)
_PACKED_IN_GGUF = ("weights packed in GGUF, or not at all",)
_LLAMA = "Llama 2 and 3, SmolLM2, TinyLlama, Yi, Aquila, XVERSE, R1-Distill-Llama"
_QWEN2 = "Qwen2, Qwen2.5, QwQ, R1-Distill-Qwen"
ARCHITECTURES = {
    "Cohere2ForCausalLM": own(
        "cohere2:Cohere2", cohere2.read_cohere2, "Command R7B, Command A", "cohere2"
    ),
    "Ernie4_5ForCausalLM": own(_DECODER, llama.read_ernie45, "ERNIE 4.5 (dense)", "ernie4_5"),
    "Exaone4ForCausalLM": own("olmo2:Olmo2", olmo.read_exaone4, "EXAONE 4", "exaone4"),
    "GPT2LMHeadModel": own("gpt2:Gpt2", gpt2.read_gpt2, "GPT-2", "gpt2", limits=_PACKED_IN_GGUF),
    "GPTNeoXForCausalLM": own(
        "gpt_neox:GptNeoX",
        gpt_neox.read_gpt_neox,
        "GPT-NeoX, Pythia",
        "gpt_neox",
        limits=_PACKED_IN_GGUF,
    ),
    "GemmaForCausalLM": own(_DECODER, gemma.read_gemma, "Gemma 1", "gemma"),
    "Gemma2ForCausalLM": own("gemma3:Gemma3", gemma.read_gemma2, "Gemma 2", "gemma2"),
    "Gemma3ForCausalLM": own(
        "gemma3:Gemma3", gemma3.read_gemma3, "Gemma 3 270M and 1B", "gemma3_text"
    ),
    "Gemma3ForConditionalGeneration": own(
        "gemma3:Gemma3", gemma3.read_gemma3, "Gemma 3 4B, 12B, 27B", "gemma3", is_text_part=True
    ),
    "Gemma4ForCausalLM": own(
        "gemma4:Gemma4",
        gemma4.read_gemma4,
        "Gemma 4 (text)",
        "gemma4_text",
        limits=OF_SHAPES,
    ),
    "Gemma4ForConditionalGeneration": own(
        "gemma4:Gemma4",
        gemma4.read_gemma4,
        "Gemma 4 E2B, E4B, 26B-A4B, 31B",
        "gemma4",
        limits=OF_SHAPES,
        is_text_part=True,
    ),
    "Glm4ForCausalLM": own("glm4:Glm4", llama.read_glm4, "GLM-4 (dense)", "glm4"),
    "GraniteForCausalLM": own(_DECODER, granite.read_granite, "Granite 3 and 4 (dense)", "granite"),
    "InternLM3ForCausalLM": own(_DECODER, llama.read_internlm3, "InternLM 3", "internlm3"),
    "LlamaForCausalLM": own(_DECODER, llama.read_llama, _LLAMA, "llama"),
    "Ministral3ForCausalLM": own(_DECODER, ministral3.read_ministral3, "Ministral 3", "ministral3"),
    "MinistralForCausalLM": own(_DECODER, llama.read_mistral, "Ministral 8B", "ministral"),
    "Mistral3ForConditionalGeneration": own(
        _DECODER,
        ministral3.read_ministral3,
        "Mistral Small 3.1 and later, Ministral 3",
        "mistral3",
        is_text_part=True,
    ),
    "MistralForCausalLM": own(_DECODER, llama.read_mistral, "Mistral 7B, Nemo, Small", "mistral"),
    "OPTForCausalLM": own("opt:Opt", opt.read_opt, "OPT", "opt"),
    "Olmo2ForCausalLM": own("olmo2:Olmo2", olmo.read_olmo2, "OLMo 2", "olmo2", limits=_WIDTH_NORMS),
    "Olmo3ForCausalLM": own("olmo2:Olmo2", olmo.read_olmo3, "OLMo 3", "olmo3", limits=_WIDTH_NORMS),
    "Phi3ForCausalLM": own(_DECODER, phi3.read_phi3, "Phi-3, 3.5, 4, 4-mini", "phi3"),
    "Qwen2ForCausalLM": own(_DECODER, llama.read_qwen2, _QWEN2, "qwen2"),
    "Qwen2_5_VLForConditionalGeneration": own(
        _DECODER, llama.read_qwen2, "Qwen2.5-VL", "qwen2_5_vl", is_text_part=True
    ),
    "Qwen3ForCausalLM": own(
        _DECODER, llama.read_qwen3, "Qwen3 (dense), Qwen3-Embedding, Qwen3-Reranker", "qwen3"
    ),
    "Qwen3VLForConditionalGeneration": own(
        _DECODER, llama.read_qwen3, "Qwen3-VL (dense)", "qwen3_vl", is_text_part=True
    ),
    "SeedOssForCausalLM": own(_DECODER, llama.read_seed_oss, "Seed-OSS", "seed_oss"),
    "SmolLM3ForCausalLM": own(_DECODER, smollm3.read_smollm3, "SmolLM3", "smollm3"),
    "Starcoder2ForCausalLM": own(
        "starcoder2:Starcoder2", starcoder2.read_starcoder2, "StarCoder 2", "starcoder2"
    ),
    **ENCODER_ARCHITECTURES,
    **LATENT_ARCHITECTURES,
    **MIXTURES,
    **STATE_ARCHITECTURES,
}
OTHER_NAMES = {
    "BertForMaskedLM": "BertModel",
    "BertForPreTraining": "BertModel",
    "MPNetForMaskedLM": "MPNetModel",
    "ModernBertForMaskedLM": "ModernBertModel",
    "RobertaForMaskedLM": "RobertaModel",
    "XLMRobertaForMaskedLM": "XLMRobertaModel",
    "GPT2Model": "GPT2LMHeadModel",
    "AquilaForCausalLM": "LlamaForCausalLM",
    "AquilaModel": "LlamaForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "XverseForCausalLM": "LlamaForCausalLM",
    "YiForCausalLM": "LlamaForCausalLM",
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
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
    """Like `read_config`, from the file's content."""
    name = architecture_of(hf_config)
    if is_foreign(hf_config):
        from .foreign.read import read_foreign  # noqa: PLC0415  # needs torch

        own = {key: value for key, value in hf_config.items() if key != MODEL_CODE}
        return read_foreign(own, name)
    architecture = find(name)
    text = _text_of(hf_config) if architecture.is_text_part else hf_config
    _check_switches(text)
    whole = {**text, "architectures": [name]}
    return tasks.read_task(
        architecture.read_config, whole, has_both_ways=bool(architecture.both_ways)
    )


def is_foreign(hf_config: Mapping[str, Any]) -> bool:
    """Whether a model is computed by transformers' modelling code: its config's `MODEL_CODE` says
    so, or there is no other code. Raises `ConfigError`."""
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
    if config.foreign is not None:
        return FOREIGN
    architecture = find(config.architecture)
    is_decoder = config.encoder is not None and config.encoder.is_decoder
    return architecture.both_ways if is_decoder else architecture.model


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
    """Raises `ConfigError` for a Boolean that is written as text, any of which counts as true."""
    for name, value in hf_config.items():
        is_text = isinstance(value, str) and value.lower() in ("true", "false")
        require(not is_text, name, value, "true or false, not as text")


def _text_of(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a model's text part; older configs have its fields at the top level."""
    text = hf_config.get("text_config")
    if text is None:
        return hf_config
    require(isinstance(text, Mapping), "text_config", text, "an object")
    whole = {name: hf_config[name] for name in _OF_ALL_PARTS if name in hf_config}
    return {**text, **whole}


_OF_ALL_PARTS = (
    "tie_word_embeddings",
    "quantization_config",
    "compression_config",
    SENTENCE_KEY,
)
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
    require(
        name in others, "architectures", name, ", ".join([*sorted(ARCHITECTURES), *sorted(others)])
    )
    architecture: Architecture = others[name].load()
    return architecture
