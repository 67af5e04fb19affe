"""Prints what came of the tests and of the bench on a GPU, for ``gpu-check.sh``.

``gpu_table.py CODE TESTS.xml BENCH.json``: the exit code of pytest, its report, and what ``forebay
bench --gpu --json`` printed, which isn't there in a dry run. The exit code is that of the check.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from forebay.bench.report import table

__all__ = ["main", "of_bench", "of_tests"]

PASSED, FAILED, MISSED = 0, 1, 4


def main(arguments: list[str]) -> int:
    """Print the table; return the exit code."""
    code, tests, bench = int(arguments[0]), Path(arguments[1]), Path(arguments[2])
    lines, verdict = of_tests(code, tests)
    if bench.exists():
        more, another = of_bench(bench)
        lines += ["", *more]
        verdict = max(verdict, another, key=[PASSED, MISSED, FAILED].index)
    print("\n".join(lines))
    return verdict


def of_tests(code: int, path: Path) -> tuple[list[str], int]:
    """Return what to say of the tests, and an exit code."""
    try:
        cases = list(ET.parse(path).iter("testcase"))
    except (OSError, ET.ParseError):
        return [f"tests: no report; pytest ended with exit code {code}"], FAILED
    skipped: Counter[str] = Counter()
    failed: dict[str, str] = {}
    for case in cases:
        # A test whose tearing down fails as well is told once.
        for found in (*case.iter("failure"), *case.iter("error")):
            failed.setdefault(f"{case.get('classname')}.{case.get('name')}", _message(found))
        skipped.update(_message(found) for found in case.iter("skipped"))
    passed = len(cases) - len(failed) - skipped.total()
    lines = [
        f"tests: {passed} passed, {len(failed)} failed, {skipped.total()} skipped",
        *(f"FAILED: {name}: {message}" for name, message in failed.items()),
        *(f"skipped {count}: {reason}" for reason, count in skipped.items()),
    ]
    if code and not failed:
        lines.append(f"pytest ended with exit code {code}: not all tests have run")
    return lines, FAILED if failed or code or not passed else PASSED


def of_bench(path: Path) -> tuple[list[str], int]:
    """Return what to say of the bench, and an exit code."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        parts = found["files"]
    except (OSError, ValueError, KeyError):
        return ["bench: no figures"], FAILED
    lines = [f"{one['title']}: {one['detail']}" for one in found["hardware"]]
    code = PASSED
    for part in parts:
        payload = part["payload"]
        lines += [
            "",
            f"bench: {payload['tensors']} tensors, {payload['bytes'] / 1e9:.2f} GB, "
            f"{found['rounds']} rounds, {found['file_system']}",
            "",
            table(part),
        ]
        ours = [row for row in part["subjects"] if row["name"].startswith("forebay")]
        if not ours or any(row["failure"] for row in ours):
            return lines, FAILED
        if any(goal["reached"] is False for goal in part["goals"]):
            code = MISSED
    return lines, code


def _message(element: ET.Element) -> str:
    lines = (element.get("message") or "").strip().splitlines()
    return lines[0] if lines else "no message"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
