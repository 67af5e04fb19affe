"""On what a comparison ran: what ``forebay report`` finds of the GPUs, the drive and the system."""

from __future__ import annotations

import json
import subprocess
import sys

__all__ = ["describe"]

_SECONDS_MAX = 60
_KINDS = ("gpu.", "directory.drive", "directory.file_system", "system.kernel", "python.torch")


def describe(directory: str) -> list[dict[str, str]]:
    """Return titles and details; none where the report doesn't come."""
    try:
        # A process of its own: the report has exit codes of its own too.
        said = subprocess.run(
            [sys.executable, "-m", "forebay", "report", "--json", directory],
            capture_output=True,
            text=True,
            timeout=_SECONDS_MAX,
            check=False,
        )
        sections = json.loads(said.stdout)["sections"]
        return [
            {"title": finding["title"], "detail": finding["detail"]}
            for section in sections
            for finding in section["findings"]
            if finding["id"].startswith(_KINDS)
        ]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):
        return []
