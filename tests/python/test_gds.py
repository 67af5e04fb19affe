"""GPUDirect Storage and its handle, on the stand-in for CUDA and cuFile and a made-up machine.

Each test has a process of its own: a process has one driver, and remembers what it couldn't load.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import forebay
from conftest import ROOT
from forebay import _cufile, gds
from forebay.errors import UnsupportedError

PRELUDE = """
import os, sys
from pathlib import Path

import forebay
from conftest import pattern
from cuda_standin import CudaArray, Standin
from forebay._forebay import search_cuda
from forebay.errors import DeviceError, ForebayError, InvalidBufferError, UnsupportedError

LENGTH = (3 << 20) + 77
folder, root, library = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
os.chdir(folder)
environment = dict(os.environ)
search_cuda([str(root)], False, str(root))
standin = Standin(library)
standin.configure(sys.argv[4])
stream, data = standin.stream(1), pattern(LENGTH).tobytes()


class Device:
    type = "cuda"


class Tensor(CudaArray):
    "A tensor as far as a handle asks."

    device = Device()

    def new_empty(self, shape, device):
        assert device == "cuda" or device is self.device
        return tensor(shape[0])


def tensor(length, shift=0):
    array = Tensor(standin.allocate(1, length + shift) + shift, (length,), stream)
    return array


def fill(array, content):
    standin.kernel_write(1, stream, array.interface["data"][0], content)


def content(array):
    start, (length,) = array.interface["data"][0], array.interface["shape"]
    return standin.kernel_read(1, stream, start, length)


def free(array, shift=0):
    standin.free(array.interface["data"][0] - shift)
"""

EPILOGUE = """
assert standin.violations() == [], standin.violations()
assert dict(os.environ) == environment
assert not [name for name in os.listdir() if "cufile" in name], os.listdir()
print("done")
"""


def library() -> Path:
    """Return the stand-in's shared object."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    for profile in ("debug", "release"):
        built = target / profile / "libforebay_standin.so"
        if built.exists():
            return built
    pytest.skip("the stand-in for CUDA is not built: cargo build -p forebay-standin")


def make_up(root: Path, folder: Path, system: str, drive: str) -> None:
    """Make up a machine with cuFile on which the files of a folder are on a drive."""
    number = f"{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}"
    for name in ("proc/self", "proc/driver/nvidia", "proc/driver/nvidia-fs", "sys/dev/block"):
        (root / name).mkdir(parents=True)
    (root / "proc/modules").write_text("nvidia_fs 1 0 - Live 0x0\n")
    line = f"1 0 {number} / / rw - {system} /dev/{drive} rw\n"
    (root / "proc/self/mountinfo").write_text(line)
    (root / "sys/devices" / drive).mkdir(parents=True)
    (root / "sys/dev/block" / number).symlink_to(root / "sys/devices" / drive)
    for name in ("libcuda.so.1", "libcufile.so.0"):
        (root / name).symlink_to(library())


