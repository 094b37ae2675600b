"""Settings as operators see them: values without secrets, and where each came from."""

from __future__ import annotations

from pathlib import Path

from headwater.gateway.settings import GatewaySettings
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
    told = rows(read_settings(GatewaySettings, ["--port=9001", "--max-choices=3"], env), env)
    assert told["max_queued"] == ("7", "variable HEADWATER_MAX_QUEUED")
    assert told["shared_cache"] == ("True", "variable HEADWATER_SHARED_CACHE")
    assert told["drain_limit"] == ("5.0", "variable HEADWATER_DRAIN_LIMIT")
    # A flag wins over the variable.
    assert told["port"] == ("9001", "flag")
    assert told["max_choices"] == ("3", "flag")
    assert told["grpc_port"] == ("8001", "default")
    assert list(told.values())[-1][1] == "default"


def test_no_secret_and_no_password_is_shown() -> None:
    secret = "a-secret-of-thirty-two-characters"
    env = {"HEADWATER_ADMIN_KEY": secret, "HEADWATER_MASTER_KEY": secret}
    flags = [f"--nats-url=nats://user:{secret}@host:4222", f"--redis-url=redis://:{secret}@host"]
    told = rows(read_settings(GatewaySettings, flags, env), env)
    assert secret not in str(told)
    assert told["admin_key"][0] == "set"
    assert told["nats_url"] == ("nats://host:4222", "flag")


def test_settings_of_up_are_read_by_their_own_variables(tmp_path: Path) -> None:
    env = {"HEADWATER_STATE_DIR": str(tmp_path)}
    settings = StackSettings(state_dir=tmp_path, replicas=2)
    told = {each["name"]: each for each in settings_in_force(settings, env, variable_of)}
    assert told["state_dir"]["source"] == "variable HEADWATER_STATE_DIR"
    assert told["replicas"]["source"] == "flag"
