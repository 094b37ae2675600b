"""Makes the checkpoints in `public_files`: a small model of characters, packed by published tools,
and what transformers makes of their files. It runs in an environment of its own, on a CPU, in
minutes:

    python3 -m venv tools
    tools/bin/pip install torch transformers llmcompressor auto-round
    tools/bin/python tests/engine_core/make_public_files.py

GPTQModel is built without its CUDA kernels, in an environment of its own, since it wants another
release of torch than the others; transformers loads its file beside optimum. On fewer than three
cores it wants GPTQMODEL_CPU_WORKERS=2:

    python3 -m venv gptqmodel-tools
    gptqmodel-tools/bin/pip install torch "setuptools>=77" wheel optimum
    BUILD_CUDA_EXT=0 gptqmodel-tools/bin/pip install --no-build-isolation gptqmodel
    gptqmodel-tools/bin/python tests/engine_core/make_public_files.py gptqmodel

Versions of the tools are written beside the figures.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader

HERE = Path(__file__).resolve().parent / "public_files"
DOCS = Path(__file__).resolve().parents[2] / "docs"
VOCAB_SIZE = 128
LENGTH = 128
STEPS = 200
BATCH = 8
NUM_SAMPLES = 32
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXT = (
    "A request goes to the replica that has computed its prefix. What the cache has forgotten is "
    "computed again. " * 3
)
"""What files are compared on; a character is a token."""
TOOLS = {
    False: (
        "tools",
        ("llmcompressor", "compressed-tensors", "auto-round", "transformers", "torch"),
    ),
    True: ("tools of gptqmodel", ("gptqmodel", "transformers", "torch")),
}
"""Releases that are written beside the figures, without GPTQModel and with it."""


def ids_of(text: str) -> list[int]:
    return [code if (code := ord(char)) < VOCAB_SIZE else ord("?") for char in text]


def train(folder: Path) -> None:
    """A model that has read the documentation."""
    torch.manual_seed(0)
    text = torch.tensor(ids_of("".join(path.read_text() for path in sorted(DOCS.glob("*.md")))))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        begins = torch.randint(0, len(text) - LENGTH, (BATCH,))
        batch = torch.stack([text[begin : begin + LENGTH] for begin in begins])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(
        models.WordLevel({chr(code): code for code in range(VOCAB_SIZE)}, unk_token="?")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", pad_token="\x00"
    ).save_pretrained(folder)


def samples() -> list[list[int]]:
    ids = ids_of((DOCS / "architecture.md").read_text())
    return [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(NUM_SAMPLES)]


def compress(
    source: Path,
    folder: Path,
    recipe: list[Any],
    sequences: list[list[int]] | None,
    format: str | None = None,
) -> None:
    """By llmcompressor, which reads these; None: it reads nothing. `format`: None is the tool's
    choice."""
    from datasets import Dataset  # noqa: PLC0415 (of the tools' environment, as is what follows)
    from llmcompressor import oneshot  # noqa: PLC0415

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    given: dict[str, Any] = {}
    if sequences is not None:
        rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in sequences]
        given = {"dataset": Dataset.from_list(rows), "num_calibration_samples": len(rows)}
        given["max_seq_length"] = len(sequences[0])
    oneshot(model=model, tokenizer=tokenizer, recipe=recipe, **given)
    model.save_pretrained(
        folder, save_compressed=True, **({"quantization_format": format} if format else {})
    )


def round_by_auto_round(
    source: Path,
    folder: Path,
    format: str,
    bits: int,
    *,
    symmetric: bool,
    rows: list[list[int]],
    group_size: int = 32,
    iters: int = 20,
) -> None:
    from auto_round import AutoRound  # noqa: PLC0415 (of the tools' environment)

    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    loader = DataLoader([{"input_ids": torch.tensor(ids)} for ids in rows], batch_size=4)
    tool = AutoRound(
        model, tokenizer, bits=bits, group_size=group_size, sym=symmetric, iters=iters, nsamples=len(rows),
        seqlen=len(rows[0]), batch_size=4, dataset=loader, device_map="cpu", enable_torch_compile=False,
        disable_opt_rtn=True,
    )  # fmt: skip
    written = folder.with_name(f"{folder.name} written")
    tool.quantize_and_save(str(written), format=format)
    found = next(path.parent for path in sorted(written.rglob("config.json")))
    shutil.copytree(found, folder)
    shutil.rmtree(written)


def round_by_gptqmodel(source: Path, folder: Path) -> None:
    """With zero points, and groups of inputs in the order of their size (act-order)."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # noqa: PLC0415 (of an environment of its own)

    config = QuantizeConfig(
        bits=4, group_size=32, desc_act=True, sym=False, device="cpu", offload_to_disk=False
    )
    model = GPTQModel.load(str(source), config)
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in samples()]
    model.quantize(rows, batch_size=4, backend=BACKEND.TORCH)
    model.save(str(folder))


