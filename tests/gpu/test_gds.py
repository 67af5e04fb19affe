"""Which way bytes go between a drive and a GPU: what was asked for, and never said wrongly."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forebay
from forebay.errors import ForebayError
from gpu.machine import contents, pattern, run_child

if TYPE_CHECKING:
    from gpu.machine import Gpu

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LENGTH = (9 << 20) + 77
CAUSES = ("cufile", "nvidia-fs", "libcuda", "driver", "file system", "drive", "p2pdma")
"""What an error about GPUDirect Storage can name."""


def _route(handle: forebay.Handle, path: Path) -> dict[str, Any]:
    """Return the way of a file, which is known by its own name or that of its mount."""
    routes: dict[str, dict[str, Any]] = handle.stats()["device_routes"]
    places = [name for name in routes if path == Path(name) or Path(name) in path.parents]
    return routes[max(places, key=len)]


def _names_a_cause(refusal: str) -> bool:
    return any(cause in refusal.lower() for cause in CAUSES)


def _round_trip(gpu: Gpu, handle: forebay.Handle, path: Path) -> None:
    whole = gpu.bytes(LENGTH + 64, 1)
    before = contents(whole)
    for shift in (0, 1, 64):
        view = whole[shift : shift + LENGTH]
        handle.store(view, path)
        assert path.read_bytes() == before[shift : shift + LENGTH]
        view.zero_()
        handle.load(view, path)
        assert contents(whole) == before


def test_auto_never_fails_and_says_which_way_it_took(gpu: Gpu, path: Path) -> None:
    with forebay.Handle(device_route="auto", page_cache=False) as handle:
        _round_trip(gpu, handle, path)
        if gpu.is_real:
            route = _route(handle, path)
            assert route["route"] == "gds" or route["reason"]


def test_the_host_route_leaves_gpudirect_storage_alone(gpu: Gpu, path: Path) -> None:
    with forebay.Handle(device_route="host") as handle:
        _round_trip(gpu, handle, path)
        assert handle.stats()["bytes_gds"] == 0


def test_gds_moves_the_bytes_and_says_so_or_says_what_is_missing(gpu: Gpu, path: Path) -> None:
    refusal = None
    try:
        with forebay.Handle(device_route="gds", page_cache=False) as handle:
            _round_trip(gpu, handle, path)
            if gpu.is_real:
                assert _route(handle, path)["route"] == "gds"
                assert handle.stats()["bytes_gds"] > 0
    except ForebayError as error:
        refusal = str(error)
    assert refusal is None or _names_a_cause(refusal), refusal


def test_without_its_kernel_parts_nothing_is_taken_for_direct(real_gpu: Gpu, path: Path) -> None:
    settings = Path("/etc/cufile.json")
    own = settings.exists() and "p2pdma" in settings.read_text(encoding="utf-8", errors="replace")
    if own or Path("/proc/driver/nvidia-fs").exists():
        pytest.skip("GPUDirect Storage may be here")
    with forebay.Handle(device_route="auto", page_cache=False) as handle:
        _round_trip(real_gpu, handle, path)
        assert _route(handle, path)["route"] != "gds"
        assert handle.stats()["bytes_gds"] == 0


def test_a_file_system_in_memory_is_never_direct(real_gpu: Gpu) -> None:
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("/dev/shm isn't writable")
    path = shared / f"forebay-test-{os.getpid()}"
    try:
        with forebay.Handle(device_route="auto") as handle:
            _round_trip(real_gpu, handle, path)
            assert handle.stats()["bytes_gds"] == 0
        with pytest.raises(ForebayError), forebay.Handle(device_route="gds") as handle:
            handle.store(real_gpu.bytes(LENGTH), path)
    finally:
        path.unlink(missing_ok=True)


def test_deepnvmes_handle_moves_pinned_and_other_tensors_or_says_what_is_missing(
    real_gpu: Gpu, path: Path
) -> None:
    refusal = None
    try:
        handle = forebay.gds_handle()
    except ForebayError as error:
        refusal = str(error)
    if refusal is not None:
        assert _names_a_cause(refusal), refusal
        return
    like = real_gpu.empty(0)
    pinned = handle.new_pinned_device_tensor(LENGTH, like)
    pinned.copy_(real_gpu.bytes(LENGTH, 2))
    assert handle.sync_pwrite(pinned, str(path)) == 1
    assert path.read_bytes() == pattern(LENGTH, 2).tobytes()
    other = real_gpu.empty(LENGTH)
    assert handle.sync_pread(other, str(path)) == 1
    assert torch.equal(other, pinned)
    assert handle.pin_device_tensor(other)
    other.zero_()
    handle.sync_pread(other, str(path))
    assert torch.equal(other, pinned)
    assert handle.unpin_device_tensor(other)
    assert handle.free_pinned_device_tensor(pinned)


CLEAN = """
import os, sys
import torch
device, path, route = sys.argv[1:]
tensor = torch.ones(9 << 20, dtype=torch.uint8, device=device)
before = dict(os.environ)
import forebay
try:
    with forebay.Handle(device_route=route, page_cache=False) as handle:
        handle.store(tensor, path)
        handle.load(tensor, path)
except forebay.ForebayError:
    assert route == "gds"
assert dict(os.environ) == before
assert int(tensor.sum()) == 9 << 20
"""


@pytest.mark.parametrize("route", ["auto", "gds", "host"])
def test_no_file_is_left_in_the_working_directory_and_no_variable_changes(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    working = tmp_path / "working"
    working.mkdir()
    monkeypatch.chdir(working)
    run_child(CLEAN, gpu.name, tmp_path / "tensor", route)
    assert os.listdir(working) == []
