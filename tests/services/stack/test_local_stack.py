"""What a supervisor must outlive while it keeps others running."""

from __future__ import annotations

from pathlib import Path

from headwater.services.stack.cluster_record import ClusterRecord
from headwater.services.stack.local_stack import LocalStack
from headwater.services.stack.memory_shares import StartedModel
from tests.services.stack.test_plan import plan


def test_a_line_goes_on_where_its_record_cannot_be_written(tmp_path: Path) -> None:
    """As on a full disk: a death that is told of then must still be followed by a new life."""
    sent: list[str] = []
    model = StartedModel(folder=tmp_path, name="m", weight_bytes=0, has_cache=True)
    stack = LocalStack(plan(state_dir=tmp_path / "gone").settings, [model], report=sent.append)
    stack.record = ClusterRecord(
        pid=1, model="m", rest="", grpc="", nats_url="", redis_url="", stages=()
    )
    stack._report_and_record("engine-0 ended with status -9")
    assert sent[0] == "engine-0 ended with status -9"
    assert sent[1].startswith("the cluster's record is out of date: [Errno 2]")
    stack._pipe.close()
