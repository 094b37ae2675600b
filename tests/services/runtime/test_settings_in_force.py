"""Settings as operators see them: values without secrets, and where each came from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headwater.gateway.settings import GatewaySettings
from headwater.services.runtime.bus import without_password
from headwater.services.runtime.settings import read_settings
from headwater.services.runtime.settings_in_force import settings_in_force
from headwater.services.stack.flags import variable_of
from headwater.services.stack.settings import StackSettings


def rows(settings: GatewaySettings, env: dict[str, str]) -> dict[str, tuple[str, str]]:
    return {
        each["name"]: (each["value"], each["source"]) for each in settings_in_force(settings, env)
    }


def test_each_setting_says_where_it_came_from() -> None:
    env = {
        "HEADWATER_MAX_QUEUED": "7",
        "HEADWATER_SHARED_CACHE": "true",
        "HEADWATER_PORT": "9000",
        "HEADWATER_DRAIN_LIMIT": "5",
    }
    reported = rows(read_settings(GatewaySettings, ["--port=9001", "--max-choices=3"], env), env)
    assert reported["max_queued"] == ("7", "variable HEADWATER_MAX_QUEUED")
    assert reported["shared_cache"] == ("True", "variable HEADWATER_SHARED_CACHE")
    assert reported["drain_limit"] == ("5.0", "variable HEADWATER_DRAIN_LIMIT")
    # A flag wins over the variable.
    assert reported["port"] == ("9001", "flag")
    assert reported["max_choices"] == ("3", "flag")
    assert reported["grpc_port"] == ("8001", "default")
    assert list(reported.values())[-1][1] == "default"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://user:SECRET@host:4222", "nats://host:4222"),
        ("redis://:SEC,RET@host", "redis://host"),
        ("redis://:SEC@RET@host/1", "redis://host/1"),
        ("redis://:SEC/RET@host", "redis://host"),
        ("redis://host?password=SECRET", "redis://host"),
        ("nats://a:SECRET@one,nats://b:SEC,RET@two", "nats://one,nats://two"),
        ("user:SECRET@host:4222", "host:4222"),
        ("nats://one:4222,two:4222", "nats://one:4222,two:4222"),
    ],
)
def test_no_password_of_an_address_is_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
    reported = rows(dataclasses.replace(GatewaySettings(), redis_url=url), {})
    assert reported["redis_url"] == (shown, "flag")


def test_no_secret_is_shown() -> None:
    secret = "a-secret-of-thirty-two-characters"
    names = ("HEADWATER_ADMIN_KEY", "HEADWATER_MASTER_KEY", "HEADWATER_CLUSTER_TOKEN")
    env = dict.fromkeys(names, secret)
    reported = rows(read_settings(GatewaySettings, ["--nats-url=nats://host"], env), env)
    assert secret not in str(reported)
    assert reported["admin_key"] == ("set", "variable HEADWATER_ADMIN_KEY")
    assert reported["cluster_token"][0] == "set"


def test_settings_of_up_are_compared_with_what_they_are_where_nothing_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"HEADWATER_STATE_DIR": "state"}
    usual = StackSettings().resolved()
    settings = StackSettings(state_dir=Path("state"), max_model_len=64).resolved()
    reported = {
        each["name"]: each["source"]
        for each in settings_in_force(settings, env, variable_of, defaults=usual)
    }
    assert reported["state_dir"] == "variable HEADWATER_STATE_DIR"
    assert reported["max_model_len"] == "flag"
    assert reported["replicas"] == reported["cache_dir"] == "default"
