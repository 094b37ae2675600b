"""A checkpoint in Hugging Face's layout becomes a folder that every stage reads, once, whoever asks."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headwater.services.models.manifest import ModelManifest
from headwater.services.models.store import ConversionFailed, pull
from headwater.services.runtime.progress import silent

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand weights with a tokenizer of 64 words and its chat template in a file of its own."""
    from tokenizers import Tokenizer, models  # noqa: PLC0415 (slow to import, as is what follows)
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("hub") / "tiny"
    config = LlamaConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=[3, 5],
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{idx}": idx for idx in range(NUM_TOKENS)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "w3"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.slow
def test_two_who_pull_at_once_get_one_folder_with_everything_that_stages_read(checkpoint: Path, tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []

    def pull_it(_: int) -> Path:
        return pull(
            str(checkpoint), cache_dir=tmp_path, progress=lambda *report: reports.append(report), dtype="float32"
        )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(pull_it, range(2))
    assert first == second
    assert [path.name for path in first.parent.iterdir() if not path.name.startswith(".lock")] == [first.name]
    manifest = ModelManifest.read(first)
    assert (manifest.name, manifest.dtype, manifest.architecture) == ("tiny", "float32", "LlamaForCausalLM")
    assert (manifest.vocab_size, manifest.max_model_len, manifest.bos_token_id) == (NUM_TOKENS, 256, 1)
    assert manifest.eos_token_ids == (3, 5)
    tokenizer_config: dict[str, Any] = json.loads((first / "tokenizer_config.json").read_text())
    assert tokenizer_config == {"eos_token": "w3", "chat_template": TEMPLATE}
    assert (first / "weights.safetensors").stat().st_mode & 0o777 == 0o444
    phases = ["converting tiny to float32", "packing tiny", "compiling kernels"]
    assert list(dict.fromkeys(report[0] for report in reports)) == phases
    assert len(list(first.glob("packed-*.bin"))) == 1
    assert reports[-1][1] == reports[-1][2] > 0


@pytest.mark.slow
def test_a_checkpoint_without_a_fast_tokenizer_is_refused_and_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(checkpoint / name)
    with pytest.raises(ConversionFailed, match=r"has no tokenizer\.json; only fast tokenizers are served"):
        pull(str(bare), cache_dir=tmp_path / "cache", progress=silent, dtype="float32")
    assert list((tmp_path / "cache" / "bare").glob("[!.]*")) == []
