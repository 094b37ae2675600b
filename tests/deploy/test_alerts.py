"""Each alert fires in Prometheus' own rule engine on series of a deployment that is broken, and on
none of one that is well."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.chart import CHART

PROMTOOL = os.environ.get("HEADWATER_PROMTOOL") or shutil.which("promtool")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        PROMTOOL is None,
        reason="promtool is missing (Debian: apt install prometheus; or name it in HEADWATER_PROMTOOL)",
    ),
]
RULES = CHART / "files/rules.yaml"
STEP = "15s"
END = "20m"
FIRST_TOKENS = "headwater_time_to_first_token_seconds_bucket"
RUNNING = 'headwater_num_requests_running{instance="e",model_name="m"}'
STEPS = 'headwater_step_seconds_count{instance="e",model_name="m"}'
SERIES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "HeadwaterStageIsGone": (
        {'up{job="headwater",instance="e"}': "0x100"},
        {'up{job="headwater",instance="e"}': "1x100"},
    ),
    "HeadwaterIsNotScraped": (
        {'up{job="another"}': "1x100"},
        {'up{job="headwater"}': "1x100"},
    ),
    **{
        f"HeadwaterHasNo{name}": (
            {'headwater_build_info{stage="another"}': "1x100"},
            {f"headwater_build_info{{{well}}}": "1x100"},
        )
        for name, well in (
            ("Gateway", 'stage="gateway"'),
            ("Processor", 'stage="processor"'),
            # The release before has no such label.
            ("OutputProcessor", 'version="0.1.0"'),
        )
    },
    # Without requests none need be there.
    "HeadwaterHasNoEngine": (
        {"headwater_model_requests": "2x100"},
        {"headwater_model_requests": "0x100"},
    ),
    "HeadwaterStageStartsAgain": (
        {'headwater_stage_restarts_total{stage="engine",replica="e"}': "0x40 4x60"},
        # Three engines that an autoscaler has started again.
        {
            f'headwater_stage_restarts_total{{stage="engine",replica="{each}"}}': "0x40 1x60"
            for each in "abc"
        },
    ),
    "HeadwaterDiskIsFull": (
        {
            'headwater_disk_free_bytes{what="state"}': "5x100",
            'headwater_disk_size_bytes{what="state"}': "100x100",
        },
        {
            'headwater_disk_free_bytes{what="state"}': "50x100",
            'headwater_disk_size_bytes{what="state"}': "100x100",
        },
    ),
    "HeadwaterVolumeIsFull": (
        {
            'kubelet_volume_stats_available_bytes{persistentvolumeclaim="jetstream-hw-nats-0"}': "5x100",
            'kubelet_volume_stats_capacity_bytes{persistentvolumeclaim="jetstream-hw-nats-0"}': "100x100",
        },
        {
            'kubelet_volume_stats_available_bytes{persistentvolumeclaim="of-others"}': "5x100",
            'kubelet_volume_stats_capacity_bytes{persistentvolumeclaim="of-others"}': "100x100",
        },
    ),
    "HeadwaterStreamIsFull": (
        {
            'headwater_stream_used_bytes{stream="OBJ_files"}': "95x100",
            'headwater_stream_max_bytes{stream="OBJ_files"}': "100x100",
        },
        {
            'headwater_stream_used_bytes{stream="OBJ_files"}': "80x100",
            'headwater_stream_max_bytes{stream="OBJ_files"}': "100x100",
        },
    ),
    # The clock of these tests begins at zero.
    "HeadwaterCertificateEnds": (
        {'headwater_certificate_ends_timestamp_seconds{what="clients"}': "100000x100"},
        {'headwater_certificate_ends_timestamp_seconds{what="clients"}': "10000000x100"},
    ),
    "HeadwaterBudgetIsSpent": (
        {'headwater_requests_refused_total{code="insufficient_quota"}': "0+1x100"},
        {'headwater_requests_refused_total{code="rate_limit_exceeded"}': "0+1x100"},
    ),
    "HeadwaterRequestsFail": (
        {
            'headwater_http_responses_total{status="503"}': "0+10x100",
            'headwater_http_responses_total{status="200"}': "0+100x100",
        },
        {
            'headwater_http_responses_total{status="400"}': "0+10x100",
            'headwater_http_responses_total{status="200"}': "0+100x100",
        },
    ),
    "HeadwaterRequestsWaitForAnEngine": (
        {'headwater_model_requests_without_replica{model_name="m"}': "3x100"},
        {'headwater_model_requests_without_replica{model_name="m"}': "3x10 0x90"},
    ),
    "HeadwaterFirstTokensAreSlow": (
        {
            FIRST_TOKENS + '{le="5",model_name="m"}': "0+1x100",
            FIRST_TOKENS + '{le="10",model_name="m"}': "0+10x100",
            FIRST_TOKENS + '{le="+Inf",model_name="m"}': "0+10x100",
        },
        {
            FIRST_TOKENS + '{le="5",model_name="m"}': "0+10x100",
            FIRST_TOKENS + '{le="10",model_name="m"}': "0+10x100",
            FIRST_TOKENS + '{le="+Inf",model_name="m"}': "0+10x100",
        },
    ),
    # Engines have the label that gateways lack.
    "HeadwaterQueueGrows": (
        {"headwater_num_requests_waiting": "200x100"},
        {'headwater_num_requests_waiting{model_name="m"}': "200x100"},
    ),
    "HeadwaterEngineStandsStill": (
        {RUNNING: "2x100", STEPS: "5x100"},
        {RUNNING: "2x100", STEPS: "0+5x100"},
    ),
    "HeadwaterCacheIsTooSmall": (
        {'headwater_num_preemptions_total{instance="e"}': "0+15x100"},
        {'headwater_num_preemptions_total{instance="e"}': "0+1x100"},
    ),
    "HeadwaterGoesWithout": (
        {'headwater_without{what="redis"}': "1x100"},
        {'headwater_without{what="redis"}': "0x100"},
    ),
    "HeadwaterIndexIsBehind": (
        {'headwater_index_synced{replica="r"}': "0x100"},
        {'headwater_index_synced{replica="r"}': "1x100"},
    ),
    "HeadwaterPredictionsFail": (
        {'headwater_router_trust{replica="r"}': "0.2x100"},
        {'headwater_router_trust{replica="r"}': "0.9x100"},
    ),
    "HeadwaterStrangersCall": (
        {'headwater_refused_total{what="call",why="stale"}': "0+1x100"},
        {'headwater_refused_total{what="call",why="stale"}': "5x100"},
    ),
    "HeadwaterAnswersMove": (
        {'headwater_migrations_total{cause="lost"}': "0+15x100"},
        {'headwater_migrations_total{cause="lost"}': "0+1x100"},
    ),
}
"""Series of each alert where it has to fire, and where it must not: values every 15 s."""


def case(alert: str, series: dict[str, str], *, fires: bool) -> dict[str, object]:
    count = {"labels": "{}", "value": 1}
    return {
        "interval": STEP,
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": END,
                "exp_samples": [count] * fires,
            }
        ],
    }


def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else(tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    assert SERIES.keys() == {rule["alert"] for rule in rules}
    cases = [
        case(alert, series, fires=fires)
        for alert, (broken, well) in SERIES.items()
        for series, fires in ((broken, True), (well, False))
    ]
    plan = {"rule_files": [str(RULES)], "evaluation_interval": STEP, "tests": cases}
    path = tmp_path / "alerts.yaml"
    path.write_text(yaml.safe_dump(plan))
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
