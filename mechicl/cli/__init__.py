"""The shell: thin commands over the Python calls of the same names.

Commands import what they need when they run, so that `mechicl --help` is quick and nothing that
works without torch waits for it.
"""

import os
import signal
import sys
from io import TextIOWrapper
from typing import Any, NoReturn

import typer
import typer.core

from mechicl.cli import (
    analyze,
    export,
    hooks,
    import_,
    info,
    lists,
    report,
    reproduce,
    study,
    sweep,
    train,
    verify,
)
from mechicl.errors import MechiclError


class _Shell(typer.core.TyperGroup):
    """Turns what a command returns or raises into an exit code.

    0 done, 1 a fault, 2 the user's mistake, 3 nothing to analyse, 4 partly done, 130 and 143
    interrupted.
    """

    def invoke(self, ctx: Any) -> NoReturn:
        try:
            code = super().invoke(ctx) or 0
            if sys.stdout is not None:
                sys.stdout.flush()
        except MechiclError as error:
            _say(f"mechicl: {error}")
            code = error.exit_code
        except KeyboardInterrupt:
            _say("mechicl: interrupted")
            code = 128 + signal.SIGINT
        except BrokenPipeError:
            # Whoever read the output has enough; nothing more can be said to them.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = 128 + signal.SIGPIPE
        except OSError as error:
            _say(
                f"mechicl: {error.strerror or error}{f': {error.filename}' * bool(error.filename)}"
            )
            code = 1
        raise typer.Exit(code)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


app = typer.Typer(
    name="mechicl",
    cls=_Shell,
    help="Mechanistic interpretability of in-context learning, over whole training trajectories.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train.train)
app.command()(sweep.sweep)
app.command()(study.study)
app.command()(analyze.analyze)
app.command()(info.info)
app.command()(hooks.hooks)
app.command()(export.export)
app.command("import")(import_.import_)
app.command()(verify.verify)
app.command()(report.report)
app.command()(reproduce.reproduce)
app.command()(lists.recipes)
app.command()(lists.probes)
app.command()(lists.mappings)


def _terminate(number: int, frame: object) -> NoReturn:
    del frame
    sys.exit(128 + number)  # unwinds, so that a run being written is committed


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # σ on a terminal that has none is no error
    signal.signal(signal.SIGTERM, _terminate)
    app()
