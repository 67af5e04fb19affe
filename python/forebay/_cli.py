"""The ``forebay`` command of the Python package.

The command is defined, and most of it done, in Rust; this module is what that finds of Python: the
facts for its report, and the subcommands that are written in Python, each called with its options
as parsed there.

Exit codes: 0 all well; 1 something failed on the way; 2 the arguments can't be used; 3 the
directory or the machine can't take it; 130 interrupted, 143 terminated, 129 hung up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from forebay import _forebay
from forebay.errors import (
    ForebayError,
    InvalidInputError,
    OutOfMemoryError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with _interrupts(signal.SIG_DFL):
            return _forebay.run_command(["forebay", *given], _Python())
    except KeyboardInterrupt:
        return 130


class _Python:
    """What the command asks of Python."""

    @staticmethod
    def facts() -> str:
        """Return what is installed, as JSON."""
        from forebay._facts import gather

        return json.dumps(gather())

    @staticmethod
    def call(subcommand: str, options: str) -> int:
        """Carry out a subcommand with its options as JSON; return its exit code."""
        with _interrupts(signal.default_int_handler):
            try:
                return _SUBCOMMANDS[subcommand](json.loads(options))
            except KeyboardInterrupt:
                return 130

    @staticmethod
    def ask(question: str, options: str) -> str:
        """Answer a question with its options as JSON, by JSON: what it `found`, or a `failure`."""
        with _interrupts(signal.default_int_handler):
            try:
                return json.dumps({"found": _QUESTIONS[question](json.loads(options))})
            except ModuleNotFoundError as error:
                text = f"{error.name} is not installed, and a file of torch's takes it"
                return _failure(f"{text}: pip install {error.name}", 3)
            except (ForebayError, OSError) as error:
                return _failure(str(error), _exit_of(error))
            except KeyboardInterrupt:
                return _failure("interrupted", 130)

    @staticmethod
    def command() -> list[str]:
        """Return the program, and arguments, that start this command again."""
        return [sys.executable, "-m", "forebay"]


@contextlib.contextmanager
def _interrupts(handler: Any) -> Iterator[None]:
    """Have Ctrl-C do what `handler` says: end the process while Rust works, raise in Python."""
    ours = (signal.SIG_DFL, signal.default_int_handler)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) not in ours:
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _quickstart(options: dict[str, Any]) -> int:
    from forebay.quickstart import run

    given = (options[name] for name in ("files", "dir", "size", "repeats"))
    return _ending_well(lambda: run(*given, json=options["json"]))


def _bench(options: dict[str, Any]) -> int:
    from forebay.bench.main import run

    return _ending_well(lambda: run(options))


def _ending_well(work: Callable[[], int]) -> int:
    """Clean up behind work that a signal ends, and take a reader that goes away in silence."""
    from forebay.bench.output import discard
    from forebay.bench.scratch import Ended, ending

    try:
        with ending():
            return work()
    except Ended as ended:
        return ended.code
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        discard(sys.stdout)
        return 0


def _deepspeed(options: dict[str, Any]) -> int:
    from forebay.deepspeed import hook

    return hook.run(options["action"], json=options["json"])


def _exit_of(error: ForebayError | OSError) -> int:
    """Return the exit code: what was asked for can't be, there's no room, or it went wrong."""
    if isinstance(error, (InvalidInputError, UnsupportedError)):
        return 2
    no_room = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}
    return 3 if isinstance(error, OutOfMemoryError) or error.errno in no_room else 1


def _failure(message: str, code: int) -> str:
    return json.dumps({"failure": {"message": message, "exit": code}})


def _describe_state(options: dict[str, Any]) -> Any:
    from forebay.torch import _state_file

    return _state_file.describe(options.pop("path"), **options)


def _create_state(options: dict[str, Any]) -> Any:
    from forebay.torch import _state_file

    return _state_file.create(**options)


_QUESTIONS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "torch.create": _create_state,
    "torch.describe": _describe_state,
}

_SUBCOMMANDS: dict[str, Callable[[dict[str, Any]], int]] = {
    "bench": _bench,
    "deepspeed": _deepspeed,
    "quickstart": _quickstart,
}