def run_on_machine(
    tmp_path: Path, body: str, settings: str = "", *, system: str = "ext4", drive: str = "nvme0n1"
) -> None:
    """Run a program on the machine, from a folder of its own."""
    root, folder = tmp_path / "root", tmp_path / "folder"
    folder.mkdir()
    make_up(root, folder, system, drive)
    program = PRELUDE + textwrap.dedent(body) + EPILOGUE
    path = os.pathsep.join([str(ROOT / "tests/python"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, folder, root, library(), settings],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")


def test_a_gds_handle_moves_tensors_with_deepnvmes_counts(tmp_path: Path) -> None:
    run_on_machine(
        tmp_path,
        """
        handle = forebay.gds_handle(1 << 20, 16, False, True, 2)
        assert isinstance(handle, forebay.aio_handle)
        assert handle.get_intra_op_parallelism() == 2
        array = tensor(LENGTH, shift=1)
        fill(array, data)
        assert handle.sync_pwrite(array, "tensor") == 1
        assert Path("tensor").read_bytes() == data
        assert handle.write(array, "tensor", True) == 0
        fill(array, bytes(LENGTH))
        assert handle.async_pread(array, "tensor") == 0
        assert handle.wait() == 1
        assert content(array) == data
        assert handle.pread(array, "tensor", True, False) == 1
        part = CudaArray(array.interface["data"][0], (5000,), stream)
        assert handle.async_pwrite(part, "tensor", 10_001) == 0
        assert handle.wait() == 1
        expected = bytearray(data)
        expected[10_001:15_001] = data[:5000]
        assert Path("tensor").read_bytes() == bytes(expected)
        # Tensors of the host as with an aio_handle.
        host = bytearray(LENGTH)
        assert handle.sync_pread(host, "tensor") == 1
        assert host == expected
        stats = handle._handle.stats()
        assert stats["device_routes"]["tensor"]["route"] == "gds", stats
        assert stats["bytes_gds"] > stats["bytes_device"] > 0, stats
        assert stats["fallbacks"] == {}, stats
        free(array, 1)
        """,
    )


def test_validation_of_device_memory_finds_what_differs(tmp_path: Path) -> None:
    run_on_machine(
        tmp_path,
        """
        from forebay.errors import MismatchError

        handle = forebay.gds_handle()
        array = tensor(LENGTH)
        fill(array, data)
        Path("tensor").write_bytes(data)
        standin.configure("fail=cuFileRead:1:5030")
        plain = forebay.aio_handle()
        assert plain.read(array, "tensor", True) == 0, "refused, and moved through the host"
        spoiled = bytearray(data)
        spoiled[12_345] ^= 1
        operation = handle._write(array, "tensor", True, None)
        operation._operation.wait()
        Path("tensor").write_bytes(spoiled)
        try:
            operation.complete()
        except MismatchError as error:
            assert error.offset == 12_345
        else:
            raise AssertionError("it was not found")
        free(array)
        """,
    )


def test_pinned_tensors_are_registered_once_and_kept_until_they_are_unpinned(
    tmp_path: Path,
) -> None:
    run_on_machine(
        tmp_path,
        """
        import gc, weakref

        handle, other = forebay.gds_handle(), forebay.gds_handle()
        array = handle.new_pinned_device_tensor(LENGTH, Tensor(0, (0,), stream))
        assert handle.is_pinned(array) and other.is_pinned(array)
        assert handle.pin_device_tensor(array), "a second time"
        fill(array, data)
        for _ in range(3):
            assert other.sync_pwrite(array, "tensor") == 1
        assert Path("tensor").read_bytes() == data
        stats = other._handle.stats()
        assert stats["bytes_registered"] == stats["bytes_gds"] > 0, stats
        assert standin.count("cuFileBufRegister") == 1
        start, alive = array.interface["data"][0], weakref.ref(array)
        del array
        gc.collect()
        assert alive() is not None, "its memory must stay"
        array = alive()
        assert other.free_pinned_device_tensor(array)
        assert not other.unpin_device_tensor(array) and not handle.is_pinned(array)
        assert standin.count("cuFileBufDeregister") == 1
        free(array)
        host = bytearray(10)
        try:
            handle.pin_device_tensor(host)
        except InvalidBufferError as error:
            assert "isn't a device's" in str(error)
        else:
            raise AssertionError("host memory was pinned")
        locked = handle.new_cpu_locked_tensor(10, __import__("numpy").zeros(1))
        assert handle.is_pinned(locked) and handle.free_cpu_locked_tensor(locked)
        """,
    )


def test_a_device_route_is_an_option_of_handles(tmp_path: Path) -> None:
    run_on_machine(
        tmp_path,
        """
        array = tensor(LENGTH)
        fill(array, data)
        for route, bytes_gds in [("auto", LENGTH // 4096 * 4096), ("host", 0)]:
            with forebay.Handle(device_route=route) as handle:
                handle.store(array, "tensor")
                assert Path("tensor").read_bytes() == data
                stats = handle.stats()
            assert stats["bytes_gds"] == bytes_gds
            assert stats["bytes_gds"] + stats["bytes_device"] == LENGTH
        try:
            forebay.Handle(device_route="nvlink")
        except ForebayError as error:
            assert "auto gds host" in str(error)
        free(array)
        """,
    )


@pytest.mark.parametrize("route", ["auto", "gds"])
def test_a_file_that_would_go_in_compat_mode_is_named(tmp_path: Path, route: str) -> None:
    run_on_machine(
        tmp_path,
        f"""
        array = tensor(LENGTH)
        fill(array, data)
        handle = forebay.Handle(device_route="{route}")
        try:
            handle.store(array, "tensor")
        except UnsupportedError as error:
            assert "{route}" == "gds"
            assert "overlay" in str(error) and error.filename == "tensor", error
            assert not Path("tensor").exists()
            assert content(array) == data
        else:
            assert "{route}" == "auto"
            assert Path("tensor").read_bytes() == data
            taken = handle.stats()["device_routes"]["tensor"]
            assert taken["route"] == "compat" and "overlay" in taken["reason"]
            (text, count), = handle.stats()["fallbacks"].items()
            assert text.startswith("no GPUDirect Storage on") and count == 1
        handle.close()
        free(array)
        """,
        system="overlay",
    )


def test_a_driver_that_does_not_open_is_an_error_with_its_code(tmp_path: Path) -> None:
    run_on_machine(
        tmp_path,
        """
        try:
            forebay.gds_handle()
        except DeviceError as error:
            assert "CU_FILE_DRIVER_NOT_INITIALIZED" in str(error), error
            assert "is nvidia-fs loaded?" in str(error), error
        else:
            raise AssertionError("there is no driver")
        (reason,) = forebay.gds.missing()
        assert "CU_FILE_DRIVER_NOT_INITIALIZED" in reason
        array = tensor(LENGTH)
        fill(array, data)
        with forebay.Handle() as handle:
            handle.store(array, "tensor")
        assert Path("tensor").read_bytes() == data
        free(array)
        """,
        "gds=absent",
    )


def test_a_forked_child_is_refused_and_the_parent_goes_on(tmp_path: Path) -> None:
    run_on_machine(
        tmp_path,
        """
        handle = forebay.gds_handle()
        array = tensor(LENGTH)
        handle.pin_device_tensor(array)
        fill(array, data)
        assert handle.sync_pwrite(array, "tensor") == 1
        child = os.fork()
        if child == 0:
            status = 1
            try:
                handle.sync_pread(array, "tensor")
            except ForebayError as error:
                status = 0 if "fork" in str(error) else 2
            host = bytearray(LENGTH)
            status += 4 * (handle.sync_pread(host, "tensor") != 1 or host != data)
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        fill(array, bytes(LENGTH))
        assert handle.sync_pread(array, "tensor") == 1
        assert content(array) == data
        assert handle.unpin_device_tensor(array)
        free(array)
        """,
    )


def test_without_the_drivers_all_that_is_missing_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = gds.missing()
    if not reasons:
        pytest.skip("GPUDirect Storage is here")
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    with pytest.raises(UnsupportedError, match="gds_handle was asked for") as caught:
        forebay.gds_handle(1 << 20, queue_depth=8)
    assert all(reason in str(caught.value) for reason in reasons)
    assert "aio_handle" in str(caught.value)
    with pytest.raises(UnsupportedError, match="device_route"):
        forebay.Handle(device_route="gds")
    assert os.listdir() == []
    assert dict(os.environ) == environment


def test_packages_are_found_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two packages that share a namespace, one of them without the library.
    for place, name in [("a", "cu13/lib/libcufile.so.0"), ("b", "cudnn/lib/libcudnn.so.9")]:
        library = tmp_path / place / "nvidia" / name
        library.parent.mkdir(parents=True)
        library.write_bytes(b"")
        monkeypatch.syspath_prepend(tmp_path / place)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert str(tmp_path / "a/nvidia/cu13/lib") in _cufile.folders()
    assert not [folder for folder in _cufile.folders() if "cudnn" in folder]
    assert "nvidia" not in sys.modules
