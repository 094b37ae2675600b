"""`headwater platform`: the devices that engines can compute on here, and whether one keeps the
contract."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from headwater.engine_core.platforms.registry import registrations

from ..engine.core.environment import core_environment
from ..runtime.printable import shown
from .admin_client import AsJson
from .plain_table import plain_table, show_as

app = typer.Typer(
    no_args_is_help=True,
    help="List and check platforms: the kinds of devices that engines compute on.",
)


@app.command("list")
def list_platforms(*, as_json: AsJson = False) -> None:
    """List the names that --device takes, and the installed distribution of each. Loads none of
    them."""
    known = registrations().values()
    rows = [
        {"name": each.name, "distribution": each.distribution, "version": each.version}
        for each in known
    ]
    table = plain_table("name", "distribution", "version")
    for each in known:
        owners = ", ".join((each.distribution, *each.others)) if each.others else each.distribution
        table.add_row(shown(each.name), shown(owners or "headwater"), shown(each.version))
    show_as(rows, lambda: table, as_json)


@app.command()
def check(
    *,
    name: Annotated[str, typer.Argument(help="A name of `headwater platform list`.")],
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Check only operations in this type; repeatable. Default: all types that "
            "it serves."
        ),
    ] = None,
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="Check only these operations: rows, attention, sampling or hooks; repeatable."
        ),
    ] = None,
    model: Annotated[bool, typer.Option(help="Check the demo model's greedy tokens too.")] = True,
    as_json: AsJson = False,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            envvar="HEADWATER_CACHE",
            show_default="~/.cache/headwater",
            help="Folder for downloaded models.",
        ),
    ] = None,
) -> None:
    """Compare every operation of a platform with its specification, and its bits in every batch.

    Then the demo model's greedy tokens, beside a decoder in plain torch.

    Prints one table; exits with 0 where everything passed, with 1 elsewhere.
    """
    flags = [
        f"--device={name}",
        "--model" if model else "--no-model",
        *(["--json"] if as_json else []),
    ]
    flags += [f"--dtype={each}" for each in dtype or ()] + [f"--part={each}" for each in part or ()]
    flags += [f"--cache-dir={cache_dir}"] if cache_dir is not None else []
    # Another program in this process, in the environment of an engine's core: it brings torch.
    command = [sys.executable, "-m", "headwater.services.engine.programs.platform_check", *flags]
    os.execve(sys.executable, command, core_environment(0))
