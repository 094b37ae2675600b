"""Makes the files in `gguf_files`: small random checkpoints, converted by llama.cpp's own
converter, and what transformers and llama.cpp answer with each. It runs in a development
environment, with llama.cpp beside it, in a minute:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz
    pip install --no-deps --target tools xllamacpp
    PYTHONPATH=tools .venv-dev/bin/python -m tests.engine_core.make_gguf_files \\
        llama_cpp_python-*/vendor/llama.cpp [FAMILY ...]

Tensors and metadata are the converter's. The vocabulary is made up: the converter knows tokenizers
by hashes of published ones.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.engine_core.gguf_models import (
    FAMILIES,
    OTHERWISE_BY_LLAMA_CPP,
    PROMPT,
    SPECIAL,
    TOKENS,
    as_published,
    drafting_layer,
    pack_experts,
    random_model,
)

HERE = Path(__file__).resolve().parent / "gguf_files"
EXPECTED = HERE / "expected.json"
NUM_ANSWERED = 8
PACKED = "-q8_0"
PACKED_FAMILIES = ("deepseek-v3", "gemma4", "gpt2", "llama")
"""Families of which there is a packed file too, named with `PACKED` at its end."""


def write_vocabulary(folder: Path) -> None:
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[1]
    )
    fast.save_pretrained(folder)


def convert(folder: Path, config: dict[str, Any], path: Path) -> None:
    """Writes a file with llama.cpp's converter."""
    import gguf  # noqa: PLC0415 (llama.cpp's own)
    from conversion import TextModel, get_model_class  # noqa: PLC0415 (as above)

    model = get_model_class(config["architectures"][0])
    model.set_vocab = TextModel._set_vocab_gpt2
    model.no_mtp = "num_nextn_predict_layers" not in config
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    kinds = gguf.LlamaFileType
    kind = kinds.MOSTLY_Q8_0 if path.stem.endswith(PACKED) else kinds.MOSTLY_F16
    # transformers reads these fields under other names.
    own = config if {"rotary_pct", "hybrid_override_pattern"} & config.keys() else None
    with torch.inference_mode():
        model(folder, kind, path, eager=True, hparams=own).write()


@torch.no_grad()
def answered(model: Any) -> dict[str, Any]:
    """Greedy tokens of transformers, and their log probabilities."""
    ids = list(PROMPT)
    scores = []
    for _ in range(NUM_ANSWERED):
        after = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(after.argmax()))
        scores.append(round(after.max().item(), 5))
    return {"token_ids": ids[len(PROMPT) :], "logprobs": scores}


def answered_by_llama_cpp(path: Path) -> dict[str, Any]:
    """As `answered`."""
    import xllamacpp  # noqa: PLC0415 (in no development environment)

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 256
    params.n_parallel = 1
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "cache_prompt": False}
    ids = list(PROMPT)
    scores = []
    for _ in range(NUM_ANSWERED):
        answer = server.handle_completions({"prompt": ids, **asked})
        best = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]
        ids.append(best["id"])
        scores.append(round(best["logprob"], 5))
    return {"token_ids": ids[len(PROMPT) :], "logprobs": scores}


def make(family: str) -> dict[str, Any]:
    model = random_model(family)
    files = [HERE / f"{family}.gguf"]
    if family in PACKED_FAMILIES:
        files.append(HERE / f"{family}{PACKED}.gguf")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model.save_pretrained(folder)
        write_vocabulary(folder)
        written = json.loads((folder / "config.json").read_text())
        config = as_published(written, family)
        (folder / "config.json").write_text(json.dumps(config))
        if family == "gpt-oss":
            config["quantization_config"] = {"quant_method": "mxfp4"}
            (folder / "config.json").write_text(json.dumps(config))
            save_file(pack_experts(model), folder / "model.safetensors")
        if config.get("num_nextn_predict_layers"):
            tensors = load_file(folder / "model.safetensors")
            save_file(tensors | drafting_layer(tensors), folder / "model.safetensors")
        for path in files:
            convert(folder, config, path)
    found = {"transformers": answered(model)}
    if family not in OTHERWISE_BY_LLAMA_CPP:
        found["llama.cpp"] = answered_by_llama_cpp(files[0])
    return found


def main(llama_cpp: Path, families: list[str]) -> None:
    # The converter is a script beside its modules, no package.
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    HERE.mkdir(exist_ok=True)
    known = json.loads(EXPECTED.read_text()) if EXPECTED.is_file() else {"answers": {}}
    answers = known["answers"] | {family: make(family) for family in families or FAMILIES}
    versions = {name: metadata.version(name) for name in ("transformers", "torch", "xllamacpp")}
    versions["llama-cpp-python"] = llama_cpp.parent.parent.name.rpartition("-")[2]
    EXPECTED.write_text(json.dumps({"versions": versions, "answers": answers}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
