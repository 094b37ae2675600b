from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.services.runtime.yielding_thread import LOWERED
from headwater.services.text.tokenizer import PIECE_LEN, Tokenizer
from headwater.services.text.tokenizer_files_error import TokenizerFilesError
from tests.services.text.small_tokenizers import byte_level, sentencepiece

ROOT = Path(__file__).parents[3]
FAMILIES = {
    **{pre: byte_level(pre) for pre in ("smollm", "qwen2", "llama-bpe", "tekken")},
    "sentencepiece": sentencepiece(),
}
fragments = st.sampled_from(
    [
        " hello",
        " the",
        "in",
        "\n",
        "  ",
        " I'll",
        "é",
        "e\u0301",
        "9",
        "<|im_end|>",
        "<think>",
        "、",
        "x y",
    ]
)


@pytest.mark.parametrize("family", ["sentencepiece", "qwen2"])
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_text_ends_with_the_token_that_the_config_asks_for(
    family: str, is_asked: bool, tmp_path: Path
) -> None:
    end = {"sentencepiece": "</s>", "qwen2": "<|im_end|>"}[family]
    FAMILIES[family].save(str(tmp_path / "tokenizer.json"))
    config = {"add_eos_token": is_asked, "eos_token": {"content": end}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(tmp_path, 400)
    bare = tokenizer.encode("hello", add_special_tokens=False)
    before = [1] if family == "sentencepiece" else []
    behind = [tokenizer.id_of(end)] if is_asked else []
    assert tokenizer.encode("hello", add_special_tokens=True) == [*before, *bare, *behind]
    assert tokenizer.around == (before, behind)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(parts=st.lists(fragments, min_size=1, max_size=12))
def test_a_long_text_that_is_cut_into_pieces_has_the_same_ids(
    family: str, parts: list[str]
) -> None:
    backend = FAMILIES[family]
    tokenizer = Tokenizer(backend, {}, backend.get_vocab_size())
    text = "".join(parts) * (1 + 2 * PIECE_LEN // len("".join(parts)))
    assert len(text) > PIECE_LEN
    assert (
        tokenizer.encode(text, add_special_tokens=True)
        == backend.encode(text, add_special_tokens=True).ids
    )


def test_special_tokens_are_added_around_a_text_of_any_length() -> None:
    backend = sentencepiece()
    tokenizer = Tokenizer(backend, {}, backend.get_vocab_size())
    assert tokenizer.encode("in", add_special_tokens=True)[0] == 1
    assert tokenizer.encode("in", add_special_tokens=False)[0] != 1


def test_a_folder_without_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(TokenizerFilesError, match=r"tokenizer\.json cannot be used: it is missing"):
        Tokenizer.from_folder(tmp_path, 1)


def test_a_broken_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerFilesError, match=r"tokenizer\.json cannot be used"):
        Tokenizer.from_folder(tmp_path, 1)


def test_a_special_token_is_named_plainly_or_with_its_rules() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
    tokenizer = Tokenizer(byte_level(), config, 512)
    assert [tokenizer.special_token(name) for name in ("bos_token", "eos_token", "pad_token")] == [
        "<s>",
        "</s>",
        None,
    ]


def test_a_text_waits_for_no_whole_long_text_of_another_thread() -> None:
    """Each of two threads encodes a long text again and again."""
    backend = byte_level("smollm")
    tokenizer = Tokenizer(backend, {}, backend.get_vocab_size())
    long = " the river runs to the sea" * 40_000
    short = long[: 5 * PIECE_LEN]

    def seconds(text: str) -> float:
        began = time.perf_counter()
        tokenizer.encode(text, add_special_tokens=False)
        return time.perf_counter() - began

    alone = seconds(long)
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            seconds(long)

    flooding = [threading.Thread(target=flood) for _ in range(2)]
    for each in flooding:
        each.start()
    try:
        # A busy machine lengthens some of many, but not of all tries.
        is_soon = any(max(seconds(short) for _ in range(12)) < alone / 2 for _ in range(20))
    finally:
        is_over.set()
        for each in flooding:
            each.join()
    assert is_soon


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_pieces_of_a_long_text_are_encoded_with_a_lowered_priority() -> None:
    """On two cores a tenant's long prompts took half of the time of others' first tokens."""
    script = """
import os
from headwater.services.text.tokenizer import Tokenizer, lower_encoding_threads
from tests.services.text.small_tokenizers import byte_level

lower_encoding_threads()
backend = byte_level("smollm")
tokenizer = Tokenizer(backend, {}, backend.get_vocab_size())
before = set(os.listdir("/proc/self/task"))
tokenizer.encode(" the river" * 4000, add_special_tokens=False)
# A thread that has ended may have been among them.
threads = set(os.listdir("/proc/self/task"))
assert threads <= before
priorities = {os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in threads}
print(os.getpriority(os.PRIO_PROCESS, 0), max(priorities))
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    own, lowered = map(int, run.stdout.split())
    assert own < lowered == LOWERED


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_a_long_text_that_cannot_be_cut_yields_to_others() -> None:
    backend = sentencepiece()
    tokenizer = Tokenizer(backend, {}, backend.get_vocab_size())
    seen = set[int]()

    def encode() -> None:
        tokenizer.encode("the hello " * 40_000, add_special_tokens=False)

    for _ in range(20):
        encoding = threading.Thread(target=encode)
        encoding.start()
        while encoding.is_alive() and LOWERED not in seen:
            for thread in Path("/proc/self/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    seen.add(os.getpriority(os.PRIO_PROCESS, int(thread.name)))
        encoding.join()
        if LOWERED in seen:
            return
    pytest.fail("no thread was lowered")
