"""The command line; one module a command, or a group of commands.

Commands import what they need when they run, so that help and chat start without torch.
"""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tandem import __version__
from tandem.cli import adapters, batch, bench, feedback, finetune
from tandem.cli.fidelity import fidelity_command
from tandem.cli.flags import settings_from, takes_settings
from tandem.cli.output import refusals, with_folder
from tandem.cli.plan_flags import plan_command
from tandem.cli.remote import DEFAULT_URL, Key, Url
from tandem.cli.simulate_flags import simulate_command

app = typer.Typer(
    help="Serve a language model and keep teaching it on the same accelerator.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench.app, name="bench")
app.add_typer(adapters.app, name="adapters")
app.add_typer(feedback.app, name="feedback")
app.add_typer(finetune.app, name="finetune")
app.add_typer(batch.app, name="batch")


_SERVE_EXAMPLES = """\
Examples:

tandem serve demo --port 8001 --store-directory ./state

tandem serve ./my-model --adapter formal=./formal --kv-memory 4GiB

tandem serve demo --host 0.0.0.0 --api-key-file keys.toml --ttft-slo 0.5 --tpot-slo 0.05

A setting may also stand in a file (--config) or a variable (TANDEM_SERVER_PORT): docs/settings.md
"""


def main() -> None:
    """Entry point of the `tandem` script."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tandem {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


@app.command("serve", epilog=_SERVE_EXAMPLES)
@takes_settings
def serve_command(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings (docs/settings.md lists them)")
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the server's page in a browser once it is ready")
    ] = False,
    **flags: Any,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    from tandem.cli.serve import serve_forever

    console = Console(stderr=True)
    with refusals():
        settings = settings_from(flags, os.environ, config)
        code = serve_forever(settings, console, webbrowser.open if open_page else None)
    raise typer.Exit(code)


@app.command("chat")
def chat_command(
    url: Url = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Model id; empty: the server's first")] = "",
    adapter: Annotated[str, typer.Option(help="Adapter that learns from /good, /bad, ...")] = "",
    api_key: Key = "",
    system: Annotated[str, typer.Option(help="System prompt")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer in tokens")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest")] = None,
) -> None:
    """Talk to a model of any OpenAI-compatible server in the terminal, and teach it."""
    from tandem.cli.chat import ChatServer
    from tandem.cli.conversation import converse

    options = {"max_tokens": max_tokens, "temperature": temperature}
    with ChatServer(url, api_key, model, options) as server:
        raise typer.Exit(converse(server, Console(), system, adapter))


@app.command("profile")
@takes_settings
def profile_command(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with settings (docs/settings.md lists them)")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to measure")] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write; default: by the model", callback=with_folder),
    ] = None,
    tune: Annotated[
        Path | None,
        typer.Option(
            help="Lengths of answers, or a trace: search alpha, gather (b) and batch (C) of rt_lm"
            " for them, in simulation; with --profile FILE for that one, and nothing is measured"
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Measure a model on this machine: what its passes, layers and updates take."""
    from tandem.cli.profile import profile_model

    console = Console(stderr=True)
    with refusals():
        profile_model(settings_from(flags, os.environ, config), seconds, out, console, tune)


app.command("simulate")(simulate_command)
app.command("plan")(plan_command)
bench.app.command("fidelity")(fidelity_command)


@app.command("doctor")
def doctor_command() -> None:
    """Check what serving needs and say what to do about what is missing."""
    from tandem.cli.doctor import examine, report

    findings = examine()
    raise typer.Exit(report(findings, Console()))
