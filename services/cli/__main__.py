"""The command `headwater`: flags to settings, errors to one line. Does nothing itself."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, cast

import httpx
import structlog
import typer
from rich.console import Console
from rich.markup import escape

from ..engine.programs.pack_kernels import app as kernel_commands
from ..models import store as model_store
from ..models.demo_model import DEMO_NAME
from ..models.hugging_face import HubError
from ..models.judging import ModelNotServed
from ..models.manifest import ModelFolderError, ModelManifest
from ..models.store import (
    CalibrationFailed,
    ConversionFailed,
    ModelNotFound,
    OtherModelCode,
    OtherQuantization,
)
from ..models.wheel_model import WheelModelError
from ..runtime.best_effort_file import BestEffortFile
from ..runtime.printable import LAYOUT, printable
from ..runtime.progress import ProgressBars
from ..runtime.settings import SettingError, require
from ..stack.cluster_record import pid_of_stage, read_cluster
from ..stack.embedded import EmbeddedServerError
from ..stack.flags import check_device, check_words, default_state_dir
from ..stack.plan import gpu_defaults, gpu_flags
from ..stack.settings import StackSettings
from ..stack.stack_error import StackError
from ..stack.stage_process import StageDied
from ..stack.token_file import key_of_cluster, key_of_environment
from . import chat as chat_room
from . import doctor as examination
from .access_command import access
from .admin_client import AdminError, AsJson
from .agents import AGENTS, ANY_KEY, Target
from .answer_stream import ChatError
from .base_url import api_of, gateway_of
from .batch_lines import BatchFileError
from .cluster_unreachable import BusUnreachable, NoStageHeard
from .flag_errors import Commands
from .flags import default_of, option_of, with_flags
from .model_commands import ModelError
from .model_commands import make_commands as make_model_commands
from .plain_table import show_as
from .platform_commands import app as platform_commands
from .role_command import make_command as make_role_command
from .run_command import NOT_ALONE, RunOptions, run_file
from .tenant_commands import make_commands
from .up import INTERRUPTED
from .up import up as run_line

KNOWN_ERRORS: tuple[type[Exception], ...] = (
    *(
        SettingError,
        ModelNotFound,
        ModelFolderError,
        OtherQuantization,
        OtherModelCode,
        ConversionFailed,
        ModelNotServed,
        HubError,
        WheelModelError,
    ),
    *(
        CalibrationFailed,
        StackError,
        StageDied,
        EmbeddedServerError,
        BusUnreachable,
        NoStageHeard,
        ChatError,
        BatchFileError,
    ),
    *(AdminError, ModelError, httpx.HTTPError, OSError),
)
"""Errors that a person can do something about, those of files among them; any other is a bug and
shows its trace."""

STAGES = {
    "gateway": ("headwater.gateway", "Gateway: REST and public gRPC for clients, routing."),
    "processor": (
        "headwater.services.processor",
        "Processor: turns text into tokens, checks parameters, hashes blocks.",
    ),
    "output-processor": (
        "headwater.services.output_processor",
        "Output processor: turns tokens into text, with stop strings and log probabilities.",
    ),
    "engine": ("headwater.services.engine", "Engine: one replica of a model."),
    "stage": (
        "headwater.services.engine.programs.stage_host",
        "A pipeline stage of an engine on another host.",
    ),
}
PASS_ON: Mapping[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

console = Console(stderr=True)
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Serve large language models. Each request goes to the replica that answers it soonest.",
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"headwater {version('headwater')}")
        raise typer.Exit


@app.callback()
def _of_all_commands(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None: ...


serve = typer.Typer(
    no_args_is_help=True, help="Run one stage in the foreground; its own --help lists its flags."
)
app.add_typer(serve, name="serve")


StateDir = Annotated[Path, option_of("state_dir")]
app.add_typer(make_commands(default_state_dir), name="tenant")
app.add_typer(make_model_commands(default_state_dir), name="models")
app.add_typer(platform_commands, name="platform")
app.add_typer(kernel_commands, name="kernels")
CacheDir = Annotated[Path, option_of("cache_dir")]
Port = Annotated[int, option_of("port")]
GrpcPort = Annotated[int, option_of("grpc_port")]
DEFAULT_PORT = default_of("port")
DEFAULT_GRPC_PORT = default_of("grpc_port")
Model = Annotated[
    str,
    typer.Option(
        envvar="HEADWATER_MODEL", help="Demo model, Hugging Face id, model folder or .gguf file."
    ),
]
Revision = Annotated[str | None, option_of("revision")]
Dtype = Annotated[str, option_of("dtype")]
Quantization = Annotated[str, option_of("quantization")]
ModelCode = Annotated[str, option_of("model_code")]
CalibrationFile = Annotated[Path | None, option_of("calibration")]
Device = Annotated[str, option_of("device")]
KvCacheDtype = Annotated[str, option_of("kv_cache_dtype")]
MaxModelLen = Annotated[int | None, option_of("max_model_len")]


@app.command()
@with_flags
def up(settings: StackSettings) -> None:
    """Run the whole deployment on this machine until Ctrl-C.

    Starts NATS, Valkey (Redis) and all stages, and restarts those that die.

    Other settings of a stage are environment variables: see `serve engine --help`.

    headwater up --model Qwen/Qwen3-8B --max-model-len 32768

    headwater up --model CHAT --model EMBEDDER=BAAI/bge-m3 --port 9000

    headwater up --host 0.0.0.0 --admin-key-file keys --tls-cert-file tls.crt --tls-key-file tls.key
    """
    # Rich ends the program where the reader of a pipe is gone; a cluster goes on.
    terminal = Console(file=cast(TextIO, BestEffortFile(sys.stdout)))
    raise typer.Exit(run_line(settings.resolved(), terminal))


@app.command()
def chat(
    *,
    base_url: Annotated[
        str | None,
        typer.Option(
            envvar="HEADWATER_BASE_URL", help="An OpenAI-compatible API; default: the local one."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name; default: the first that the server lists.")
    ] = None,
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; default: the model's.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="HEADWATER_API_KEY", help="API key, if the server needs one.")
    ] = "",
    state_dir: StateDir,
) -> None:
    """Chat with a model in the terminal, with streamed answers and history."""
    line = read_cluster(state_dir)
    url = api_of(base_url or (line.rest if line is not None else "http://127.0.0.1:8000"))
    options = {"temperature": temperature, "max_tokens": max_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=httpx.Timeout(10, read=300)) as client:
        name = model or chat_room.first_model(client)
        chat_room.converse(chat_room.Chat(client, name, system=system, options=options), Console())


def run(
    settings: StackSettings,
    *,
    file: Annotated[Path, typer.Argument(help="Requests, one a line, as OpenAI's batches.")],
    output: Annotated[
        Path | None, typer.Option(help="File of results; default: FILE.results.jsonl.")
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            envvar="HEADWATER_BASE_URL",
            help="Running deployment; default: one is started for this file.",
        ),
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="HEADWATER_API_KEY", help="API key, if --base-url needs one.")
    ] = "",
    concurrency: Annotated[int, typer.Option(help="Requests that are sent at once.")] = 128,
) -> None:
    """Answer a file of requests, and resume where an earlier run ended."""
    options = RunOptions(
        file=file, output=output, base_url=base_url, api_key=api_key, concurrency=concurrency
    )
    raise typer.Exit(run_file(options, settings, console))


app.command()(with_flags(run, without=NOT_ALONE))


@app.command()
def launch(
    *,
    agent: Annotated[str, typer.Argument(help=", ".join(AGENTS))],
    base_url: Annotated[
        str | None,
        typer.Option(envvar="HEADWATER_BASE_URL", help="A gateway; default: the local one."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model name; default: the first that the server lists.")
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="HEADWATER_API_KEY", help="API key, if the server needs one.")
    ] = ANY_KEY,
    state_dir: StateDir,
) -> None:
    """Print the configuration that connects a coding agent to a deployment."""
    require(agent in AGENTS, "agent", agent, ", ".join(AGENTS))
    line = read_cluster(state_dir)
    url = base_url or (line.rest if line is not None else "http://127.0.0.1:8000")
    headers = {"authorization": f"Bearer {api_key}"}
    with httpx.Client(base_url=api_of(url), headers=headers, timeout=10) as client:
        name = model or chat_room.first_model(client)
    print(AGENTS[agent](Target(gateway=gateway_of(url), model=name, key=api_key)), end="")


@app.command()
def pull(
    *,
    model: Annotated[
        str, typer.Argument(help="Demo model, Hugging Face id, model folder or .gguf file.")
    ] = DEMO_NAME,
    revision: Revision = None,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    calibration: CalibrationFile = None,
    model_code: ModelCode = "auto",
    device: Device = "auto",
    link: Annotated[
        Path | None, typer.Option(help="Also point this symbolic link at the folder.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what the model takes, and download no weights."),
    ] = False,
    cache_dir: CacheDir,
) -> None:
    """Download a model, convert it once into the layout that engines read, and print its folder."""
    check_words({"dtype": dtype, "quantization": quantization, "model_code": model_code})
    check_device(device)
    if dry_run:
        _judge(model, cache_dir, revision, dtype, device, model_code)
        return
    choices = {"quantization": quantization, "model_code": model_code}
    folder = _pulled(model, cache_dir, revision, dtype, device, calibration, choices)
    manifest = ModelManifest.read(folder)
    if manifest.rounding:
        console.print(manifest.rounding)
    if manifest.left_out:
        console.print(f"not used of the checkpoint: {manifest.left_out}")
    if link is not None:
        model_store.point(link, folder)
    print(folder)


@app.command()
def warmup(
    context: typer.Context,
    *,
    model: Model = DEMO_NAME,
    revision: Revision = None,
    dtype: Dtype = "auto",
    quantization: Quantization = "auto",
    calibration: CalibrationFile = None,
    model_code: ModelCode = "auto",
    device: Device = "cuda",
    kv_cache_dtype: KvCacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    cache_dir: CacheDir,
) -> None:
    """Compile kernels before an engine's first start: while an image is built, or once on a
    machine.

    On a GPU it compiles the kernels of one model, on a CPU (--device cpu) those of all models.

    Kernels are stored in the cache folder, by their source, the device and the compiler's version.

    Settings that change kernels are read from their environment variables, as by `headwater up`.
    """
    if device == "cpu":
        _check_no_model_flag(context)
        _become("headwater.services.engine.programs.warmup_cpu", [])
    require(device == "cuda", "device", device, "cuda or cpu")
    choices = {"quantization": quantization, "model_code": model_code}
    check_words({"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, **choices})
    folder = _pulled(model, cache_dir, revision, dtype, device, calibration, choices)
    flags = [f"--model-folder={folder}", f"--kv-cache-dtype={kv_cache_dtype}"]
    flags += gpu_flags(os.environ, gpu_defaults(os.environ))
    flags += [f"--max-model-len={max_model_len}"] if max_model_len else []
    _become("headwater.services.engine.programs.warmup", flags)


def _judge(
    model: str, cache_dir: Path, revision: str | None, dtype: str, device: str, model_code: str
) -> None:
    """Prints the memory that a model takes."""
    with ProgressBars(console) as bars:
        found = model_store.judge(
            model,
            cache_dir=cache_dir,
            progress=bars.report,
            revision=revision,
            dtype=dtype,
            device=device,
            model_code=model_code,
        )
    print(found)


def _pulled(
    model: str,
    cache_dir: Path,
    revision: str | None,
    dtype: str,
    device: str,
    calibration: Path | None,
    choices: Mapping[str, str],
) -> Path:
    """The model's folder, with bars of progress on the terminal meanwhile. `choices`: those of what
    is made of its weights."""
    with ProgressBars(console) as bars:
        return model_store.pull(
            model,
            cache_dir=cache_dir,
            progress=bars.report,
            revision=revision,
            dtype=dtype,
            device=device,
            calibration=calibration,
            **choices,
        )


def _check_no_model_flag(context: typer.Context) -> None:
    """Raises `SettingError` for a flag of a model on the command line, where kernels of all models
    are compiled. The variables of these flags are other commands' too, and are ignored."""
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if (
            name not in ("device", "cache_dir")
            and source is not None
            and source.name == "COMMANDLINE"
        ):
            raise SettingError(
                name, value, "not with --device cpu, which compiles the kernels of all models"
            )


