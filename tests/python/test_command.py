"""The command as the wheel carries it: what it is told of Python, signals, streams."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import ROOT, need_root
from forebay import _facts
from forebay._cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DOCS = ROOT / "docs" / "command.md"


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "forebay", *map(str, arguments)]


def environment(**extra: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    variables = {**inherited, "LC_ALL": "C.UTF-8", **extra}
    if not any(Path(entry, "forebay").exists() for entry in sys.path if entry):
        variables["PYTHONPATH"] = str(ROOT / "python")
    return variables


def run(
    *arguments: str | Path, wrapper: tuple[str, ...] = (), **extra: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*wrapper, *command(*arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=environment(**extra),
    )


def report(
    *directories: Path, wrapper: tuple[str, ...] = ()
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code of the report, and its findings by name."""
    done = run("report", "--json", *directories, wrapper=wrapper)
    assert done.stderr == ""
    sections = json.loads(done.stdout)["sections"]
    findings = [found for section in sections for found in section["findings"]]
    return done.returncode, {found["id"]: found for found in findings}


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = value.values()
    if not isinstance(value, str):
        with contextlib.suppress(TypeError):
            for element in value:
                yield from keys(element)


def test_the_report_knows_the_python_it_runs_in(tmp_path: Path) -> None:
    _, findings = report(tmp_path)
    assert findings["python.version"]["detail"].startswith(sys.version.split()[0])
    assert findings["python.numpy"]["detail"] == version("numpy")
    assert findings["directory.threads"]["level"] == "ok"
    assert findings["gpu.gds"]["title"] == "GDS mode"
    assert os.listdir(tmp_path) == []


def test_the_facts_of_python_import_no_framework() -> None:
    code = """
        import sys
        from forebay import _facts
        _facts.gather()
        print(sorted({"torch", "deepspeed", "numpy"} & set(sys.modules)))
    """
    script = "\n".join(line.strip() for line in code.splitlines())
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=environment(),
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "12.8"),
        ('cuda = "13.0"\n', "13.0"),
        ("cuda: Optional[str] = None\nhip = '6.4'\n", None),
        ("__version__ = '2.9'\n", None),
    ],
)
def test_the_cuda_of_torch_is_read_from_its_text(
    tmp_path: Path, text: str, cuda: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(text)
    metadata = tmp_path / "torch-2.9.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert _facts.gather()["torch_cuda"] == cuda
    assert _facts.gather()["packages"]["torch"] == "2.9.0"


def test_libraries_in_packages_of_nvidia_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nvidia" / "cufile" / "lib"
    folder.mkdir(parents=True)
    for name in ("libcufile.so.0", "libcufile_rdma.so.1", "libcufile.so"):
        (folder / name).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert _facts.gather()["libraries"] == [str(folder / "libcufile.so.0")]


def test_a_refused_io_uring_is_a_failure_with_its_reason(
    tmp_path: Path, deny_syscalls: str
) -> None:
    code, findings = report(tmp_path, wrapper=(deny_syscalls, "425"))
    assert code == 1
    uring = findings["engines.uring"]
    assert uring["level"] == "failure"
    assert "seccomp" in uring["detail"]
    assert "is used instead" in uring["detail"]
    assert findings["limits.seccomp"]["level"] == "warning"
    assert "directory.uring" not in findings
    assert findings["directory.threads"]["level"] == "ok"


def test_little_locked_memory_is_told_with_the_command_that_helps(tmp_path: Path) -> None:
    need_root()
    drop = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
    limit = ("prlimit", "--memlock=65536:65536")
    _, findings = report(tmp_path, wrapper=(*drop, *limit))
    memlock = findings["limits.memlock"]
    assert memlock["level"] == "warning"
    assert "64 KiB" in memlock["detail"]
    assert memlock["fix"]["root"]
    assert findings["directory.threads"]["level"] == "ok"


def test_a_full_directory_fails_with_its_reason(mount: Callable[..., Path]) -> None:
    directory = mount("-t", "tmpfs", "-o", "size=64k", "none")
    code, findings = report(directory)
    assert code == 1
    assert findings["directory.threads"]["level"] == "failure"
    assert "No space left" in findings["directory.threads"]["detail"]
    assert "memory" in findings["directory.file_system"]["detail"]
    assert os.listdir(directory) == []


def test_a_read_only_directory_fails_with_its_reason(small_ext4: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_ext4)], check=True)
    code, findings = report(small_ext4)
    assert code == 1
    assert findings["directory.file_system"]["fix"]["root"]
    assert "Read-only" in findings["directory.threads"]["detail"]


def test_a_loop_device_leads_to_its_file(small_ext4: Path) -> None:
    _, findings = report(small_ext4)
    assert "drive.img" in findings["directory.layer"]["detail"]
    assert findings["directory.direct"]["level"] == "ok"
    assert findings["directory.threads"]["level"] == "ok"


def test_a_directory_of_any_name_is_reported(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"gr\xf6\xdfe")
    directory.mkdir()
    _, findings = report(directory)
    assert findings["directory.threads"]["level"] == "ok"


