"""Settings of engines that the chart derives from its values."""

from __future__ import annotations

import platform

import pytest

from headwater.services.engine.settings import EngineSettings
from headwater.services.runtime.settings import read_settings
from tests.deploy.chart import applied
from tests.deploy.test_chart import stages

# A failure to load the library on the platform that it is built for is an error.
if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
    pytest.skip("Helm's library is built for Linux on x86-64", allow_module_level=True)


def test_an_engine_has_as_many_threads_as_its_limit_leaves_cores() -> None:
    cores = {"a": "2500m", "b": 2, "c": "0.5", "d": None}
    made = [
        {"name": name, "model": "m", "servedModelName": name}
        | ({"resources": {"limits": {"cpu": limit}}} if limit else {})
        for name, limit in cores.items()
    ]
    asked = {"name": "e", "model": "m", "servedModelName": "e", "threads": 8, "resources": {"limits": {"cpu": 4}}}
    ((objects,),) = applied([[{"engines": [*made, asked]}]])
    threads = {
        settings.served_model_name: settings.threads
        for stage, container, _ in stages(objects)
        if stage == "engine"
        for settings in [read_settings(EngineSettings, container["args"], {})]
    }
    assert threads == {"a": 3, "b": 2, "c": 1, "d": 0, "e": 8}


def test_roles_and_parallel_sizes_are_passed_where_they_are_set() -> None:
    engine = {"name": "e", "model": "m", "device": "cuda", "tensorParallelSize": 2, "pipelineParallelSize": 2}
    divided, prefilling = applied([[{"engines": [engine]}], [{"engines": [engine | {"role": "prefill", "gpus": 8}]}]])
    (container,) = [container for stage, container, _ in stages(divided[0]) if stage == "engine"]
    settings = read_settings(EngineSettings, container["args"], {})
    assert (settings.tensor_parallel_size, settings.pipeline_parallel_size) == (2, 2)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    (container,) = [container for stage, container, _ in stages(prefilling[0]) if stage == "engine"]
    assert "--role=prefill" in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
