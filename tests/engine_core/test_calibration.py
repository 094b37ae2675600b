"""Weights whose rounding is chosen over a text, by AutoRound's library in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.engine_core.config import ConfigError
from headwater.engine_core.models.calibration import (
    BATCH,
    LENGTH,
    NUM_SEQUENCES,
    Calibrated,
    group_size_of,
    sequences_of,
)
from headwater.engine_core.models.registry import config_of
from headwater.services.models.manifest import ModelManifest

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
CONFIG = config_of(HF_CONFIG)
TEXT = "".join(
    f"Request {idx} goes to replica {idx * idx % 97}, which has computed {idx % 11} blocks of it. "
    for idx in range(300)
)


def test_sequences_are_spread_over_the_whole_text() -> None:
    few = sequences_of(range(5 * LENGTH + 3))
    assert [each[0] // LENGTH for each in few] == [0, 1, 2, 3, 4]
    many = sequences_of(range(4 * NUM_SEQUENCES * LENGTH))
    assert [each[0] // LENGTH for each in many] == list(range(0, 4 * NUM_SEQUENCES, 4))
    assert {len(each) for each in many} == {LENGTH}


def test_a_text_of_too_few_tokens_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=f"calibration is '{BATCH * LENGTH - 1} tokens'; allowed: at least"
    ):
        sequences_of(range(BATCH * LENGTH - 1))


def test_groups_are_as_large_as_all_layers_allow() -> None:
    assert group_size_of(CONFIG, "int4") == 32
    assert group_size_of(CONFIG, "int8") == 64
    assert group_size_of(replace(CONFIG, hidden_size=256, head_dim=128), "int8") == 128
    with pytest.raises(
        ConfigError,
        match="intermediate_size is 80; allowed: a multiple of 32, for weights that are",
    ):
        group_size_of(replace(CONFIG, intermediate_size=80), "int8")


def test_a_calibration_says_what_it_cost() -> None:
    reported = Calibrated(kind="int8", bytes_before=10_000_000, num_tokens=1024, error_ratio=None)
    assert reported.cost(5_000_000) == "calibrated to int8 on 1024 tokens: 10 MB became 5 MB"
    assert (
        replace(reported, error_ratio=0.4)
        .cost(0)
        .endswith("layers err 40 % as much as rounded to nearest (mean square)")
    )


def pull_command(source: Path, text: Path, cache: Path, kind: str) -> list[str]:
    return [
        *(
            sys.executable,
            "-m",
            "headwater.services.cli",
            "pull",
            str(source),
            f"--quantization={kind}",
        ),
        *(f"--calibration={text}", "--dtype=float32", "--device=cpu", f"--cache-dir={cache}"),
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of characters."""
    import torch  # noqa: PLC0415 (slow to import, as is what follows)
    import transformers  # noqa: PLC0415
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("hub") / "tiny"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{name: value for name, value in HF_CONFIG.items() if name != "architectures"}
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(
        folder
    )
    return folder


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_calibrated_layers_err_less_than_rounded_ones(
    kind: str, source: Path, tmp_path: Path
) -> None:
    """By the library of the extra `calibration`."""
    text = tmp_path / "text.txt"
    cache = tmp_path / "cache"
    text.write_text(TEXT)
    done = subprocess.run(
        pull_command(source, text, cache, kind),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert f"calibrated to {kind} on " in " ".join(done.stderr.split())
    assert ModelManifest.read(folder).quantization == kind
    [kept] = (cache / "tiny").glob(f"*-{kind}-calibrated-????????????????")
    report = json.loads((kept / "calibration.json").read_text())
    assert report["num_tokens"] == NUM_SEQUENCES * LENGTH
    assert 0 < report["error_ratio"] < 0.9
    assert sorted(path.name for path in cache.glob("tiny/[!.]*") if path != kept) == [folder.name]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_calibration_that_is_killed_leaves_nothing_that_runs_or_counts(
    source: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    cache = tmp_path / "cache"
    text.write_text(TEXT)
    process = subprocess.Popen(pull_command(source, text, cache, "int4"), stderr=subprocess.DEVNULL)
    while not list(cache.glob("tiny/.partial-*")):
        time.sleep(0.1)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 20
    while running := calibrating(tmp_path):
        assert time.monotonic() < deadline, running
        time.sleep(0.1)
    assert list(cache.glob("tiny/[!.]*")) == []


def calibrating(folder: Path) -> list[str]:
    """Processes whose command names the folder."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = each.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command and int(each.parent.name) != os.getpid():
            found.append(command)
    return found
