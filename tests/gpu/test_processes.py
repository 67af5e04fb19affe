"""Processes side by side, forked ones, and how they end."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from gpu.machine import finish_child, pattern, run_child, start_child

if TYPE_CHECKING:
    from pathlib import Path

    from gpu.machine import Gpu

pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LENGTH = (3 << 20) + 77

ROUNDS = """
import sys
import forebay
import torch

device, name, shared = sys.argv[1:4]
with open(shared, "rb") as file:
    expected = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).to(device)
with forebay.Handle() as handle:
    for turn in range(20):
        source = expected ^ turn
        handle.store(source, name)
        target = torch.zeros_like(source)
        handle.load(target, name)
        assert torch.equal(target, source), turn
        target.zero_()
        handle.load(target, shared)
        assert torch.equal(target, expected), turn
"""

SAME_FILE = """
import sys
import forebay
import torch

device, path, part, shared = sys.argv[1:5]
with open(shared, "rb") as file:
    whole = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
half = len(whole) // 2 + 13
begin, end = (0, half) if part == "0" else (half, len(whole))
mine = whole[begin:end].to(device)
with forebay.Handle() as handle:
    for _ in range(20):
        handle.store(mine, path, offset=begin)
        target = torch.zeros_like(mine)
        handle.load(target, path, offset=begin)
        assert torch.equal(target, mine)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Make a file that all read."""
    shared = tmp_path / "shared"
    shared.write_bytes(pattern(LENGTH, 1).tobytes())
    return shared


def test_two_processes_share_a_gpu_and_a_file_that_both_load(
    gpu: Gpu, tmp_path: Path, shared: Path
) -> None:
    children = [
        start_child(ROUNDS, gpu.name, tmp_path / str(number), shared) for number in range(2)
    ]
    for child in children:
        finish_child(child)
    assert shared.read_bytes() == pattern(LENGTH, 1).tobytes()


def test_two_processes_store_neighbouring_bytes_of_one_file(
    gpu: Gpu, path: Path, shared: Path
) -> None:
    path.write_bytes(bytes(LENGTH))
    children = [start_child(SAME_FILE, gpu.name, path, str(part), shared) for part in range(2)]
    for child in children:
        finish_child(child)
    assert path.read_bytes() == pattern(LENGTH, 1).tobytes()


FORKED = """
import os, sys
import forebay
import torch

device, path = sys.argv[1:]
tensor = torch.ones(3 << 20, dtype=torch.uint8, device=device)
handle = forebay.Handle()
handle.store(tensor, path)
child = os.fork()
if child == 0:
    try:
        on_host = bytearray(3 << 20)
        handle.load(on_host, path)
        assert on_host == b"\\1" * (3 << 20)
        if device != "cpu":
            try:
                handle.store(tensor, path)
            except forebay.errors.ForebayError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError("a forked child cannot use CUDA")
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
handle.store(tensor, path)
handle.load(tensor, path)
assert int(tensor.sum()) == 3 << 20
"""


def test_a_forked_child_loads_to_the_host_and_is_told_that_it_has_no_gpu(
    gpu: Gpu, path: Path
) -> None:
    run_child("import warnings; warnings.simplefilter('ignore')\n" + FORKED, gpu.name, path)


IMPORTS = {
    "forebay first": "import forebay\nimport torch\n",
    "torch first": "import torch\nimport forebay\n",
}
ENDING = """
import sys
device, path, order = sys.argv[1:]
things = {
    "handle": forebay.Handle(),
    "pool": forebay.Pool(),
    "tensor": torch.ones(3 << 20, dtype=torch.uint8, device=device),
}
things["pinned"] = things["pool"].empty(3 << 20, like="torch")
things["pinned"].copy_(things["tensor"])
things["shared"] = forebay.empty(3 << 20, like="torch")
things["handle"].store(things["tensor"], path)
things["handle"].load(things["tensor"], path)
things["operation"] = things["handle"].load_async(things["tensor"], path)
for name in order.split(",") if order else ():
    del things[name]
print("ended")
"""
ORDERS = ["", *map(",".join, itertools.permutations(["handle", "pool", "tensor", "pinned"], 4))]


@pytest.mark.parametrize("imports", IMPORTS.values(), ids=IMPORTS)
def test_programs_end_well_with_operations_under_way_and_everything_still_there(
    gpu: Gpu, path: Path, imports: str
) -> None:
    assert run_child(imports + ENDING, gpu.name, path, "") == "ended\n"


@pytest.mark.parametrize("order", ORDERS[1::5])
def test_programs_end_well_in_whatever_order_things_go(gpu: Gpu, path: Path, order: str) -> None:
    assert run_child(IMPORTS["torch first"] + ENDING, gpu.name, path, order) == "ended\n"


def test_a_killed_process_leaves_a_gpu_that_works(gpu: Gpu, path: Path) -> None:
    code = """
    import sys
    import forebay
    import torch

    device, path = sys.argv[1:]
    tensors = [torch.ones(8 << 20, dtype=torch.uint8, device=device) for _ in range(4)]
    handle = forebay.Handle()
    print("begun", flush=True)
    while True:
        for index, tensor in enumerate(tensors):
            handle.store_async(tensor, f"{path}-{index}")
        handle.wait()
    """
    child = start_child(code, gpu.name, path)
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    child.kill()
    child.communicate()
    run_child(IMPORTS["torch first"] + ENDING, gpu.name, path, "")
