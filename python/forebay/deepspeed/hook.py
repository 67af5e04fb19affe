"""Switches Forebay on for DeepSpeed in a whole environment, by one file in ``site-packages``.

Python runs the lines of ``.pth`` files that begin with ``import`` at every start, unless it was
told not to (``-S``). The file has one such line, with the text of ``site/forebay_trigger.py`` in
it, so that nothing has to be found to run it, and nothing is left that fails once Forebay is
uninstalled. It is written whole or not at all, and it is all that enabling changes.
"""

from __future__ import annotations

import contextlib
import os
import site as python_site
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from forebay._facts import in_unicode, installed_version
from forebay.bench.output import complain, discard, say, say_object
from forebay.bench.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FILE_NAME", "PATH_FOLDER", "Status", "disable", "enable", "run", "status"]

FILE_NAME = "forebay_deepspeed.pth"
PATH_FOLDER = Path(__file__).parent / "site"
"""The folder that ``python -m forebay.deepspeed`` puts on ``PYTHONPATH``."""

_PROBE = """
import sys
print(any(getattr(finder, "__name__", "") == "ForebayTrigger" for finder in sys.meta_path))
"""
_PROBE_SECONDS_MAX = 60


class Status(TypedDict):
    """How an environment stands."""

    enabled: bool
    """Whether there is a file that switches it on."""
    files: list[str]
    """Those files."""
    current: bool
    """Whether they are as this version of Forebay writes them."""
    works: bool
    """Whether a Python started now waits for DeepSpeed."""
    python: str
    environment: str
    forebay: str | None
    deepspeed: str | None
    """The version that is installed, if it is."""


def enable(site: Path | None = None) -> Path:
    """Switch it on, and return the file that does it. Doing it twice is doing it once.

    Parameters
    ----------
    site : Path, optional
        Which ``site-packages``; by default, that of the Python that runs.

    Raises
    ------
    OSError
        The file can't be written there.
    """
    path = _folder(site) / FILE_NAME
    text = _text()
    with contextlib.suppress(OSError):
        if path.read_text(encoding="utf-8") == text:
            return path
    descriptor, temporary = tempfile.mkstemp(prefix=f".{FILE_NAME}.", dir=path.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def disable(site: Path | None = None) -> list[Path]:
    """Switch it off, and return the files that were removed; none if it was off.

    Parameters
    ----------
    site : Path, optional
        Which ``site-packages``; by default, all that the Python that runs looks into.

    Raises
    ------
    OSError
        A file can't be removed.
    """
    removed = []
    for path in _files() if site is None else [_folder(site) / FILE_NAME]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed.append(path)
    return removed


def status(site: Path | None = None) -> Status:
    """Return how the environment stands; imports neither DeepSpeed nor torch.

    Parameters
    ----------
    site : Path, optional
        Which ``site-packages``; by default, all that the Python that runs looks into.
    """
    files = _files() if site is None else [_folder(site) / FILE_NAME]
    found = [path for path in files if os.path.exists(path)]
    return {
        "enabled": bool(found),
        "files": [in_unicode(path) for path in found],
        "current": all(_is_current(path) for path in found),
        "works": _works(),
        "python": in_unicode(sys.executable),
        "environment": in_unicode(sys.prefix),
        "forebay": installed_version("forebay"),
        "deepspeed": installed_version("deepspeed"),
    }


def run(action: str, *, json: bool = False, site: Path | None = None) -> int:
    """Carry out ``enable``, ``disable`` or ``status``, print what came of it, and say how it went.

    Returns
    -------
    int
        0 all well; 1 it is switched on, but can't work (no DeepSpeed, a file of another version,
        or a Python that doesn't run it); 3 the environment can't be changed.
    """
    actions = {"enable": enable, "disable": disable, "status": None}
    if action not in actions:
        raise ValueError(f"action is {action!r}, it can be enable, disable or status")
    try:
        return _carry_out(actions[action], json, site)
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        discard(sys.stdout)
        return 0
    except Problem as problem:
        complain(f"forebay deepspeed: {problem}")
        return problem.code


def _carry_out(
    change: Callable[[Path | None], object] | None, json: bool, site: Path | None
) -> int:
    try:
        if change is not None:
            change(site)
    except OSError as error:
        message = (
            f"{error.filename or site}: {error.strerror}; run it as the owner of the environment, "
            "or in a virtual environment of yours (python3 -m venv)"
        )
        complain(message)
        if json:
            say_object("error", {"message": message, "exit": 3})
        return 3
    state = status(site)
    if json:
        say_object("deepspeed", {**state})
    else:
        say("\n".join(_lines(state)))
    return 1 if state["enabled"] and _problems(state) else 0


def _lines(state: Status) -> list[str]:
    switched = "on" if state["enabled"] else "off"
    lines = [
        f"DeepSpeed on Forebay is {switched} in {state['environment']}",
        *(f"  by        {path}" for path in state["files"]),
        f"  python    {state['python']}",
        f"  forebay   {state['forebay'] or 'not installed'}",
        f"  deepspeed {state['deepspeed'] or 'not installed'}",
    ]
    problems = _problems(state) if state["enabled"] else []
    return [*lines, *(f"problem: {problem}" for problem in problems)]


def _problems(state: Status) -> list[str]:
    problems = []
    if state["deepspeed"] is None:
        problems.append("DeepSpeed isn't installed here: pip install deepspeed")
    if not state["current"]:
        problems.append("the file is of another version of Forebay: forebay deepspeed enable")
    if not state["works"]:
        problems.append("a new Python doesn't run the file: is it in this Python's site-packages?")
    return problems


def _folder(site: Path | None) -> Path:
    return Path(sysconfig.get_path("purelib")) if site is None else Path(site)


def _files() -> list[Path]:
    """Return where the file can be: in every folder whose ``.pth`` files this Python runs."""
    folders = [str(_folder(None)), *python_site.getsitepackages()]
    if python_site.ENABLE_USER_SITE:
        folders.append(python_site.getusersitepackages())
    return [Path(folder) / FILE_NAME for folder in dict.fromkeys(map(os.path.realpath, folders))]


def _is_current(path: Path) -> bool:
    """Return whether a file is as this version writes it; what can't be read isn't."""
    try:
        return path.read_bytes() == _text().encode()
    except OSError:
        return False


def _text() -> str:
    trigger = (PATH_FOLDER / "forebay_trigger.py").read_text(encoding="utf-8")
    return f"import sys; exec({trigger!r}, {{'__name__': 'forebay_trigger'}})\n"


def _works() -> bool:
    """Return whether a new Python, started as most are, waits for DeepSpeed."""
    try:
        probe = subprocess.run(  # noqa: S603 (this Python)
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS_MAX,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return probe.stdout.strip() == "True"
