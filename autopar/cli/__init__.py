"""The commands. Exit status 0: done; 2: a user's error, in one message; 3: no plan fits; 130: interrupted."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from autopar.cli import planning, training
from autopar.cli.arguments import Parser
from autopar.errors import AutoparError, NoPlanFits
from autopar.version import __version__

USER_ERROR, NOTHING_FITS, INTERRUPTED = 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    try:
        options = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], None] = options.command
        command(options)
        sys.stdout.flush()
    except NoPlanFits as error:
        return _fail(error, NOTHING_FITS)
    except AutoparError as error:
        return _fail(error, USER_ERROR)
    except KeyboardInterrupt:
        print("autopar: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()  # the reader went away (`autopar plan ... | head`)
    except OSError as error:
        _drop_stdout()
        print(f"autopar: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        return USER_ERROR
    return 0


def _drop_stdout() -> None:
    """Leave nothing for the interpreter to flush at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: AutoparError, status: int) -> int:
    print(f"autopar: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="autopar", description="Turns a PyTorch model and a GPU cluster into a training plan that is proven best."
    )
    parser.add_argument("--version", action="version", version=f"autopar {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (run, arguments, text, examples) in (planning.COMMANDS | training.COMMANDS).items():
        command = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog="examples:\n" + "\n".join(f"  {example}" for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        arguments(command)
        command.set_defaults(command=run)
    return parser
