"""Errors that a user can fix: what happened, why, and the command that fixes it."""

from __future__ import annotations

import difflib
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress

EXIT_LOST_PEERS = 75
"""Exit status of a process that stopped because another rank is missing (EX_TEMPFAIL: running it again resumes)."""

EXIT_CLOSED_OUTPUT = 141
"""Exit status of a command whose output was closed before its end, as a shell reports SIGPIPE."""

_MAX_LENGTH = 2000  # characters of each part of a message


class UserError(Exception):
    """An error the user can fix: shown without a traceback; the program exits with a non-zero status."""

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.fix = map(_shorten, (what, why, fix))

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.fix) if part)

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        # Data loader workers pickle exceptions; the default would drop why and fix.
        return type(self), (self.what, self.why, self.fix)


def _shorten(text: str) -> str:
    """Cut the middle of a long text: a message may quote a damaged file of megabytes."""
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH // 2]} ... {text[-_MAX_LENGTH // 2 :]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none, for use inside a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")


def closest_match(name: str, choices: Iterable[str]) -> str:
    """Return "Did you mean X?" for the choice most similar to a name, or an empty text if none is similar."""
    folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(name.casefold(), list(folded), n=1, cutoff=0.5)
    return f"Did you mean {folded[close[0]]}?" if close else ""


def report_errors(run: Callable[[], int], debug: bool = False) -> int:
    """Call `run` and return its exit status; errors are printed in a few lines, with a traceback only for `debug`."""
    try:
        return run()
    except UserError as error:
        if debug:
            traceback.print_exc()
        print("\n".join(filter(None, (f"muralist: {error.what}", error.why, error.fix))), file=sys.stderr)
        return 1
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return EXIT_CLOSED_OUTPUT  # rich turns a closed output into SystemExit
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            return EXIT_CLOSED_OUTPUT
        if debug:
            traceback.print_exc()
            return 1
        print(f"muralist: {error.strerror or error}: {error.filename or ''}", file=sys.stderr)
        print("`--debug` shows the traceback.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("muralist: interrupted; everything saved before is intact.", file=sys.stderr)
        return 130
    finally:
        _flush_output()


def _output_is_closed() -> bool:
    """Whether the reader of stdout or stderr has exited, as in `| head`; another pipe may break too."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # no stream, or one without a file descriptor
            poll.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _flush_output() -> None:
    """Flush stdout; if nobody reads it any more, drop the rest, which Python would complain about when it exits."""
    try:
        if sys.stdout is not None:  # it is None where the command was started with a closed stdout
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
