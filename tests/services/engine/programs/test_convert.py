"""A checkpoint in Hugging Face's layout becomes a folder that every stage reads, once, whoever
asks."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import registry
from headwater.services.engine.programs.convert import ConvertSettings, convert
from headwater.services.models.manifest import ModelManifest
from headwater.services.models.store import ConversionFailed, OtherQuantization, pull
from headwater.services.runtime.progress import silent
from headwater.services.text.named_templates import listed
from headwater.services.text.tokenizer import Tokenizer
from headwater.services.text.tokenizer_files_error import TokenizerFilesError
from tests.engine_core.small_models import random_checkpoint
from tests.services.text.test_vocabulary_files import VOCABULARIES

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand weights with a tokenizer of 64 words and its chat template in a
    file of its own."""
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
@pytest.mark.long
def test_two_pulls_at_once_make_one_folder_with_everything_that_stages_read(
    checkpoint: Path, tmp_path: Path
) -> None:
    reports: list[tuple[str, int, int]] = []

    def pull_it(_: int) -> Path:
        return pull(
            str(checkpoint),
            cache_dir=tmp_path,
            progress=lambda *report: reports.append(report),
            dtype="float32",
        )

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(pull_it, range(2))
    assert first == second
    assert [path.name for path in first.parent.iterdir() if not path.name.startswith(".lock")] == [
        first.name
    ]
    manifest = ModelManifest.read(first)
    assert (manifest.name, manifest.dtype, manifest.architecture) == (
        "tiny",
        "float32",
        "LlamaForCausalLM",
    )
    assert (manifest.vocab_size, manifest.max_model_len, manifest.bos_token_id) == (
        NUM_TOKENS,
        256,
        1,
    )
    assert manifest.eos_token_ids == (3, 5)
    tokenizer_config: dict[str, Any] = json.loads((first / "tokenizer_config.json").read_text())
    assert tokenizer_config == {"eos_token": "w3", "chat_template": TEMPLATE}
    assert (first / "weights.safetensors").stat().st_mode & 0o777 == 0o444
    phases = ["converting tiny to float32", "packing tiny", "compiling kernels"]
    assert list(dict.fromkeys(report[0] for report in reports)) == phases
    assert len(list(first.glob("packed-*.bin"))) == 1
    assert reports[-1][1] == reports[-1][2] > 0


@pytest.mark.slow
def test_a_checkpoint_without_a_fast_tokenizer_is_refused_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(checkpoint / name)
    with pytest.raises(
        ConversionFailed,
        match=r"tokenizer\.json cannot be used: it is missing, and there is none of",
    ):
        pull(str(bare), cache_dir=tmp_path / "cache", progress=silent, dtype="float32")
    assert list((tmp_path / "cache" / "bare").glob("[!.]*")) == []


