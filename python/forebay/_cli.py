"""The ``forebay`` command of the Python package.

Exit codes: 0 all well; 1 something failed on the way; 2 the arguments can't be used; 3 the
directory or the machine can't take it; 130 interrupted, 143 terminated, 129 hung up.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from forebay._arguments import parse_size
from forebay.errors import ForebayError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    from forebay.quickstart import run
    from forebay.quickstart.output import discard
    from forebay.quickstart.scratch import Ended, ending

    try:
        with ending():
            return run(options.files, options.dir, options.size, options.repeats)
    except Ended as ended:
        return ended.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        discard(sys.stdout)
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forebay", description="Moves tensors between NVMe drives and memory."
    )
    with contextlib.suppress(PackageNotFoundError):  # run from a source tree
        parser.add_argument("--version", action="version", version=version("forebay"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    quickstart = commands.add_parser(
        "quickstart",
        help="store and load real tensors, check every byte, and compare with other ways",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong arguments, 3 the directory can't take it.",
    )
    quickstart.add_argument(
        "files",
        metavar="FILE.safetensors",
        nargs="*",
        help="tensors to move; without any, a real model where installed and a made-up GPT-2",
    )
    quickstart.add_argument("--dir", default=".", help="where to store them (default: here)")
    quickstart.add_argument(
        "--size", type=_size, default=1 << 30, help="most bytes without FILE (default: 1G)"
    )
    quickstart.add_argument(
        "--repeats", type=_repeats, default=3, help="runs of each way, of which the median counts"
    )
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ForebayError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)
