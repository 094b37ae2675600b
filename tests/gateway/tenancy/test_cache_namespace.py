"""Namespaces: equal for equal words, different for any difference, and nothing without the
secret."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.gateway.tenancy.cache_namespace import CacheNamespaces
from headwater.services.runtime.errors import BadRequest
from headwater.services.runtime.served_model import ServedModel, model_key
from headwater.services.runtime.settings import SettingError

MODEL = ServedModel(
    name="m",
    revision="r",
    dtype="bfloat16",
    block_size=16,
    kv_format="bfloat16",
    max_model_len=8192,
    vocab_size=9,
)
KEY = b"k" * 32
words = st.text(max_size=8)


@given(words, words, words, words, words, words)
def test_words_that_differ_anywhere_make_another_namespace(
    tenant: str, lora: str, salt: str, other_tenant: str, other_lora: str, other_salt: str
) -> None:
    namespaces = CacheNamespaces(KEY)
    mine = namespaces.of(tenant, MODEL, lora=lora, cache_salt=salt)
    theirs = namespaces.of(other_tenant, MODEL, lora=other_lora, cache_salt=other_salt)
    assert (mine == theirs) == ((tenant, lora, salt) == (other_tenant, other_lora, other_salt))
    assert len(mine) == 16


@pytest.mark.parametrize(
    "change", [{"name": "n"}, {"revision": "s"}, {"kv_format": "fp8_e4m3"}, {"block_size": 32}]
)
def test_models_that_cache_differently_share_nothing(change: dict[str, object]) -> None:
    namespaces = CacheNamespaces(KEY)
    assert namespaces.of("t", MODEL) != namespaces.of("t", dataclasses.replace(MODEL, **change))  # type: ignore[arg-type]


def test_another_master_key_makes_other_namespaces_and_sharing_makes_them_one() -> None:
    assert CacheNamespaces(KEY).of("t", MODEL) != CacheNamespaces(b"l" * 32).of("t", MODEL)
    assert CacheNamespaces(None).of("t", MODEL) == CacheNamespaces(None).of("u", MODEL)
    assert CacheNamespaces(None).of("t", MODEL, cache_salt="s") != CacheNamespaces(None).of(
        "t", MODEL
    )


def test_gateways_with_one_key_file_agree(tmp_path: Path) -> None:
    path = tmp_path / "master"
    path.write_bytes(KEY + b"\n")
    first, second = (CacheNamespaces.read("", str(path), shared=False) for _ in range(2))
    assert first.of("t", MODEL) == second.of("t", MODEL) == CacheNamespaces(KEY).of("t", MODEL)
    assert CacheNamespaces.read(KEY.decode(), "", shared=False).of("t", MODEL) == first.of(
        "t", MODEL
    )
    assert CacheNamespaces.read("", "", shared=False).of("t", MODEL) != first.of("t", MODEL)
    for key, file in (("short", ""), ("", str(path))):
        path.write_bytes(b"short")
        with pytest.raises(SettingError, match=r"--master-key is '\*\*\*'"):
            CacheNamespaces.read(key, file, shared=False)


def kept_bytes(work: Callable[[int], object]) -> int:
    """Bytes that are still allocated behind a thousand calls."""
    work(0)
    tracemalloc.start()
    try:
        for number in range(1, 1001):
            work(number)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_nothing_is_kept_of_salts_and_names_of_models_that_clients_choose() -> None:
    namespaces = CacheNamespaces(KEY)
    long = "x" * 1000
    assert kept_bytes(lambda i: namespaces.of("t", MODEL, cache_salt=f"{long}{i}")) < 10_000
    assert kept_bytes(lambda i: model_key(f"{long}{i}")) < 10_000


def test_a_salt_is_bounded_on_every_surface() -> None:
    CacheNamespaces(KEY).of("t", MODEL, cache_salt="x" * 1024)
    with pytest.raises(BadRequest, match="cache_salt has 1025 characters; allowed: at most 1024"):
        CacheNamespaces(KEY).of("t", MODEL, cache_salt="x" * 1025)