def test_a_window_does_not_shorten_a_model_for_stages_of_text_or_for_engines(
    checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(
        json.dumps(config | {"architectures": ["MistralForCausalLM"], "sliding_window": 40})
    )
    folder.mkdir()
    convert(ConvertSettings(source=source, folder=folder, name="tiny", revision="1", device="cuda"))
    read = registry.read_config(folder)
    assert (read.sliding_window, read.max_position_embeddings) == (40, 256)
    assert ModelManifest.read(folder).max_model_len == 256


@pytest.mark.parametrize(
    ("name", "content", "reported"),
    [
        (
            "tokenizer.json",
            b'{"version": "1.0", "mod',
            r"source/tokenizer.json cannot be used: Cannot instantiate",
        ),
        ("tokenizer.json", b"", r"source/tokenizer.json cannot be used: Cannot instantiate"),
        (
            "tokenizer_config.json",
            b"[]",
            r"source/tokenizer_config.json cannot be used: Expected `object`, got",
        ),
        (
            "generation_config.json",
            b"{",
            r"generation_config.json is '\S+/source'; allowed: a folder with one that can",
        ),
        (
            "chat_template.jinja",
            b"ab\xff",
            r"chat_template.jinja is 'byte 2 of it'; allowed: text in UTF-8",
        ),
    ],
)
def test_files_of_text_that_cannot_be_read_are_refused_before_weights_are(
    name: str, content: bytes, reported: str, checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, source)
    (source / name).write_bytes(content)
    # Nothing that could be read as a tensor.
    (source / "model.safetensors").write_bytes(b"")
    folder.mkdir()
    with pytest.raises((ConfigError, TokenizerFilesError), match=reported):
        convert(
            ConvertSettings(source=source, folder=folder, name="tiny", revision="1", device="cuda")
        )


@pytest.mark.parametrize(
    ("vocabulary", "largest"), [({"w0": 0, "w1": 4_000_000_000}, 4_000_000_000), ({}, -1)]
)
def test_a_tokenizer_whose_ids_would_make_lists_without_end_is_refused(
    vocabulary: dict[str, int], largest: int, checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, source)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = vocabulary
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    folder.mkdir()
    with pytest.raises(
        ConfigError, match=f"largest token id of tokenizer.json is {largest}; allowed: 0…4194303"
    ):
        convert(
            ConvertSettings(source=source, folder=folder, name="tiny", revision="1", device="cuda")
        )


def test_a_template_of_another_file_counts_where_it_has_one(
    checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    (source / "chat_template.jinja").unlink()
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own"}))
    for content, found in (({"chat_template": "other"}, "other"), ({}, "own")):
        folder = tmp_path / found
        folder.mkdir()
        (source / "chat_template.json").write_text(json.dumps(content))
        convert(
            ConvertSettings(source=source, folder=folder, name="tiny", revision="1", device="cuda")
        )
        assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == found


def test_templates_in_files_of_their_own_join_the_one_for_chats(
    checkpoint: Path, tmp_path: Path
) -> None:
    """As transformers saves and reads them."""
    from transformers import AutoTokenizer  # noqa: PLC0415 (slow to import)

    source = tmp_path / "source"
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, source)
    several = {"default": "chat", "tool_use": "calls"}
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.chat_template = several
    tokenizer.save_pretrained(source)
    assert (source / "additional_chat_templates" / "tool_use.jinja").is_file()
    folder.mkdir()
    convert(ConvertSettings(source=source, folder=folder, name="tiny", revision="1", device="cuda"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == listed(several)


@pytest.mark.parametrize("has_list", [False, True])
def test_special_tokens_are_those_that_transformers_finds(
    has_list: bool, checkpoint: Path, tmp_path: Path
) -> None:
    """Older tools name them in a file of their own; a chat template without them opens no text with
    the BOS token."""
    from transformers import AutoTokenizer  # noqa: PLC0415 (slow to import)

    source = tmp_path / "source"
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, source)
    tokenizer = Backend.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens(["w1", "w2", "w3"])
    tokenizer.save(str(source / "tokenizer.json"))
    entry = {
        "content": "w3",
        "special": True,
        **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False),
    }
    decoder = {"added_tokens_decoder": {"3": entry}} if has_list else {}
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w3"}
    (source / "tokenizer_config.json").write_text(json.dumps(names | decoder))
    (source / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "w1"}, "eos_token": "w2"})
    )
    theirs = AutoTokenizer.from_pretrained(source)
    folder.mkdir()
    convert(ConvertSettings(source=source, folder=folder, name="tiny", revision="1", device="cuda"))
    ours = Tokenizer.from_folder(folder, NUM_TOKENS)
    found = [ours.special_token(name) for name in ("bos_token", "eos_token")]
    assert (
        found
        == [theirs.bos_token, theirs.eos_token]
        == ([None, "w3"] if has_list else ["w1", "w2"])
    )


