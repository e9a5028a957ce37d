"""The command `rn`: every failure becomes one sentence and an exit code.

The commands themselves are in the modules beside this one, by who needs them.
"""

import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

import click

# Importing them is what registers their commands.
from reclaimnet.apps import (  # noqa: F401
    cli_backup,
    cli_borrow,
    cli_chain,
    cli_guard,
    cli_jobs,
    cli_kube,
    cli_lab,
    cli_operator,
    cli_owner,
    cli_person,
    cli_watch,
)
from reclaimnet.apps.cli_base import cli, complain, sentence
from reclaimnet.errors import ReclaimNetError

SIGNALLED: Final = 128
"""And the signal's number: how shells tell of a command that a signal has ended."""
EXIT_INTERRUPTED: Final = SIGNALLED + signal.SIGINT
EXIT_BUG: Final = 70
EXIT_IO: Final = 74


def main() -> NoReturn:
    """The entry point: every failure becomes one sentence and an exit code."""
    told: list[int] = []

    def end_as_by_hand(number: int, _frame: FrameType | None) -> NoReturn:
        """Whoever ends us or closes the terminal leaves as little behind as Ctrl-C does."""
        told.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # Not under nohup.
            signal.signal(number, end_as_by_hand)
    try:
        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:  # Once more, while we were on our way out.
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        _leave(SIGNALLED + told[0] if told else code)
    sys.exit(code)


def _leave(code: int) -> NoReturn:
    """At once: all is cleared up, and who cannot wait would stop the interpreter in the middle of
    its own end, which looks as if we had been killed."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def run_command(arguments: list[str]) -> int:
    try:
        result = cli.main(args=arguments, prog_name="rn", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        # Whoever says nothing gets the help, which is more than a sentence.
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "rn"
        complain(f"{sentence(error.format_message())} (see `{command} --help`)")
        return error.exit_code
    except click.ClickException as error:
        complain(sentence(error.format_message()))
        return error.exit_code
    except ReclaimNetError as error:
        complain(sentence(str(error)))
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has left (`rn ps | head`); nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        advice = ""
        if isinstance(error, PermissionError) and where:
            advice = "; do it as whoever owns that (or with sudo), or name another place"
        complain(f"{where}{error.strerror or error}{advice}.")
        return EXIT_IO
    except Exception as error:
        # A person gets a sentence, whatever we did wrong.
        if os.environ.get("RN_DEBUG"):
            raise
        complain(
            f"this is a fault of rn itself ({type(error).__name__}: {error}); "
            "run it again with RN_DEBUG=1 and report what it prints."
        )
        return EXIT_BUG


if __name__ == "__main__":
    main()
