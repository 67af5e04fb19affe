"""``scripts/gpu-check.sh``: what it refuses, its dry run, and the table that it prints."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from conftest import ROOT
from forebay.bench import figures, measure
from forebay.bench.payload import Layout
from forebay.bench.subjects import COMPARISONS
from test_bench_gpu import need_no_gpu

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = ROOT / "scripts" / "gpu-check.sh"
SUBJECTS = COMPARISONS["gpu"]
TESTS = """<testsuites><testsuite>
<testcase classname="gpu.test_exact" name="test_a[cuda:0]"/>
<testcase classname="gpu.test_exact" name="test_b[cuda:0]">{}</testcase>
<testcase classname="gpu.test_gpus" name="test_c">
<skipped message="there is 1 GPU, this takes two"/></testcase>
</testsuite></testsuites>"""
FAILURE = '<failure message="AssertionError: bytes differ&#10;more"/><error message="and more"/>'


def check(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with nothing but its own in the folder for what is temporary."""
    temporary = directory / "temporary"
    temporary.mkdir()
    stored = directory / "stored"
    stored.mkdir()
    done = subprocess.run(
        [str(SCRIPT), "--python", sys.executable, "--dir", str(stored), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=directory,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert os.listdir(temporary) == []
    assert os.listdir(stored) == []
    assert sorted(os.listdir(directory)) == ["stored", "temporary"]
    return done


def test_without_a_gpu_it_says_so_and_ends_with_its_exit_code(tmp_path: Path) -> None:
    need_no_gpu()
    done = check(tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing can be checked here: torch" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nonsense"], "there is no option --nonsense"),
        (["--size"], "--size takes a value"),
        (["missing.whl"], "missing.whl is not a file"),
        (["--device", "cuda"], "such as cuda:1"),
        (["--device", "cpu"], "such as cuda:1"),
        (["--dir", "/nonexistent"], "/nonexistent is not a directory"),
    ],
)
def test_wrong_use_is_said_to_be_so(tmp_path: Path, arguments: list[str], text: str) -> None:
    done = check(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_a_python_that_lacks_something_is_refused(tmp_path: Path) -> None:
    done = check(tmp_path, "--python", "/nonexistent/python3")
    assert done.returncode == 3
    assert "/nonexistent/python3 is not here" in done.stderr


def test_a_dry_run_runs_the_tests_and_counts_them(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = check(tmp_path, "--dry-run", "--", "-k", "every_type or at_once_is_exact")
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[1:]
    assert last[0].startswith("tests: ")
    assert last[0].endswith("passed, 0 failed, 1 skipped")
    assert last[1].startswith("skipped 1: a dry run on the processor")


def test_a_failing_test_fails_the_check(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = check(tmp_path, "--dry-run", "--", "-k", "nothing_of_that_name")
    assert done.returncode == 1
    assert "pytest ended with exit code 5: not all tests have run" in done.stdout


@pytest.fixture(scope="module")
def gpu_table() -> Any:
    """Load the program that prints the table."""
    spec = importlib.util.spec_from_file_location("gpu_table", SCRIPT.with_name("gpu_table.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def document(seconds: float, failure: str | None = None) -> dict[str, Any]:
    """Return what the bench prints, with a host route of so many seconds."""
    turns = [measure.Turn(number, seconds, 0.5, None) for number in range(3)]
    drive = [measure.Turn(number, 2.0, 0.5, None) for number in range(3)]
    copy = [measure.Turn(number, 1.0, 0.5, None) for number in range(3)]
    results = [
        measure.Result(SUBJECTS["forebay-host"], load=turns, failure=failure),
        measure.Result(SUBJECTS["host-memory"], load=drive),
        measure.Result(SUBJECTS["pinned-copy"], load=copy),
        measure.Result(SUBJECTS["kvikio"], failure="its own"),
    ]
    part = figures.gpu_part(results, Layout.split(1 << 30, 40), [("runai", "not installed")])
    hardware = [{"title": "NVIDIA driver", "detail": "580.1"}]
    return {"file_system": "ext4", "rounds": 3, "hardware": hardware, "files": [part]}


@pytest.mark.parametrize(
    ("failure", "code", "seconds", "ours", "expected"),
    [
        ("", 0, 2.05, None, 0),
        ("", 0, 4.0, None, 4),
        ("", 0, 2.05, "lost", 1),
        (FAILURE, 1, 2.05, None, 1),
        (FAILURE, 1, 4.0, None, 1),
        ("", 2, 2.05, None, 1),
    ],
)
def test_the_exit_code_tells_failures_from_goals_that_were_not_reached(
    gpu_table: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failure: str,
    code: int,
    seconds: float,
    ours: str | None,
    expected: int,
) -> None:
    tests, bench = tmp_path / "tests.xml", tmp_path / "bench.json"
    tests.write_text(TESTS.format(failure))
    bench.write_text(json.dumps(document(seconds, ours)))
    assert gpu_table.main([str(code), str(tests), str(bench)]) == expected
    printed = capsys.readouterr().out
    counts = "1 passed, 1 failed" if failure else "2 passed, 0 failed"
    assert f"tests: {counts}, 1 skipped" in printed
    assert "skipped 1: there is 1 GPU, this takes two" in printed
    assert ("FAILED: gpu.test_exact.test_b[cuda:0]: AssertionError: bytes differ\n" in printed) == (
        bool(failure)
    )
    for words in ("NVIDIA driver: 580.1", "of the limit", "left out: runai: not installed"):
        assert words in printed


def test_a_run_that_left_no_report_has_failed(
    gpu_table: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests, bench = tmp_path / "tests.xml", tmp_path / "bench.json"
    assert gpu_table.main(["137", str(tests), str(bench)]) == 1
    tests.write_text(TESTS.format(""))
    assert gpu_table.main(["0", str(tests), str(bench)]) == 0
    bench.write_text("")
    assert gpu_table.main(["0", str(tests), str(bench)]) == 1
    printed = capsys.readouterr().out
    assert "pytest ended with exit code 137" in printed
    assert "bench: no figures" in printed