GPTQMODEL = "gptqmodel"


def makers() -> dict[str, Any]:
    """What makes the other folders."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: PLC0415 (as above)
    from llmcompressor.modifiers.gptq import GPTQModifier  # noqa: PLC0415
    from llmcompressor.modifiers.quantization import QuantizationModifier  # noqa: PLC0415
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier  # noqa: PLC0415

    def scheme(bits: int, **more: Any) -> QuantizationScheme:
        return QuantizationScheme(
            targets=["Linear"], weights=QuantizationArgs(num_bits=bits, type="int", **more)
        )

    def by_llmcompressor(*recipe: Any, reads: bool = True) -> Any:
        return lambda source, folder: compress(
            source, folder, list(recipe), samples() if reads else None
        )

    def plain(scheme: str, **more: Any) -> Any:
        return QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"], **more)

    def by_auto_round(format: str, bits: int, *, symmetric: bool) -> Any:
        return lambda source, folder: round_by_auto_round(
            source, folder, format, bits, symmetric=symmetric, rows=samples()
        )

    w4 = scheme(4, strategy="group", group_size=32, symmetric=False)
    mixed = {
        "attention": QuantizationScheme(
            targets=["re:.*self_attn.*"],
            weights=QuantizationArgs(num_bits=8, type="int", strategy="channel"),
        ),
        "mlp": QuantizationScheme(
            targets=["re:.*mlp.*"],
            weights=QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=64),
        ),
    }
    return {
        "llmcompressor-w4a16-gptq": by_llmcompressor(
            GPTQModifier(config_groups={"group_0": w4}, ignore=["lm_head"], block_size=64)
        ),
        "llmcompressor-w8a8-smoothquant": by_llmcompressor(
            SmoothQuantModifier(smoothing_strength=0.5),
            GPTQModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"]),
        ),
        "llmcompressor-w8a16": by_llmcompressor(
            QuantizationModifier(
                config_groups={"group_0": scheme(8, strategy="channel")}, ignore=["lm_head"]
            ),
            reads=False,
        ),
        "llmcompressor-fp8-dynamic": by_llmcompressor(plain("FP8_DYNAMIC"), reads=False),
        "llmcompressor-fp8-static-kv": by_llmcompressor(
            plain(
                "FP8",
                kv_cache_scheme={
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "tensor",
                    "dynamic": False,
                    "symmetric": True,
                },
            )
        ),
        "llmcompressor-fp8-block": by_llmcompressor(plain("FP8_BLOCK"), reads=False),
        "llmcompressor-mixed": by_llmcompressor(
            QuantizationModifier(config_groups=mixed, ignore=["lm_head"]), reads=False
        ),
        "auto-round": by_auto_round("auto_round", 4, symmetric=True),
        "auto-round-gptq": by_auto_round("auto_gptq", 4, symmetric=True),
        "auto-round-gptq-8": by_auto_round("auto_gptq", 8, symmetric=True),
        "auto-round-awq": by_auto_round("auto_awq", 4, symmetric=False),
    }


@torch.no_grad()
def log_probs(folder: Path) -> list[float]:
    """Of the text's characters, as transformers computes them of the file in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map="cpu"
    ).eval()
    ids = torch.tensor([ids_of(TEXT)])
    scores = model(ids).logits[0, :-1].float().log_softmax(-1)
    found: list[float] = scores.gather(1, ids[0, 1:, None])[:, 0].tolist()
    return [round(each, 6) for each in found]


def main() -> None:
    HERE.mkdir(exist_ok=True)
    wanted = sys.argv[1:]
    uses_gptqmodel = wanted == [GPTQMODEL]
    path = HERE / "expected.json"
    expected = json.loads(path.read_text()) if path.is_file() and wanted else {"files": {}}
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        train(source)
        base = log_probs(source)
        print("bf16", math.exp(-sum(base) / len(base)))
        for name, make in ({GPTQMODEL: round_by_gptqmodel} if uses_gptqmodel else makers()).items():
            if wanted and name not in wanted:
                continue
            folder = Path(temporary) / name
            make(source, folder)
            kept = HERE / name
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir()
            for each in ("config.json", "model.safetensors"):
                shutil.copyfile(folder / each, kept / each)
            try:
                found = log_probs(kept)
            except (ImportError, ValueError, RuntimeError) as error:
                print(name, "is not loaded:", error)
                found = None
            expected["files"][name] = found
            print(name, None if found is None else math.exp(-sum(found) / len(found)))
    key, tools = TOOLS[uses_gptqmodel]
    expected[key] = {name: metadata.version(name) for name in tools}
    expected["text"] = TEXT
    path.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
