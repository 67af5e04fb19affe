"""The main job: real tensors, every byte, clear answers where it can't be done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import ROOT, need_root, pattern
from forebay._cli import main
from forebay.quickstart import measure, tensors

if TYPE_CHECKING:
    from collections.abc import Callable


def write_safetensors(path: Path, count: int = 3) -> Path:
    header: dict[str, Any] = {"__metadata__": {"made": "here"}}
    data = b""
    for index in range(count):
        raw = pattern(4 * 1001, index).tobytes()
        entry = {"dtype": "F32", "shape": [7, 143], "data_offsets": [len(data), len(data) + 4004]}
        header[f"layer.{index}"] = entry
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_header(path: Path, header: str | dict[str, Any], data: bytes = b"") -> Path:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: Any = (4,), offsets: Any = (0, 16), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "forebay", "quickstart", *map(str, arguments)]


def environment(**extra: str) -> dict[str, str]:
    paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, **extra}
    if not any(Path(entry, "forebay").exists() for entry in sys.path):
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def run(*arguments: str | Path, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=environment(**extra),
    )


def run_redirected(redirection: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run with what a shell puts behind the command."""
    script = f'set -o pipefail; "$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", script, "bash", *command(*arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env=environment(),
    )


def test_files_are_stored_and_loaded_by_each_way(tmp_path: Path) -> None:
    model = write_safetensors(tmp_path / "model.safetensors")
    done = run(model, "--dir", tmp_path, "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in ("3 tensors", "engine", "direct I/O", "every byte compared", "open().write"):
        assert words in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["forebay-quickstart.svg", "model.safetensors"]
    assert ET.parse(tmp_path / "forebay-quickstart.svg").getroot().tag.endswith("svg")


def test_without_files_a_state_dict_is_made_up(tmp_path: Path) -> None:
    done = run("--dir", tmp_path, "--size", "20M", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "× as fast" in done.stdout
    assert os.listdir(tmp_path) == ["forebay-quickstart.svg"]


def test_the_made_up_state_dict_has_the_shapes_of_a_gpt2_medium() -> None:
    found = {tensor.name: tensor.shape for tensor in tensors._gpt2_medium(30 << 20)}
    assert found["h.0.attn.c_attn.weight"] == (1024, 3072)
    assert found["wpe.weight"] == (1024, 1024)
    total = sum(tensor.data.nbytes for tensor in tensors._gpt2_medium(30 << 20))
    assert 29 << 20 < total <= 30 << 20


def test_a_missing_file_is_wrong_use(tmp_path: Path) -> None:
    done = run(tmp_path / "none.safetensors", "--dir", tmp_path)
    assert done.returncode == 2
    assert "none.safetensors: No such file" in done.stderr


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": 17}',
        (5).to_bytes(8, "little") + b"{nope",
        (67).to_bytes(8, "little")
        + b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16000000]}}',
        (61).to_bytes(8, "little")
        + b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}'
        + b"1234",
    ],
)
def test_what_is_no_safetensors_file_is_wrong_use(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert main(["quickstart", str(path), "--dir", str(tmp_path)]) == 2
    assert "is not a safetensors file" in capsys.readouterr().err


def test_a_size_that_is_none_is_wrong_use(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--size", "much"]) == 2
    assert "much" in capfd.readouterr().err


def test_a_missing_directory_has_its_own_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quickstart", "--dir", str(tmp_path / "none")]) == 3
    assert "is not a directory" in capsys.readouterr().err


def test_memory_is_not_a_drive(
    mount: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = mount("-t", "tmpfs", "-o", "size=64k", "none")
    assert main(["quickstart", "--dir", str(directory)]) == 3
    assert "tmpfs" in capsys.readouterr().err


def test_a_drive_without_room_says_how_much_is_needed(
    small_ext4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quickstart", "--dir", str(small_ext4), "--size", "20M"]) == 3
    assert "are needed" in capsys.readouterr().err


def test_a_drive_that_fills_up_on_the_way_is_said_to_be_full(
    small_ext4: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("forebay.quickstart.main.check_space", lambda *_: None)
    arguments = ["quickstart", "--dir", str(small_ext4), "--size", "20M", "--repeats", "1"]
    assert main(arguments) == 3
    assert "is full" in capsys.readouterr().err
    assert set(os.listdir(small_ext4)) <= {"lost+found"}


def test_a_read_only_directory_is_said_to_be_so(
    small_ext4: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_root()
    subprocess.run(["mount", "-o", "remount,ro", str(small_ext4)], check=True)
    assert main(["quickstart", "--dir", str(small_ext4)]) == 3
    assert "cannot write in" in capsys.readouterr().err


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    from forebay.bench.problem import Problem

    class Broken:
        title = "broken"

        def store(self, path: str) -> None:
            Path(path).write_bytes(data[0].data.tobytes())

        def clear(self) -> None:
            pass

        def load(self, path: str) -> list[Any]:
            assert Path(path).exists()
            copy = data[0].data.copy()
            copy[-1] ^= 1
            return [copy]

    data = [tensors.Tensor("layer", "U8", (5000,), pattern(5000))]
    with pytest.raises(Problem, match="layer"):
        measure.measure([Broken()], data, str(tmp_path), 1, lambda _: None)


def test_a_reader_that_goes_away_is_taken_in_silence(tmp_path: Path) -> None:
    model = write_safetensors(tmp_path / "model.safetensors")
    done = run_redirected("| head -1", model, "--dir", tmp_path, "--repeats", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("3 tensors")
    assert done.stdout.count("\n") == 1


def test_ascii_output_gets_ascii_signs(tmp_path: Path) -> None:
    directory = tmp_path / "größe"
    directory.mkdir()
    model = write_safetensors(tmp_path / "model.safetensors")
    arguments = (model, "--dir", directory, "--repeats", "1")
    done = run(*arguments, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert done.returncode == 0, done.stderr
    assert "x as fast" in done.stdout
    assert "-----" in done.stdout
    assert "gr\\xf6" in done.stdout
    assert done.stdout.isascii()


def test_a_closed_output_takes_everything(tmp_path: Path) -> None:
    model = write_safetensors(tmp_path / "model.safetensors")
    done = run_redirected(">&-", model, "--dir", tmp_path, "--repeats", "1")
    assert (done.returncode, done.stderr) == (0, "")
    done = run_redirected(">&- 2>&-", tmp_path / "none", "--dir", tmp_path)
    assert done.returncode == 2


def test_a_full_output_is_not_a_full_directory(tmp_path: Path) -> None:
    model = write_safetensors(tmp_path / "model.safetensors")
    done = run_redirected(">/dev/full", model, "--dir", tmp_path, "--repeats", "1")
    text = "cannot write to standard output: No space left on device"
    assert done.stderr == f"forebay quickstart: {text}\n"
    assert done.returncode == 1
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "C64", "BOOL", "F8_E4M3"])
def test_tensors_without_elements_are_taken(tmp_path: Path, dtype: str) -> None:
    header = {
        "empty": entry([0, 5], [0, 0], dtype),
        "full": entry(),
        "last": entry([5, 0], [16, 16], dtype),
    }
    model = write_header(tmp_path / "model.safetensors", header, bytes(range(16)))
    done = run(model, "--dir", tmp_path, "--repeats", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 tensors" in done.stdout


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"a": entry([True], [0, 4])}, "the shape of tensor 'a': wanted a list of whole numbers"),
        ({"a": entry([-4])}, "from 0 up, found [-4]"),
        ({"a": entry([4.0])}, "from 0 up, found [4.0]"),
        ({"a": entry(4)}, "from 0 up, found 4"),
        ({"a": entry([0, 1 << 62, 1 << 62], [0, 0])}, "the shape of tensor 'a': wanted at most"),
        ({"a": entry([0, 1 << 63], [0, 0], "NEW")}, "the shape of tensor 'a': wanted at most"),
        ({"a": entry(dtype=["F32"])}, "the dtype of tensor 'a': wanted a name, found ['F32']"),
        ({"a": entry(offsets=[False, 16])}, "wanted a begin and an end, found [False, 16]"),
        ({"a": entry(offsets=[16, 0])}, "wanted a begin and an end, found [16, 0]"),
        ({"a": entry(offsets=[16])}, "wanted a begin and an end, found [16]"),
        ({"a": entry(offsets=[0, 20])}, "tensor 'a' of F32 [4]: wanted 16 bytes, found 20"),
        ({"a": entry(offsets=[32, 48])}, "tensor 'a' ends at 48, the data at 32"),
        ({"a": entry(), "b": entry()}, "tensor 'b' begins at 0, inside tensor 'a', which ends"),
        ({"b": entry(offsets=[12, 28]), "a": entry()}, "tensor 'b' begins at 12, inside"),
        ({"a": {"shape": [4]}}, "tensor 'a': wanted an object with dtype, shape and data_offsets"),
        ({"a": 17}, "shape and data_offsets, found 17"),
        ({"a\ud800": entry()}, "the name of a tensor: wanted text"),
        ('{"a": 1, "a": 2}', "its header has 'a' twice"),
        ("[]", "its header: wanted an object, found []"),
    ],
)
def test_a_wrong_header_is_told_what_was_wanted(
    tmp_path: Path, header: str | dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_header(tmp_path / "x.safetensors", header, bytes(32))
    assert main(["quickstart", str(path), "--dir", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "is not a safetensors file: " in message
    assert text in message


def start_storing(directory: Path) -> subprocess.Popen[str]:
    """Start a long run, and return when it has stored something."""
    before = set(directory.glob("forebay-quickstart-*"))
    arguments = ("--dir", directory, "--size", "20M", "--repeats", "100000")
    child = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    for _ in range(6000):
        stored = directory.glob("forebay-quickstart-*/tensors-*")
        if {path.parent for path in stored} - before:
            return child
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    child.kill()
    raise AssertionError(child.communicate())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_directory(tmp_path: Path, number: signal.Signals) -> None:
    child = start_storing(tmp_path)
    child.send_signal(number)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (128 + number, "")
    assert os.listdir(tmp_path) == []


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    killed = start_storing(tmp_path)
    (dead,) = tmp_path.glob("forebay-quickstart-*")
    live = start_storing(tmp_path)
    try:
        killed.kill()
        killed.communicate()
        mine = tmp_path / "forebay-quickstart-mine"
        mine.mkdir()
        (mine / "tensors-0").write_bytes(b"mine")
        (owned,) = set(tmp_path.glob("forebay-quickstart-*")) - {dead, mine}
        assert dead.exists()
        # It is still alive, but keeps dropping the page cache no longer.
        live.send_signal(signal.SIGSTOP)
        done = run("--dir", tmp_path, "--size", "20M", "--repeats", "1")
        assert done.returncode == 0, done.stderr
        assert not dead.exists()
        assert (mine / "tensors-0").read_bytes() == b"mine"
        assert owned.exists()
        assert live.poll() is None
    finally:
        live.terminate()
        live.send_signal(signal.SIGCONT)
        live.communicate(timeout=60)
    assert not owned.exists()


@pytest.mark.parametrize("kind", ["directory", "dangling link", "fifo"])
def test_a_chart_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("forebay.quickstart.main.measure", lambda *_: pytest.fail("measured"))
    chart = tmp_path / "forebay-quickstart.svg"
    if kind == "directory":
        chart.mkdir()
    elif kind == "fifo":
        os.mkfifo(chart)
    else:
        chart.symlink_to(tmp_path / "none" / "chart.svg")
    assert main(["quickstart", "--dir", str(tmp_path), "--size", "20M"]) == 3
    assert f"cannot write the bars to {chart}: " in capsys.readouterr().err
    assert os.listdir(tmp_path) == [chart.name]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("torch", "left out: torch.save/load and safetensors: torch is not installed (pip inst"),
        ("safetensors", "left out: safetensors: not installed (pip install torch safetensors)"),
    ],
)
def test_a_way_that_is_not_installed_says_how_to_get_it(
    tmp_path: Path,
    module: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if module == "safetensors":
        pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, module, None)
    model = write_safetensors(tmp_path / "model.safetensors")
    assert main(["quickstart", str(model), "--dir", str(tmp_path), "--repeats", "1"]) == 0
    assert text in capsys.readouterr().out


def test_all_that_moved_is_accounted_for(tmp_path: Path) -> None:
    from forebay import Handle
    from forebay.quickstart.main import _how

    class Counted:
        def stats(self) -> dict[str, Any]:
            moved = {"direct": 10, "staged": 20, "buffered": 30, "cached": 40}
            return {**stats, **{f"bytes_{how}": count for how, count in moved.items()}}

    class Way:
        handle = Counted()

    with Handle() as handle:
        stats = handle.stats()
    (line,) = (line for line in _how(Way(), str(tmp_path)).splitlines() if "moved: " in line)
    assert line.startswith("moved: 10 % straight")
    assert line.endswith("30 % by the page cache, 40 % from the page cache, being there already")