def test_ctrl_c_ends_a_report() -> None:
    # A pipe that nobody reads holds the command up at its first line.
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 65536)
    os.set_blocking(write, True)
    child = subprocess.Popen(command("report"), stdout=write, env=environment())
    try:
        waiting = Path(f"/proc/{child.pid}/wchan")
        for _ in range(300):
            if "pipe" in waiting.read_text():
                break
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) in {-signal.SIGINT, 130}
    finally:
        child.kill()
        os.close(read)
        os.close(write)


def test_the_quickstart_has_json_and_the_docs_have_its_fields(tmp_path: Path) -> None:
    arguments = ("quickstart", "--dir", tmp_path, "--size", "5M", "--repeats", "1", "--json")
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert next(iter(result.items())) == ("schema", "forebay.quickstart/1")
    assert result["ways"][0]["name"] == "forebay"
    assert len(result["ways"][0]["load"]["seconds"]) == 1
    docs = DOCS.read_text(encoding="utf-8")
    stats = result.pop("stats")
    assert stats["bytes_written"] == result["bytes"]
    for key in keys(result):
        assert f"`{key}`" in docs


def test_a_failed_quickstart_with_json_is_an_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quickstart", "--json", "--dir", str(tmp_path / "none")]) == 3
    shown = capsys.readouterr()
    failure = json.loads(shown.out)
    assert failure["schema"] == "forebay.error/1"
    assert failure["exit"] == 3
    assert failure["message"] in shown.err


def test_colours_are_for_terminals_that_want_them(tmp_path: Path) -> None:
    def on_a_terminal(*arguments: str, **extra: str) -> str:
        leader, follower = os.openpty()
        child = subprocess.Popen(
            command("report", *arguments, tmp_path), stdout=follower, env=environment(**extra)
        )
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal is an error
            while part := os.read(leader, 65536):
                shown += part
        os.close(leader)
        child.wait(timeout=60)
        return shown.decode()

    assert "\x1b[" in on_a_terminal()
    assert "\x1b[" not in on_a_terminal("--no-color")
    assert "\x1b[" not in on_a_terminal(NO_COLOR="1")


def test_the_state_of_the_deepspeed_hook_has_documented_fields() -> None:
    done = run("deepspeed", "status", "--json")
    state = json.loads(done.stdout)
    assert next(iter(state.items())) == ("schema", "forebay.deepspeed/1")
    docs = DOCS.read_text(encoding="utf-8")
    for key in state:
        assert f"`{key}`" in docs


def test_an_environment_that_cannot_be_changed_is_an_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from forebay.deepspeed import hook

    assert hook.run("enable", json=True, site=tmp_path / "none") == 3
    shown = capsys.readouterr()
    failure = json.loads(shown.out)
    assert (failure["schema"], failure["exit"]) == ("forebay.error/1", 3)
    assert failure["message"] in shown.err


def test_names_cannot_steer_the_terminal(tmp_path: Path) -> None:
    directory = tmp_path / "a\x1b[31mb\nc\x9bd\u202ee"
    directory.mkdir()
    file = directory / "file"
    file.touch()
    for arguments in (("report", directory), ("man", "--dir", file / "none")):
        done = run(*arguments)
        shown = done.stdout + done.stderr
        assert not {"\x1b", "\x9b", "\u202e"} & set(shown)
        assert "a\\u{1b}[31mb" in shown
    done = run("quickstart", "--dir", directory / "none")
    assert "a\\x1b[31mb" in done.stderr


def test_what_a_broken_installation_left_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "torch-9.0.dist-info").mkdir()
    (tmp_path / "deepspeed-9.0.dist-info").mkdir()
    (tmp_path / "deepspeed-9.0.dist-info" / "METADATA").write_text("nothing\n")
    places = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = run("report", "--json", tmp_path, PYTHONPATH=places)
    assert done.stderr == ""
    assert "9.0" not in json.loads(done.stdout)["facts"]["python"]["packages"].values()


def test_a_python_that_cannot_be_asked_fails_in_the_report_and_does_not_end_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "numpy-9.0.dist-info").mkdir()
    (tmp_path / "numpy-9.0.dist-info" / "METADATA").write_bytes(b"Name: \xff\n")
    places = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = run("report", "--json", tmp_path, PYTHONPATH=places)
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    assert "UnicodeDecodeError" in report["facts"]["python"]["problem"]
    findings = {
        finding["id"]: finding for section in report["sections"] for finding in section["findings"]
    }
    assert findings["python.version"]["level"] == "failure"
    assert "directory.uring" in str(findings.keys())


def test_the_state_of_the_hook_comes_out_whatever_standard_output_is() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("deepspeed", "status"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=100,
            env=environment(),
        )
    assert done.returncode == 1
    assert "cannot write to standard output" in done.stderr
    closed = run("deepspeed", "status", wrapper=("sh", "-c", 'exec "$@" >&-', "sh"))
    assert (closed.returncode, closed.stderr) == (0, "")
