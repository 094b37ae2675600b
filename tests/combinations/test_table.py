"""The table is whole: every capability has its row, every setting its capability, and the page
shows what was seen."""

from __future__ import annotations

import dataclasses

from headwater.bench.combinations import FAILED, PAGE, PLATFORMS, page, read_results
from headwater.engine_core.options import ExecutorOptions
from headwater.proto import common_pb2
from tests.combinations.capabilities import CAPABILITIES
from tests.combinations.cells import CELLS

NO_CAPABILITY_OPTIONS = {
    # What is served, in which precision, and on what.
    "model_folder", "executor", "device", "dtype", "load_format", "num_threads",
    # Sizes.
    "block_size", "max_model_len", "max_num_seqs", "spare_rows",
    # Steps in flight: the same engine, see test_engine_at_random.py.
    "async_depth",
    # Where whole experts are: see tests/engine_core/parallel/test_expert_parallel.py.
    "expert_parallel",
    # How ranks start.
    "copies_ranks",
    # Where the weights of one rank lie: see test_placed_weights.py and test_cuda_held_weights.py.
    "weights_holder",
    # Where stages are: the ranks and their rings are those of one host, see test_stage_hosts.py.
    "stage_hosts", "stage_listen", "stage_secret_file",
    # Where ranks exchange: the same sums in the same order, see test_ranks_on_gpu.py.
    "peer_access",
}  # fmt: skip
NO_CAPABILITY_SAMPLING = {
    # The end of an answer by length or token, in every cell.
    "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids",
    # Logits edited before they are drawn from, as penalties are.
    "bad_words", "allowed_token_ids", "logit_bias",
    # What is shown of an answer, or cut off a prompt.
    "skip_special_tokens", "echo", "truncate_prompt_tokens", "truncation_side",
    # Held by the grammar's path.
    "thinking_token_budget",
}  # fmt: skip

ROW = "belongs to the Capability of tests/combinations/capabilities.py that it changes, by name"


def test_every_capability_meets_every_other_and_itself() -> None:
    names = [each.name for each in CAPABILITIES]
    assert len(set(names)) == len(names)
    pairs = {frozenset((cell.first.name, cell.second.name)) for cell in CELLS.values()}
    assert pairs == {frozenset((one, other)) for one in names for other in names}
    assert {name for each in CAPABILITIES for name in each.beside} <= set(names)


def test_make_test_runs_every_refusal_and_each_capability_beside_at_least_three_others() -> None:
    cells = [cell for cell in CELLS.values() if cell.is_in_ci]
    assert {name for name, cell in CELLS.items() if cell.refused or cell.refused_on_cpu} <= {
        c.name for c in cells
    }
    for each in CAPABILITIES:
        others = [cell for cell in cells if each in cell.both and cell.first is not cell.second]
        assert len(others) >= 3, each.name
    assert len(cells) < len(CELLS) / 2


def test_every_setting_of_an_executor_belongs_to_a_capability_or_to_none() -> None:
    claimed = {name for each in CAPABILITIES for name in (*each.options, *each.settings)}
    fields = {field.name for field in dataclasses.fields(ExecutorOptions)}
    assert fields - claimed == NO_CAPABILITY_OPTIONS, (
        f"an option {ROW}; or name it in NO_CAPABILITY_OPTIONS here"
    )
    assert not claimed & NO_CAPABILITY_OPTIONS


def test_every_field_of_sampling_belongs_to_a_capability_or_to_none() -> None:
    claimed = {name for each in CAPABILITIES for name in each.sampling}
    fields = {field.name for field in common_pb2.Sampling.DESCRIPTOR.fields}
    assert fields - claimed == NO_CAPABILITY_SAMPLING, (
        f"a field {ROW}; or name it in NO_CAPABILITY_SAMPLING here"
    )
    assert claimed <= fields


def test_the_page_shows_every_cell_as_it_was_last_seen() -> None:
    results = read_results()
    assert {name: tuple(cell["place"]) for name, cell in results.items()} == {
        name: cell.place for name, cell in CELLS.items()
    }, "run `headwater bench combinations --write`"
    assert PAGE.read_text() == page(results), "run `headwater bench combinations --render`"


def test_every_cell_was_seen_on_a_cpu_and_none_is_known_to_fail() -> None:
    results = read_results()
    assert [name for name in CELLS if "cpu" not in results[name]["platforms"]] == []
    assert [
        (name, platform)
        for name, cell in results.items()
        for platform in PLATFORMS
        if cell["platforms"].get(platform, {"seen": ""})["seen"].startswith(FAILED)
    ] == []
