"""Models that somebody made to hurt who pulls them: what they claim is not what is there."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models import registry
from headwater.engine_core.models.conversion import convert
from headwater.engine_core.weights.formats.gguf_file import GgufFile
from headwater.services.models.demo_model import demo_gguf
from headwater.services.models.gguf_check import GgufFileError, check_gguf
from headwater.services.models.store import ConversionFailed, default_cache_dir, pull
from headwater.services.runtime.progress import silent
from headwater.services.text.gguf_tokenizer import GgufTokenizerError, write_tokenizer

U32 = 4
STRING = 8
ARRAY = 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int) -> bytes:
    return struct.pack("<IQ", kind, count)


def gguf(
    *keys: bytes,
    tensors: tuple[bytes, ...] = (),
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join(keys) + b"".join(tensors)


def tensor(*dimensions: int, offset: int = 0, kind: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text("token_embd.weight") + shape + struct.pack("<IQ", kind, offset)


HOSTILE = {
    "an array of 2^40 numbers": gguf(key("tokenizer.ggml.scores", ARRAY, array(U32, 2**40))),
    "an array of 2^40 strings": gguf(key("tokenizer.ggml.tokens", ARRAY, array(STRING, 2**40))),
    "an array of 2^62 numbers": gguf(key("tokenizer.ggml.scores", ARRAY, array(U32, 2**62))),
    "an array of arrays": gguf(key("a", ARRAY, array(ARRAY, 1) + array(U32, 0))),
    "a text of 2^40 bytes": gguf(key("general.name", STRING, struct.pack("<Q", 2**40))),
    "a name of 2^40 bytes": gguf(struct.pack("<Q", 2**40)),
    "2^40 keys": gguf(num_keys=2**40),
    "2^40 tensors": gguf(num_tensors=2**40),
    "a tensor of 2^60 elements": gguf(tensors=(tensor(2**30, 2**30),)),
    "a tensor of no elements": gguf(tensors=(tensor(0, 4),)),
    "a tensor of a billion dimensions": gguf(tensors=(text("x") + struct.pack("<I", 10**9),)),
    "a tensor behind the file's end": gguf(tensors=(tensor(4, offset=2**40),)),
    "an unknown type": gguf(key("a", 99, b"")),
    "half a header": gguf(key("general.name", STRING, text("demo")))[:-2],
    "another version": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "no GGUF file": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_gguf_file_that_claims_more_than_it_has_is_refused_by_its_header(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "evil.gguf"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(GgufFileError, match=r"evil\.gguf cannot be read: "):
        check_gguf(path)


@pytest.mark.parametrize("kind", [0, STRING])
def test_an_array_of_more_items_than_a_reader_has_memory_for_is_refused(
    kind: int, tmp_path: Path
) -> None:
    path = tmp_path / "evil.gguf"
    small = key("tokenizer.ggml.scores", ARRAY, array(0, 9) + bytes(9))
    path.write_bytes(
        gguf(small, key("tokenizer.ggml.tokens", ARRAY, array(kind, 2**27)), num_keys=2)
    )
    with path.open("r+b") as file:
        file.truncate(1 << 31)
    with pytest.raises(
        GgufFileError, match="its arrays have 134217737 items; allowed: at most 4194304"
    ):
        check_gguf(path)


LLAMA = key("general.architecture", STRING, text("llama"))
NO_TEXT = struct.pack("<Q", 2) + b"\xff\xfe"
ODD = {
    "a key twice": gguf(LLAMA, LLAMA),
    "a tensor twice": gguf(LLAMA, tensors=(tensor(4), tensor(4))) + bytes(64),
    "a key that is no text": gguf(LLAMA, NO_TEXT + struct.pack("<II", U32, 1)),
    "an alignment of nothing": gguf(
        LLAMA, key("general.alignment", U32, bytes(4)), tensors=(tensor(4),)
    )
    + bytes(64),
    "an unknown type of weights": gguf(LLAMA, tensors=(tensor(4, kind=99),)) + bytes(64),
    "tokens that are no text": gguf(
        LLAMA, key("tokenizer.ggml.tokens", ARRAY, array(STRING, 1) + NO_TEXT)
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_a_gguf_file_that_its_library_does_not_read_is_refused_in_a_sentence(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(ODD[name])
    check_gguf(path)
    with pytest.raises(
        GgufTokenizerError,
        match=r"checkpoint file is 'odd\.gguf'; known: a whole GGUF file \(.+\)$",
    ):
        write_tokenizer(path, tmp_path)
    with pytest.raises(
        ConfigError, match=r"checkpoint file is 'odd\.gguf'|llama.attention.head_count is None"
    ):
        GgufFile(path).hf_config()


@pytest.mark.parametrize(
    "value",
    [
        key("general.architecture", STRING, NO_TEXT),
        key("general.architecture", ARRAY, array(STRING, 1) + text("llama")),
    ],
    ids=["bytes", "a list"],
)
def test_an_architecture_that_is_no_name_is_refused(value: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(gguf(value))
    with pytest.raises(
        ConfigError, match=r"general.architecture is (\['llama'\]|b'\\xff\\xfe'); allowed: "
    ):
        GgufFile(path)


def test_a_pull_of_such_a_file_ends_with_the_reason_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "evil.gguf"
    path.write_bytes(HOSTILE["an array of 2^40 strings"])
    with pytest.raises(ConversionFailed, match="8796093022208 bytes are announced and 0 are there"):
        pull(str(path), cache_dir=tmp_path / "cache", progress=silent, dtype="float32")
    assert list((tmp_path / "cache" / "evil").glob("[!.]*")) == []


def test_the_demo_models_file_is_good() -> None:
    check_gguf(demo_gguf(default_cache_dir(), silent))


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", "2"),
        ("vocab_size", 2**40),
        ("hidden_size", 10**9),
        ("intermediate_size", 10**9),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 10**9),
        ("head_dim", 10**9),
        ("max_position_embeddings", 2**60),
    ],
)
def test_a_config_with_a_billion_of_anything_is_refused_before_anything_is_made_of_it(
    name: str, value: object
) -> None:
    assert registry.config_of(CONFIG).num_layers == 2
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; allowed: a whole number, 1…"):
        registry.config_of(CONFIG | {name: value})


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("fields", "reported"),
    [
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; allowed: a positive number"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; allowed: a positive number"),
        ({"rope_theta": [1]}, r"rope_theta is \[1\]; allowed: a positive number"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; allowed: an object"),
        (
            {"rope_scaling": {"type": ["linear"]}},
            r"rope_scaling.rope_type is \['linear'\]; allowed: default, linear",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "factor of rope_scaling is None; allowed: a positive number",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 0}},
            "factor of rope_scaling is 0; allowed: a positive number",
        ),
        (
            {"rope_scaling": LLAMA3},
            "original_max_position_embeddings of rope_scaling is None; allowed: a positive number",
        ),
        (
            {"rope_scaling": {"factor": 4}},
            "rope_scaling.rope_type is None; allowed: default, linear, dynamic, yarn",
        ),
        ({"rope_theta": 0}, "rope_theta is 0; allowed: a positive number"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta is 10000.0; allowed: none, or 500000.0",
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "yarn", "factor": 4}},
            "rope_scaling is {'type': 'yarn', 'factor': 4}; allowed: none beside "
            "rope_parameters, or the same",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; allowed: 1: all of a head is rotated",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; allowed: 1",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": "all"},
            "sliding_window is 'all'; allowed: a whole number",
        ),
        (
            {"num_key_value_heads": 4},
            r"num_attention_heads is 2; allowed: multiples of num_key_value_heads \(4\)",
        ),
        (
            {"max_position_embeddings": True},
            "max_position_embeddings is True; allowed: a whole number",
        ),
    ],
)
def test_a_field_that_an_engine_could_not_start_with_is_refused_at_conversion(
    fields: dict[str, Any], reported: str
) -> None:
    with pytest.raises(ConfigError, match=reported):
        registry.config_of(CONFIG | fields)


def test_what_a_config_says_twice_and_alike_is_served() -> None:
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    config = registry.config_of(
        CONFIG | {"rope_theta": 500_000, "rope_parameters": linear, "rope_scaling": linear}
    )
    assert (config.rope_theta, config.rope_scaling) == (5e5, {"rope_type": "linear", "factor": 4.0})
    config = registry.config_of(
        CONFIG | {"rope_theta": 5e5, "rope_parameters": {}, "rope_scaling": None}
    )
    assert (config.rope_theta, config.rope_scaling) == (5e5, None)
    assert registry.config_of(CONFIG | {"rope_theta": None}).rope_theta == 1e4


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content", [b'{"architectures": [', b"", b"\xff\xfe", b"[1]", b"[" * 100_000]
)
def test_a_file_of_json_that_is_cut_off_or_no_object_is_named(
    name: str, content: bytes, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / name).write_bytes(content)
    with pytest.raises(
        ConfigError, match=f"{name} is '.*/model'; allowed: a folder with one that "
    ):
        convert(folder, tmp_path, dtype="float32", progress=lambda done, total: None)


@pytest.mark.parametrize("architectures", [None, [], {}, 5, [5], "", [["LlamaForCausalLM"]]])
def test_architectures_that_are_no_list_of_names_are_refused(architectures: object) -> None:
    with pytest.raises(
        ConfigError, match="architectures is ''; allowed: BertForSequenceClassification"
    ):
        registry.config_of(CONFIG | {"architectures": architectures})


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "g": {"targets": ["re:("], "weights": {"num_bits": 4, "strategy": "channel"}}
    },
}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 32,
    "packing_format": "auto_round:auto_gptq",
}


@pytest.mark.parametrize(
    ("quantization", "reported"),
    [
        ([], r"quantization_config.quant_method is \[\]; allowed: gptq"),
        (
            {"quant_method": ["gptq"]},
            r"quantization_config.quant_method is \['gptq'\]; allowed: gptq",
        ),
        (COMPRESSED, r"config_groups.g.targets is 're:\('; allowed: patterns that can be read"),
        (AUTO_ROUND | {"extra_config": [1]}, r"extra_config is \[1\]; allowed: packings by layer"),
    ],
)
def test_a_quantization_of_another_form_is_refused_by_its_field(
    quantization: object, reported: str
) -> None:
    with pytest.raises(ConfigError, match=reported):
        registry.config_of(CONFIG | {"quantization_config": quantization})


def test_a_config_without_an_epsilon_has_that_of_its_architecture() -> None:
    assert (
        registry.config_of(
            {name: CONFIG[name] for name in CONFIG if name != "rms_norm_eps"}
        ).rms_norm_eps
        == 1e-6
    )


@pytest.mark.parametrize(
    "entry", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "config.json", 5]
)
def test_an_index_that_names_files_outside_its_folder_is_refused(
    entry: object, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": entry}}))
    with pytest.raises(
        ConfigError,
        match=r"weight_map is .*; allowed: names of \.safetensors or \.bin files beside the index",
    ):
        convert(folder, tmp_path, dtype="float32", progress=lambda done, total: None)
