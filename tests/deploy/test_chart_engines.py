"""Settings of engines that the chart derives from its values."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from headwater.services.engine.settings import EngineSettings
from headwater.services.output_processor.__main__ import OutputProcessorSettings
from headwater.services.processor.__main__ import ProcessorSettings
from headwater.services.runtime.settings import read_settings
from headwater.services.text.model import names_of
from tests.deploy.chart import applied, of_kind, refusals
from tests.deploy.test_chart import stages

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)


@pytest.mark.long
def test_an_engine_has_as_many_threads_as_its_limit_leaves_cores() -> None:
    cores = {"a": "2500m", "b": 2, "c": "0.5", "d": None}
    made = [
        {"name": name, "model": "m", "servedModelName": name}
        | ({"resources": {"limits": {"cpu": limit}}} if limit else {})
        for name, limit in cores.items()
    ]
    asked = {
        "name": "e",
        "model": "m",
        "servedModelName": "e",
        "threads": 8,
        "resources": {"limits": {"cpu": 4}},
    }
    ((objects,),) = applied([[{"engines": [*made, asked]}]])
    threads = {
        settings.served_model_name: settings.threads
        for stage, container, _ in stages(objects)
        if stage == "engine"
        for settings in [read_settings(EngineSettings, container["args"], {})]
    }
    assert threads == {"a": 3, "b": 2, "c": 1, "d": 0, "e": 8}


@pytest.mark.long
def test_roles_and_parallel_sizes_are_passed_where_they_are_set() -> None:
    engine = {
        "name": "e",
        "model": "m",
        "device": "cuda",
        "tensorParallelSize": 2,
        "pipelineParallelSize": 2,
        "resources": {"limits": {"memory": "32Gi"}},
    }
    divided, prefilling = applied(
        [[{"engines": [engine]}], [{"engines": [engine | {"role": "prefill", "gpus": 8}]}]]
    )
    (container,) = [container for stage, container, _ in stages(divided[0]) if stage == "engine"]
    settings = read_settings(EngineSettings, container["args"], {})
    assert (settings.tensor_parallel_size, settings.pipeline_parallel_size) == (2, 2)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    (container,) = [container for stage, container, _ in stages(prefilling[0]) if stage == "engine"]
    assert "--role=prefill" in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.long
def test_engines_of_two_roles_serve_one_model() -> None:
    engine = {"model": "m", "servedModelName": "served"}
    pools = [
        {"name": "prompts", "role": "prefill"} | engine,
        {"name": "answers", "role": "decode"} | engine,
    ]
    ((objects,),) = applied([[{"engines": [*pools, {"name": "other", "model": "n"}]}]])
    args: dict[str, list[list[str]]] = {}
    for stage, container, pod in stages(objects):
        args.setdefault(stage, []).append(container["args"])
        if stage in {"processor", "output-processor"}:
            settings_type = ProcessorSettings if stage == "processor" else OutputProcessorSettings
            settings = read_settings(settings_type, container["args"], {})
            models = names_of(settings.model_folder, settings.served_model_name)
            assert [name for _, name in models] == ["served", "n"]
            (waiting,) = pod["initContainers"]
            assert waiting["args"] == [str(folder) for folder, _ in models]
    of_engines = [read_settings(EngineSettings, each, {}) for each in args["engine"]]
    assert {(each.served_model_name, each.role) for each in of_engines} == {
        ("served", "prefill"),
        ("served", "decode"),
        ("n", "both"),
    }


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"name": "a", "model": "m", "minReplicas": 6}],
        "engines[0].minReplicas is 6; allowed: at most maxReplicas (4)",
    ),
    (
        [{"name": "a", "model": "m", "gpus": 1}],
        "engines[0].gpus is 1; allowed: 0 with device cpu, or another device",
    ),
    (
        [{"name": "a", "model": "m"}, {"name": "a", "model": "n"}],
        'engines[1].name is "a", as that of engines[0]; allowed: another name',
    ),
    (
        [{"name": "a", "model": "m"}, {"name": "b", "model": "n", "servedModelName": "m"}],
        'engines[1] serves "n" at revision "" as "m"; allowed: another servedModelName, as that '
        'is "m" at revision ""',
    ),
    (
        [
            {"name": "a", "model": "m", "role": "prefill"},
            {
                "name": "b",
                "model": "m",
                "role": "decode",
                "sharedPrompts": {"0" * 63 + "a": ["ada", "bob"]},
            },
        ],
        'engines[1].sharedPrompts is {"' + "0" * 63 + 'a":["ada","bob"]}; allowed: those of the '
        "other entry for m, {}",
    ),
]


def test_values_of_engines_that_do_not_fit_each_other_are_refused_by_name() -> None:
    answers = refusals([[{"engines": engines}] for engines, _ in REFUSED])
    for words, (_, sentence) in zip(answers, REFUSED, strict=True):
        assert isinstance(words, str)
        assert sentence in words


@pytest.mark.long
def test_a_number_of_replicas_that_does_not_follow_demand_has_no_maximum() -> None:
    engine = {"name": "a", "model": "m", "minReplicas": 6}
    ((objects,),) = applied([[{"keda": {"enabled": False}, "engines": [engine]}]])
    assert of_kind(objects, "Deployment")["hw-engine-a"]["spec"]["replicas"] == 6
