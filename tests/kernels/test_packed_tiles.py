from __future__ import annotations

import pytest

from headwater.kernels.gemm.packed_tiles import BLOCK_N, MOST_ROWS, MULTIPROCESSORS, choose


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(8192, 8192), (24576, 4096), (4096, 12288), (4096, 2048)]
)
def test_every_number_of_rows_has_tiles_up_to_the_one_from_which_matrices_are_expanded(
    num_outputs: int, num_inputs: int, bits: int
) -> None:
    chosen = {m: choose(m, num_outputs, num_inputs, bits) for m in range(1, MOST_ROWS + 1)}
    assert None not in chosen.values()
    assert choose(MOST_ROWS + 1, num_outputs, num_inputs, bits) is None


def test_one_row_of_long_inputs_is_cut_where_half_of_the_multiprocessors_would_idle() -> None:
    outputs = BLOCK_N * MULTIPROCESSORS // 2
    chosen = [
        choose(1, n, k, 4) for n, k in ((outputs, 4096), (outputs + 16, 4096), (outputs, 2048))
    ]
    assert [tiles and tiles.block_n for tiles in chosen] == [BLOCK_N // 2, BLOCK_N, BLOCK_N]


def test_many_rows_take_tiles_of_which_no_round_is_nearly_empty() -> None:
    """4,096 outputs of 512 rows are 64 programs of the largest tiles, of 8,192 outputs 128."""
    few = choose(512, 4096, 4096, 4)
    many = choose(512, 8192, 4096, 4)
    assert few is not None
    assert many is not None
    assert (few.block_n, few.block_m) == (2 * BLOCK_N, 128)
    assert (many.block_n, many.block_m) == (2 * BLOCK_N, 256)
