from __future__ import annotations

from headwater.bench.workloads import WORKLOADS


def test_the_drawn_lengths_of_a_workload_are_the_same_everywhere() -> None:
    drawn = WORKLOADS["O1"]
    assert (drawn.prompt_lens[:3], drawn.prompt_lens[-1], sum(drawn.prompt_lens)) == (
        (237, 682, 967),
        451,
        148_709,
    )
    assert (drawn.output_lens[:3], drawn.output_lens[-1], sum(drawn.output_lens)) == (
        (531, 915, 292),
        427,
        140_691,
    )
    assert len(drawn.prompt_lens) == len(drawn.output_lens) == 256
