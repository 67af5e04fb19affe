"""``python -m forebay.deepspeed [options] [-m module | -c code | script.py] [arguments]``.

Runs Python again, in place of this process, with the same options and with a folder on
``PYTHONPATH`` whose ``sitecustomize`` waits for DeepSpeed. So the program runs exactly as without:
``sys.argv``, ``sys.path``, ``__main__``, exit codes, tracebacks and signals are Python's own. The
processes that it starts inherit the variable and wait for DeepSpeed too, whether they come from
``spawn``, ``forkserver``, ``torchrun`` or DeepSpeed's launcher. Nothing outlives them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

from forebay.deepspeed.hook import PATH_FOLDER

_USAGE = """\
usage: python -m forebay.deepspeed [option ...] [-m module | -c code | script.py] [argument ...]

Runs a Python program, and the processes that it starts, with DeepSpeed on Forebay.
Options are Python's own. To switch it on for a whole environment: forebay deepspeed enable
"""


def main(arguments: list[str]) -> int:
    """Become the Python that runs the program; return an exit code if that can't be."""
    if not arguments or arguments[0] in {"-h", "--help"}:
        sys.stdout.write(_USAGE)
        return 0 if arguments else 2
    if sys.flags.ignore_environment or sys.flags.no_site:
        sys.stderr.write(
            "forebay.deepspeed: Python was told to ignore the environment or site-packages (-I, "
            "-E or -S), by which the program would be told of Forebay: leave the option out, or "
            "call forebay.deepspeed.install() in the program\n"
        )
        return 3
    return _become(arguments)


def _become(arguments: list[str]) -> NoReturn:
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PATH_FOLDER), others]))
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
    if getattr(sys.stdout, "write_through", False):
        options.append("-u")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *options, *arguments])  # noqa: S606 (no shell)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
