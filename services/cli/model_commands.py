"""`headwater models`: loads and unloads models on a running cluster over its gateway, and waits
until that is done."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import httpx
import typer
from rich.console import Console
from rich.table import Table

from ..runtime.printable import printable, shown
from ..runtime.progress import ProgressBars, Report
from ..runtime.settings import require
from ..stack.own_settings import OF_A_MODEL
from .adapter_commands import add_adapter_commands
from .admin_client import AdminKeyFile, AsJson, BaseUrl, call, open_gateway
from .flags import with_own_flags
from .plain_table import plain_table, show_as

POLL_SECONDS = 0.2
Model = Annotated[
    str,
    typer.Argument(
        help="Demo model, Hugging Face id, model folder or .gguf file, on the cluster's machine."
    ),
]
Name = Annotated[str, typer.Argument(help="Model name that clients send.")]
Replicas = Annotated[int | None, typer.Option(help="Engines: a fixed number.")]
MinReplicas = Annotated[
    int | None,
    typer.Option(help="Fewest engines when their number follows demand; 0 is allowed."),
]
MaxReplicas = Annotated[
    int | None, typer.Option(help="Most engines when their number follows demand.")
]


class ModelError(Exception):
    """A model was not loaded, or its name is missing. The message is a sentence for the user."""


class ModelClient:
    """One gateway's /admin/models."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def all(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("GET", "")["data"]
        return found

    def find(self, name: str) -> dict[str, Any] | None:
        return next((card for card in self.all() if card["id"] == name), None)

    def load(self, asked: dict[str, Any]) -> dict[str, Any]:
        return self._call("POST", "", asked)

    def scale(self, name: str, bounds: dict[str, Any]) -> dict[str, Any]:
        return self._call("PATCH", f"/{quote(name)}", bounds)

    def unload(self, name: str) -> dict[str, Any]:
        return self._call("DELETE", f"/{quote(name)}")

    def turn(self, name: str, what: str) -> dict[str, Any]:
        """Has a model `sleep` or `wake`; `pin` has it stay awake, `unpin` no longer."""
        return self._call("POST", f"/{quote(name)}/{what}")

    def replace_weights(self, name: str, folder: str, requests: str) -> dict[str, Any]:
        asked = {"folder": folder, "requests": requests}
        return self._call("POST", f"/{quote(name)}/weights", asked)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return call(self._client, method, f"/models{path}", body)


def wait_loaded(client: ModelClient, name: str, report: Report) -> dict[str, Any]:
    """The model's card when it serves. Raises `ModelError` for one that fails or is unloaded
    meanwhile."""
    last: dict[str, Any] | None = None
    while True:
        card = client.find(name)
        if card is None:
            raise ModelError(f"the model {name!r} was unloaded meanwhile")
        if card["state"] == "failed":
            raise ModelError(f"the model {name!r} could not be loaded: {card['problem']}")
        progress = card["progress"]
        # A new phase, or that the model serves, says that the phase before is done.
        if last is not None and (progress is None or progress["what"] != last["what"]):
            report(last["what"], last["total"], last["total"])
        if progress is not None:
            report(progress["what"], progress["done"], progress["total"])
        if card["state"] == "serving":
            return card
        last = progress
        time.sleep(POLL_SECONDS)


def wait_turned(client: ModelClient, name: str, state: str) -> None:
    """Returns when a model is awake or asleep. Raises `ModelError` for one that is unloaded
    meanwhile."""
    while True:
        card = client.find(name)
        if card is None:
            raise ModelError(f"the model {name!r} was unloaded meanwhile")
        if card.get("turn") == state:
            return
        time.sleep(POLL_SECONDS)


def wait_replaced(client: ModelClient, name: str, report: Report) -> str:
    """Returns the revision of a model's weights when they have been replaced. Raises `ModelError`
    where they were not."""
    while True:
        card = client.find(name)
        if card is None:
            raise ModelError(f"the model {name!r} was unloaded meanwhile")
        weights = card["weights"]
        if weights["problem"]:
            raise ModelError(f"the weights of {name!r} stay as they are: {weights['problem']}")
        if not weights["is_replacing"]:
            return str(weights["revision"])
        if (progress := card["progress"]) is not None:
            report(progress["what"], progress["done"], progress["total"])
        time.sleep(POLL_SECONDS)


