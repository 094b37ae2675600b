"""Block hashes are those of the token ids, whatever holds them, and are made where no numpy is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from headwater.engine_core.kv.prefix_hash import TokenArray, block_hashes, token_bytes

IDS = list(range(1000, 1070))
KNOWN = ["7919656bc4907a8e", "05dc803ccf9d138e"]


@pytest.mark.parametrize(
    "token_ids",
    [IDS, tuple(IDS), np.array(IDS, np.int32), np.repeat(np.array(IDS, np.int32), 2)[::2]],
    ids=["list", "tuple", "array", "strided array"],
)
def test_hashes_are_those_of_the_ids(token_ids: Sequence[int] | TokenArray) -> None:
    assert [each.hex()[:16] for each in block_hashes(bytes(16), token_ids, 32)] == KNOWN


def test_rows_of_ids_follow_one_another() -> None:
    assert token_bytes(np.array(IDS, np.int32).reshape(7, 10)) == token_bytes(IDS)


@pytest.mark.parametrize("token_id", [1 << 31, -(1 << 31) - 1])
def test_an_id_that_is_no_int32_is_an_error(token_id: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([token_id])


def test_a_gateway_starts_without_numpy() -> None:
    probe = "import sys; sys.modules['numpy'] = None; import headwater.gateway.__main__"
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=120)
