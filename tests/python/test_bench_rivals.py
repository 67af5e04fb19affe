"""Adapters of other GPU loaders, each with a stand-in for the package that it adapts."""

from __future__ import annotations

import ctypes
import os
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import pattern
from forebay.bench.crew import Member
from forebay.bench.subjects import COMPARISONS, native, on_device
from forebay.bench.subjects.subject import Settings
from forebay.bench.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

GPU = COMPARISONS["gpu"]
HOST = COMPARISONS["tensors"]


def tensors() -> list[Tensor]:
    return [Tensor("a", "U8", (7,), pattern(7))]


def package(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Have a package that can be imported and found."""
    (directory / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_version_is_found_where_the_package_is_called_otherwise_than_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, "renamed_loader", "__version__ = '26.10.00'")
    kind = HOST["kvikio"]
    monkeypatch.setattr(kind, "package", "renamed-loader")
    assert kind(tensors(), Settings()).version() == "26.10.00"


@pytest.mark.parametrize("kind", [HOST["kvikio"], GPU["kvikio"]])
def test_kvikio_is_asked_for_by_the_names_that_it_can_be_installed_by(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(native, "missing", lambda name: f"not installed (pip install {name})")
    reason = kind.unavailable(Settings(device="cuda:0"))
    assert reason == "not installed (pip install kvikio-cu13, or kvikio-cu12)"


def test_kvikio_is_left_out_where_there_is_no_driver_rather_than_failing_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, monkeypatch, "kvikio", "")

    def absent(name: str) -> None:
        message = f"{name}: no such file"
        raise OSError(message)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    reason = HOST["kvikio"].unavailable(Settings())
    assert reason == "needs the NVIDIA driver, for host memory too: libcuda.so.1: no such file"
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)
    assert HOST["kvikio"].unavailable(Settings()) is None


def test_fewer_bytes_than_asked_for_are_an_error_of_kvikio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short:
        def __init__(self, *_: str) -> None: ...
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...
        def write(self, array: Any, file_offset: int) -> int:
            return int(array.nbytes) - 1 + file_offset

        read = write

    monkeypatch.setitem(sys.modules, "kvikio", types.SimpleNamespace(CuFile=Short))
    subject = HOST["kvikio"](tensors(), Settings())
    subject.clear()
    for way in (subject.store, subject.load):
        with pytest.raises(OSError, match="kvikio moved 6 of 7 bytes"):
            way(str(tmp_path / "file"))


def test_instanttensor_is_given_a_device_with_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    asked = []

    @contextmanager
    def safe_open(_: str, framework: str, device: str) -> Iterator[Any]:
        asked.append((framework, torch.device(device).index))
        yield types.SimpleNamespace(tensors=lambda: [("a", torch.from_numpy(pattern(7)))])

    module = types.SimpleNamespace(safe_open=safe_open)
    monkeypatch.setitem(sys.modules, "instanttensor", module)
    monkeypatch.setattr(on_device, "settled", lambda _: None)
    HOST["instanttensor"](tensors(), Settings()).load("path")
    GPU["instanttensor"](tensors(), Settings(device="cuda:1")).load("path")
    assert asked == [("pt", 0), ("pt", 1)]


def test_the_device_is_the_current_one_before_anything_is_allocated_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: calls.append(f"zeros {device}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(f"wait {device}"))
    GPU["runai"](tensors(), Settings(device="cuda:1")).setup(str(tmp_path))
    assert calls == ["cuda:1", "zeros cuda:1", "wait cuda:1"]


@pytest.mark.parametrize(
    ("copier", "words"),
    [
        ("GdsFileCopier", "by cuFile"),
        ("NoGdsFileCopier", "by way of the host"),
        ("UnifiedMemCopier", "by way of the host"),
        (None, "doesn't tell"),
    ],
)
def test_fastsafetensors_says_whether_it_takes_cufile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copier: str | None, words: str
) -> None:
    pytest.importorskip("torch")
    closed = []

    class Loader:
        def __init__(self, group: object, device: str, nogds: bool) -> None:
            assert (group, device, nogds) == ("group", "cpu", False)
            if copier is not None:
                self.copier_class = type(copier, (), {})

        def close(self) -> None:
            closed.append(self)

    module = types.SimpleNamespace(SafeTensorsFileLoader=Loader, SingleGroup=lambda: "group")
    monkeypatch.setitem(sys.modules, "fastsafetensors", module)
    detail = GPU["fastsafetensors-gds"](tensors(), Settings()).setup(str(tmp_path))
    assert detail is not None
    assert words in detail
    assert len(closed) == 1


def test_what_deepnvme_leaves_in_the_working_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    written = []

    def gds_handle(*_: object) -> str:
        Path("local_cufile.json").write_text("{}", encoding="utf-8")
        written.append(os.getcwd())
        return "handle"

    loaded = types.SimpleNamespace(gds_handle=gds_handle)
    builder = types.SimpleNamespace(load=lambda verbose: loaded)  # noqa: ARG005
    module = types.SimpleNamespace(GDSBuilder=lambda: builder)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", module)
    monkeypatch.chdir(theirs)
    GPU["deepnvme-gds"](tensors(), Settings()).setup(os.path.join("..", "ours"))
    assert [Path(path).parent for path in written] == [ours]
    assert (os.listdir(ours), os.listdir(theirs)) == ([], [])
    assert os.getcwd() == str(theirs)


def test_the_log_of_cufile_goes_nowhere_unless_its_place_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = os.memfd_create("test")
    for chosen, wanted in ((None, os.devnull), ("elsewhere.log", "elsewhere.log")):
        monkeypatch.delenv("CUFILE_LOGFILE_PATH", raising=False)
        if chosen is not None:
            monkeypatch.setenv("CUFILE_LOGFILE_PATH", chosen)
        member = Member("tensors", "python", number, str(tmp_path))
        try:
            member.do(do="setup", look=True, fio=None, compile=False, device="cpu")
            found = Path(f"/proc/{member._process.pid}/environ").read_bytes().split(b"\0")
        finally:
            member.end()
        assert f"CUFILE_LOGFILE_PATH={wanted}".encode() in found
    os.close(number)
