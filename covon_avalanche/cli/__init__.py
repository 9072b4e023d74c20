"""The ``covon`` command. Starting it does not import torch."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import traceback
import warnings
from io import TextIOWrapper
from pathlib import Path
from tempfile import NamedTemporaryFile, mkdtemp
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from covon_avalanche import __version__
from covon_avalanche.cli import compare, data, env, predict, report, run, search, show
from covon_avalanche.cli.examples import epilog, one_line_paragraphs
from covon_avalanche.cli.options import INTERRUPTED, fail
from covon_avalanche.experiment.recipe import RecipeError
from covon_avalanche.experiment.result import ResultError
from covon_avalanche.experiment.run_errors import error_sentence, shorten_warnings


class _Commands(TyperGroup):
    """Commands that report errors in one sentence, and write unexpected ones to a log."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (RecipeError, ResultError) as error:
            fail(str(error))
        except BrokenPipeError:  # the reader of the output, such as head, has exited
            raise  # typer ends the command
        except OSError as error:
            path = error.filename2 or error.filename or "a file"
            fail(f"cannot read or write {path}: {error.strerror or error}")
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
            fail("interrupted", INTERRUPTED)

    def main(self, *arguments: Any, **options: Any) -> Any:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names of files and classes
        os.environ["MPLBACKEND"] = "agg"  # figures are files; a notebook's backend may not exist
        home, known = map(os.path.expanduser, ("~", "~/.avalanche/config.json"))
        if not (os.access(home, os.W_OK) or os.access(known, os.R_OK)):
            if Path(home, ".cache").is_dir():  # with weights
                os.environ.setdefault("XDG_CACHE_HOME", f"{home}/.cache")
            # Avalanche writes to it when imported
            os.environ["HOME"] = folder = mkdtemp(prefix="covon-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        try:
            with warnings.catch_warnings():
                shorten_warnings()
                return super().main(*arguments, **options)
        except Exception as error:
            with NamedTemporaryFile("w", prefix="covon-", suffix=".log", delete=False) as log:
                traceback.print_exc(file=log)
            typer.echo(f"covon: {error_sentence(error)[:1000]}; see {log.name}", err=True)
            sys.exit(1)


app = typer.Typer(
    cls=_Commands,
    help="Compare continual-learning strategies on domain-incremental streams.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    run.run,
    search.search,
    report.report,
    compare.compare,
    predict.predict,
    show.recipes,
    show.strategies,
    show.show,
    show.status,
    env.env,
):
    app.command()(command)
app.add_typer(data.app, name="data")
for prefix, commands in (("", app), ("data ", data.app)):
    for info in commands.registered_commands:
        assert info.callback is not None
        info.help = one_line_paragraphs(info.callback.__doc__ or "")
        info.epilog = epilog(prefix + (info.name or info.callback.__name__))


def _print_version(version: bool) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    pass