@app.command()
def status(
    *,
    nats_url: Annotated[
        str | None,
        typer.Option(
            envvar="HEADWATER_NATS_URL",
            help="NATS server to read; default: that of the local cluster.",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option(help="Keep running and refresh the view.")] = False,
    pid: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Print the process id of one stage that `headwater up` started here.",
        ),
    ] = None,
    as_json: AsJson = False,
    state_dir: StateDir,
) -> None:
    """Show every process of the cluster and the load of the engines."""
    if pid is not None:
        print(pid_of_stage(state_dir, pid))
        return
    # Other commands do not wait for what speaks with NATS.
    from ..runtime.bus import without_password  # noqa: PLC0415
    from . import status as cluster  # noqa: PLC0415

    line = read_cluster(state_dir)
    url = nats_url or (line.nats_url if line is not None else None)
    if url is None:
        raise StackError(
            f"no cluster runs with the state folder {state_dir}; name one, or give --nats-url"
        )
    # The folder has the token of a cluster that has ended, which is of no use for another one.
    key = (
        key_of_cluster(state_dir, os.environ)
        if line is not None
        else key_of_environment(os.environ)
    )
    try:
        rest = line.rest if line is not None else ""
        members = cluster.seen(url, key, Console() if watch else None, rest)
    except BusUnreachable as error:
        # The cluster runs without the store; its gateway knows.
        gateway = asyncio.run(cluster.ask_gateway(line.rest)) if line is not None else ""
        raise BusUnreachable(error.address, gateway) from None
    if not members and not as_json:
        raise NoStageHeard(without_password(url))
    show_as(cluster.as_json(members), lambda: cluster.as_table(members), as_json)