def test_ends_of_answers_that_the_model_cannot_produce_are_left_out(
    checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, source)
    (source / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [-1, 3, NUM_TOKENS]})
    )
    folder.mkdir()
    convert(ConvertSettings(source=source, folder=folder, name="tiny", revision="1", device="cuda"))
    assert ModelManifest.read(folder).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, [3, 5], (3, 5)),
        ([], 5, (5,)),
        (4, [3, 5], (4,)),
        (None, None, (7,)),
        (-1, None, (7,)),
    ],
)
def test_an_answer_ends_at_the_tokenizers_eos_token_where_no_config_names_any(
    generation: object, config: object, ends: tuple[int, ...], checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    own = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(own | {"eos_token_id": config}))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "w7"}}))
    folder.mkdir()
    convert(ConvertSettings(source=source, folder=folder, name="tiny", revision="1", device="cuda"))
    assert ModelManifest.read(folder).eos_token_ids == ends


@pytest.mark.parametrize("eos", ["</s>", [2, "</s>"], {}, True])
def test_ends_of_answers_that_are_no_token_ids_are_refused(
    eos: object, checkpoint: Path, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    folder = tmp_path / "folder"
    shutil.copytree(checkpoint, source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    folder.mkdir()
    with pytest.raises(
        ConfigError, match=r"eos_token_id is .*; allowed: a token id, a list of these, or none"
    ):
        convert(
            ConvertSettings(source=source, folder=folder, name="tiny", revision="1", device="cuda")
        )


@pytest.mark.long
def test_weights_are_rounded_into_a_folder_of_their_own_that_says_what_it_cost(
    checkpoint: Path, tmp_path: Path
) -> None:
    asked = {"cache_dir": tmp_path, "dtype": "float32", "device": "cpu", "progress": silent}
    folder = pull(str(checkpoint), **asked, quantization="int8")
    assert folder.name.endswith("-float32-int8-v3")
    manifest = ModelManifest.read(folder)
    assert manifest.quantization == "int8"
    assert manifest.rounding.startswith(
        "rounded to int8: 0 MB became 0 MB, and weights changed by 0."
    )
    assert pull(str(checkpoint), **asked, quantization="int8") == folder
    # A folder is what it is, whoever names it.
    assert pull(str(folder), **asked) == folder
    with pytest.raises(OtherQuantization, match="is 'gptq'; allowed: auto or int8"):
        pull(str(folder), **asked, quantization="gptq")
    with pytest.raises(
        ConversionFailed,
        match="quantization is 'awq'; allowed: auto: the weights of the checkpoint",
    ):
        pull(str(checkpoint), **asked, quantization="awq")


@pytest.mark.long
def test_pull_prints_what_rounding_cost(checkpoint: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "headwater.services.cli",
        "pull",
        str(checkpoint),
        "--quantization=int4",
    ]
    done = subprocess.run(
        [*command, "--dtype=float32", "--device=cpu", f"--cache-dir={tmp_path}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert Path(done.stdout.strip()).name.endswith("-float32-int4-v3")
    assert "rounded to int4: " in " ".join(done.stderr.split())


def test_a_folder_with_a_vocabulary_alone_becomes_one_that_stages_read(tmp_path: Path) -> None:
    random_checkpoint("smollm2", tmp_path / "hf", vocab_size=704)
    shutil.copyfile(VOCABULARIES / "llama.model", tmp_path / "hf" / "tokenizer.model")
    (tmp_path / "ours").mkdir()
    convert(
        ConvertSettings(source=tmp_path / "hf", folder=tmp_path / "ours", name="tiny", revision="1")
    )
    tokenizer = Tokenizer.from_folder(tmp_path / "ours", 704)
    ids = tokenizer.encode("Hello world", add_special_tokens=True)
    assert ids == [1, 461, 603, 613, 292, 275, 278, 613, 612]
    assert tokenizer.decode(ids[1:]) == "Hello world"
    assert tokenizer.special_token("bos_token") == "<s>"