def make_commands(state_dir: Callable[[], Path]) -> typer.Typer:
    """`state_dir` says where the local cluster writes its addresses."""
    app = typer.Typer(
        no_args_is_help=True, help="Load, unload, scale and list the models of a running cluster."
    )

    @contextlib.contextmanager
    def connected(base_url: str | None, key_file: Path | None) -> Iterator[ModelClient]:
        with open_gateway(state_dir, base_url, key_file, needs_key=False) as client:
            yield ModelClient(client)

    def load(
        settings: dict[str, Any],
        *,
        model: Model,
        served_model_name: Annotated[
            str | None, typer.Option(help="Model name that clients send; default: the model's own.")
        ] = None,
        replicas: Replicas = None,
        min_replicas: MinReplicas = None,
        max_replicas: MaxReplicas = None,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Load another model; returns when the cluster takes requests for it.

        Without numbers it has one engine, or the cluster's --min-replicas and --max-replicas.

        Other flags are the model's own; files and folders are those of the cluster's machine.
        """
        asked: dict[str, Any] = {"model": _absolute(model), "served_model_name": served_model_name}
        asked |= _bounds(replicas, min_replicas, max_replicas)
        asked |= {"settings": _plain(settings) or None}
        with (
            connected(base_url, admin_key_file) as client,
            ProgressBars(Console(stderr=True)) as bars,
        ):
            name = client.load(
                {field: value for field, value in asked.items() if value is not None}
            )["id"]
            card = wait_loaded(client, name, bars.report)
        print(json.dumps(card, indent=2) if as_json else f"{printable(name)} is served")

    app.command()(with_own_flags(load, OF_A_MODEL))

    @app.command()
    def scale(
        name: Name,
        *,
        replicas: Replicas = None,
        min_replicas: MinReplicas = None,
        max_replicas: MaxReplicas = None,
        as_json: AsJson = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Change the number of engines of a model; returns at once, and `list` shows the
        progress."""
        bounds = _bounds(replicas, min_replicas, max_replicas)
        if not bounds:
            raise ModelError("give --replicas, --min-replicas or --max-replicas")
        with connected(base_url, admin_key_file) as client:
            card = client.scale(name, bounds)
        print(json.dumps(card, indent=2) if as_json else _scaled(card))

    @app.command()
    def unload(
        name: Name, *, base_url: BaseUrl = None, admin_key_file: AdminKeyFile = None
    ) -> None:
        """Unload a model: refuse new requests, let running ones end, stop its processes; then
        return."""
        with connected(base_url, admin_key_file) as client:
            client.unload(name)
            while client.find(name) is not None:
                time.sleep(POLL_SECONDS)
        print(f"{printable(name)} is unloaded")

    @app.command()
    def sleep(name: Name, *, base_url: BaseUrl = None, admin_key_file: AdminKeyFile = None) -> None:
        """Put a model to sleep until it is asked for, where models take turns (--resident); then
        return."""
        with connected(base_url, admin_key_file) as client:
            client.turn(name, "sleep")
            wait_turned(client, name, "asleep")
        print(f"{printable(name)} sleeps")

    @app.command()
    def wake(name: Name, *, base_url: BaseUrl = None, admin_key_file: AdminKeyFile = None) -> None:
        """Wake a model in its turn, before it is asked for; then return."""
        with connected(base_url, admin_key_file) as client:
            client.turn(name, "wake")
            wait_turned(client, name, "awake")
        print(f"{printable(name)} is awake")

    @app.command()
    def pin(
        name: Name,
        *,
        off: Annotated[bool, typer.Option("--off", help="Let it take turns again.")] = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Keep a model awake until the cluster ends, or let it take turns again."""
        with connected(base_url, admin_key_file) as client:
            client.turn(name, "unpin" if off else "pin")
        print(f"{printable(name)} {'takes turns again' if off else 'stays awake'}")

    @app.command()
    def reload(
        name: Name,
        folder: Model,
        *,
        end_requests: Annotated[
            bool,
            typer.Option(
                "--end-requests",
                help="End requests that run or wait; default: they go on from their tokens.",
            ),
        ] = False,
        base_url: BaseUrl = None,
        admin_key_file: AdminKeyFile = None,
    ) -> None:
        """Put another model's weights in the place of a served one's, without a restart; returns
        when all of its engines compute with them."""
        with (
            connected(base_url, admin_key_file) as client,
            ProgressBars(Console(stderr=True)) as bars,
        ):
            how = "end" if end_requests else "pause"
            client.replace_weights(name, _absolute(folder), how)
            revision = wait_replaced(client, name, bars.report)
        print(f"{printable(name)} has the weights {printable(revision)}")

    @app.command("list")
    def list_all(
        *, as_json: AsJson = False, base_url: BaseUrl = None, admin_key_file: AdminKeyFile = None
    ) -> None:
        """List the models of the cluster and their state."""
        with connected(base_url, admin_key_file) as client:
            show_as(models := client.all(), lambda: models_table(models), as_json)

    add_adapter_commands(app, state_dir)
    return app


def _bounds(fixed: int | None, least: int | None, most: int | None) -> dict[str, int]:
    """Replica bounds from the options that were given. Raises `ModelError`, `SettingError`."""
    if fixed is not None:
        if least is not None or most is not None:
            raise ModelError("--replicas goes without --min-replicas and --max-replicas")
        require(
            fixed >= 1,
            "replicas",
            fixed,
            "at least 1; --min-replicas 0 lets engines come and go by demand",
        )
        least = most = fixed
    given = {"min_replicas": least, "max_replicas": most}
    return {name: value for name, value in given.items() if value is not None}


PLACES = ("draft_model", "generation_config")
"""Settings that are a name, or a path where there is such a file."""


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them; paths are absolute, as that of the model."""
    plain = dict(settings)
    for name, value in settings.items():
        if isinstance(value, Path):
            plain[name] = str(value.expanduser().absolute())
        elif name in PLACES:
            plain[name] = _absolute(value)
        elif name == "lora_modules":
            pairs = [each.partition("=") for each in value]
            plain[name] = [f"{adapter}={_absolute(folder)}" for adapter, _, folder in pairs]
    return plain


def _scaled(card: Mapping[str, Any]) -> str:
    """A sentence with the number of engines that a model has, and will have."""
    return (
        f"{printable(card['id'])} has {card['replicas']} of {_range(card)} engines; "
        "`headwater models list` shows the progress"
    )


def _range(card: Mapping[str, Any]) -> str:
    least = card["min_replicas"]
    most = card["max_replicas"]
    return str(most) if least == most else f"{least} to {most}"


def _absolute(model: str) -> str:
    """A path means the same to the cluster, which runs in another folder."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def models_table(models: list[dict[str, Any]]) -> Table:
    take_turns = any("turn" in each for each in models)
    turns = ("turn", "GB", "unused") if take_turns else ()
    table = plain_table(
        *("model", "state", "replicas", "of", *turns, "problem"), numbers=("replicas", *turns[1:])
    )
    for each in models:
        table.add_row(
            shown(each["id"]),
            each["state"],
            str(each["replicas"]),
            _range(each),
            *(_turn_cells(each) if take_turns else ()),
            shown(each["problem"] or ""),
        )
    return table


def _turn_cells(card: dict[str, Any]) -> tuple[str, str, str]:
    """Cells of a model in turns: its state, its bytes on the device while awake, and its idle
    time."""
    if "turn" not in card:
        return "", "", ""
    state = card["turn"] + (" (pinned)" if card["is_pinned"] else "")
    if card["wait_seconds"]:
        state += f", awake in {card['wait_seconds']:.1f} s"
    unused = "–" if card["unused_seconds"] < 0 else f"{card['unused_seconds']:.0f} s"
    return state, f"{card['num_bytes'] / 1e9:.2f}", unused
