"""Flags of a command, made from the fields of settings: a flag is declared where its setting is."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from ..stack.flags import variable_of
from ..stack.settings import StackSettings

FIELDS = {field.name: field for field in dataclasses.fields(StackSettings)}
PANELS = {
    "Model": (
        *("model", "served_model_name", "revision", "dtype", "quantization", "calibration"),
        *("max_model_len", "load_format", "model_code"),
    ),
    "Addresses and access": (
        *("host", "port", "grpc_port", "api_key_file", "admin_key_file"),
        *("tls_cert_file", "tls_key_file", "tls_client_ca_file", "allowed_origins"),
        *("root_path", "trust_forwarded_prefix"),
    ),
    "Engines": (
        *("device", "replicas", "min_replicas", "max_replicas", "idle_seconds"),
        *("target_requests", "cold_start_timeout", "resident", "prefill_replicas"),
        *("decode_replicas", "tensor_parallel_size", "expert_parallel"),
        *("pipeline_parallel_size", "numerics", "activation_dtype", "profile", "executor"),
    ),
    "Memory and cached prefixes": (
        *("hold_weights", "gpu_memory_utilization", "kv_cache_dtype", "eviction", "kv_swap_memory"),
        *("kv_disk_dir", "kv_disk_memory", "kv_peer_memory", "kv_peer_direct"),
        "shared_prompt",
    ),
    "Drafts and adapters": (
        *("speculation", "draft_model", "draft_heads", "lora_modules"),
        *("adapter_memory", "adapter_host_memory"),
    ),
    "Chats and answers": (
        *("chat_template", "trust_request_chat_template", "tool_call_parser"),
        *("reasoning_parser", "generation_config", "escape_special_tokens", "close_schemas"),
        "tokenizer_info",
    ),
    "Processes, folders and logs": (
        *("gateways", "processors", "output_processors", "nats_url", "redis_url"),
        *("state_dir", "cache_dir", "drain_limit", "log_level", "earlier_logs"),
    ),
}
"""Order of settings in `--help`, by panel."""
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


def option_of(name: str) -> Any:
    """The flag of a setting of `headwater up`, for another command that has it too."""
    field = FIELDS[name]
    shown: dict[str, Any] = (
        {} if field.metadata["shown"] is None else {"show_default": field.metadata["shown"]}
    )
    if field.default_factory is not dataclasses.MISSING:
        shown["default_factory"] = field.default_factory
    return typer.Option(
        envvar=variable_of(field),
        help=field.metadata["help"],
        rich_help_panel=PANEL_OF.get(name),
        **shown,
    )


def default_of(name: str) -> Any:
    """The default of a setting of `headwater up`, written once."""
    return FIELDS[name].default


def with_flags(run: Callable[..., None], *, without: Collection[str] = ()) -> Callable[..., None]:
    """A command that has every setting but those of `without` as a flag, beside the parameters of
    `run` itself, and calls `run` with the settings first."""
    hints = typing.get_type_hints(StackSettings)
    _, *own = inspect.signature(run, eval_str=True).parameters.values()
    fields = {name: FIELDS[name] for name in PANEL_OF if name not in without}

    def command(**given: Any) -> None:
        # Lists in variables are separated by commas, as for stages; typer would split them at
        # spaces.
        lists = {
            name: tuple(part for each in given[name] or () for part in each.split(",") if part)
            for name in fields
            if _is_tuple(hints[name])
        }
        settings = {name: given[name] for name in fields} | lists
        run(StackSettings(**settings), **{each.name: given[each.name] for each in own})

    annotations = {
        name: Annotated[
            list[str] | None if _is_tuple(hints[name]) else hints[name], option_of(name)
        ]
        for name in fields
    }
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=annotations[name],
        )
        for name, field in fields.items()
    ]
    return _as_command(command, run, [*own, *options])


def with_own_flags(run: Callable[..., None], names: Collection[str]) -> Callable[..., None]:
    """A command that has these settings as flags beside the parameters of `run` itself, and calls
    `run` with those that the command line gives, by name. Variables are not read: they speak to
    `headwater up`."""
    hints = typing.get_type_hints(StackSettings)
    _, *own = inspect.signature(run, eval_str=True).parameters.values()

    def command(**given: Any) -> None:
        chosen = {name: given[name] for name in names if given[name] is not None}
        run(chosen, **{each.name: given[each.name] for each in own})

    kinds = {name: list[str] if _is_tuple(hints[name]) else hints[name] for name in names}
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kind | None,
                typer.Option(help=FIELDS[name].metadata["help"], rich_help_panel=PANEL_OF[name]),
            ],
        )
        for name, kind in kinds.items()
    ]
    return _as_command(command, run, [*own, *options])


def _as_command(
    command: Callable[..., None], run: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """The command with the name and the text of `run`, and the parameters that typer reads."""
    command.__name__ = run.__name__
    command.__doc__ = run.__doc__
    command.__annotations__ = {
        **{each.name: each.annotation for each in parameters},
        "return": None,
    }
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _is_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return inspect.Parameter.empty
    if isinstance(field.default, tuple):
        return list(field.default) or None
    return field.default