@app.command()
def doctor(
    *,
    as_json: AsJson = False,
    port: Port = DEFAULT_PORT,
    grpc_port: GrpcPort = DEFAULT_GRPC_PORT,
    state_dir: StateDir,
    cache_dir: CacheDir,
) -> None:
    """Find what is missing on this machine, and say how to install it."""
    ports = tuple(each for each in (port, grpc_port) if each)
    findings = examination.examine(cache_dir=cache_dir, state_dir=state_dir, ports=ports)
    rows = [{"what": each.what, "found": each.found, "remedy": each.remedy} for each in findings]
    show_as(rows, lambda: examination.as_table(findings), as_json)
    raise typer.Exit(int(any(each.blocks_up and each.remedy for each in findings)))


@app.command(add_help_option=False, context_settings=dict(PASS_ON))
def bench(context: typer.Context) -> None:
    """Run a benchmark: `headwater bench --help` lists them."""
    _become("headwater.bench", context.args)


# `--help` lists commands in this order, those that a newcomer wants first.
app.command("role")(make_role_command(default_state_dir))
app.command()(access)


def _add_stage(name: str, module: str, summary: str) -> None:
    @serve.command(name, help=summary, add_help_option=False, context_settings=dict(PASS_ON))
    def run(context: typer.Context) -> None:
        _become(module, context.args)


for _name, (_module, _summary) in STAGES.items():
    _add_stage(_name, _module, _summary)


def _become(module: str, args: list[str]) -> NoReturn:
    """Replaces this process by another program, so that rooms stay separate and signals reach the
    program."""
    os.execv(sys.executable, [sys.executable, "-m", module, *args])


def main() -> None:
    # Of stages that this starts or becomes: gRPC's core writes a line for each head that it
    # refuses, and clients decide how many those are.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Our libraries log for stages; a person gets sentences, and traces of bugs in what runs in the
    # background.
    plain = structlog.dev.ConsoleRenderer(
        colors=False, exception_formatter=structlog.dev.plain_traceback
    )
    structlog.configure(
        processors=[plain],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    try:
        app()
    except KNOWN_ERRORS as error:
        console.print(
            f"[red]headwater:[/] {escape(printable(str(error), keep=LAYOUT))}", soft_wrap=True
        )
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
