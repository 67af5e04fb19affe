"""CUDA that comes up after Forebay's memory, and processes that end, on the stand-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cuda_standin import find_standin

PRELUDE = """
import atexit, gc, os, sys, threading, time
folder, library, tests, path = sys.argv[1:]
sys.path.insert(0, tests)
from cuda_standin import CudaArray, Standin

def started(settings=""):
    standin = Standin(library)
    standin.start()
    standin.configure(settings)
    return standin

owner = os.getpid()

def tell():
    if os.getpid() != owner:
        return
    for text in standin.violations():
        print(text)
"""

IMPORT = """
import forebay
from forebay._forebay import notice_cuda, search_cuda
search_cuda([folder], False)
"""

MOVE = """
LENGTH = (5 << 20) + 7
memory = standin.allocate(1, LENGTH)
array = CudaArray(memory, (LENGTH,), None)
handle = forebay.Handle(block_size="256KiB")
handle.store(array, path)
"""


@pytest.fixture(scope="session")
def library() -> str:
    found = find_standin()
    if found is None:
        pytest.skip("the stand-in for CUDA is not built: cargo build -p forebay-standin")
    return found


def run(library: str, tmp_path: Path, script: str) -> str:
    """Run a script that must end well and quietly; return what it printed."""
    folder = tmp_path / "driver"
    folder.mkdir(exist_ok=True)
    link = folder / "libcuda.so.1"
    if not link.is_symlink():
        link.symlink_to(library)
    arguments = [str(folder), library, str(Path(__file__).parent), str(tmp_path / "tensor")]
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", PRELUDE + script, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def test_pools_are_registered_when_somebody_else_brings_cuda_up(
    library: str, tmp_path: Path
) -> None:
    script = f"""
{IMPORT}
pool = forebay.Pool()
early = pool.empty(3 << 20)
ordinary = forebay.Pool(pinned=False).empty(3 << 20)
assert not forebay.register_with_cuda()
standin = Standin(library)
late = pool.empty(3 << 20)
assert standin.count("cuInit") == 0, "nobody has started it"
standin.start()
assert not standin.is_registered(early.ctypes.data)
newest = pool.empty(3 << 20)
for array in (early, late, newest):
    assert standin.is_registered(array.ctypes.data)
    assert standin.is_registered(array.ctypes.data + array.nbytes - 1)
assert not standin.is_registered(ordinary.ctypes.data)
assert standin.count("cuMemHostRegister_v2") == 3
assert forebay.register_with_cuda()
address = early.ctypes.data
del early
assert not standin.is_registered(address)
assert standin.count("cuMemHostUnregister") == 1
tell()
"""
    assert run(library, tmp_path, script) == ""


@pytest.mark.parametrize("look", ["handle.load(array, path)", "forebay.register_with_cuda()"])
def test_a_transfer_or_a_word_has_arrays_registered_that_were_there_before(
    library: str, tmp_path: Path, look: str
) -> None:
    script = f"""
{IMPORT}
array = forebay.empty(3 << 20)
handle = forebay.Handle(page_cache=False)
handle.store(array, path)
standin = started()
assert not standin.is_registered(array.ctypes.data)
{look}
assert standin.is_registered(array.ctypes.data)
handle.close()
tell()
"""
    assert run(library, tmp_path, script) == ""


def test_torch_says_when_it_starts_cuda(library: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = f"""
{IMPORT}
import torch
if not hasattr(torch.cuda, "_lazy_call") or torch.cuda.is_available():
    sys.exit(0)
asked = []
torch.cuda._lazy_call = lambda call, **_: asked.append(call)
tensor = forebay.empty(3 << 20, like="torch")
assert len(asked) == 1
standin = started()
# As torch does once CUDA is up.
asked[0]()
assert standin.is_registered(tensor.data_ptr())
tell()
"""
    assert run(library, tmp_path, script) == ""


def test_a_torch_without_that_hook_is_no_matter(library: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = f"""
{IMPORT}
import torch
torch.cuda._lazy_call = None
tensor = forebay.empty(3 << 20, like="torch")
standin = started()
second = forebay.empty(3 << 20, like="torch")
assert standin.is_registered(tensor.data_ptr()) and standin.is_registered(second.data_ptr())
tell()
"""
    assert run(library, tmp_path, script) == ""


def test_a_driver_that_refuses_is_asked_once_and_memory_is_as_before(
    library: str, tmp_path: Path
) -> None:
    script = f"""
{IMPORT}
standin = started("fail=cuDevicePrimaryCtxRetain:1+:2")
arrays = [forebay.empty(3 << 20) for _ in range(5)]
for number, array in enumerate(arrays):
    assert not standin.is_registered(array.ctypes.data)
    array[:] = number
handle = forebay.Handle()
handle.store(arrays[3], path)
assert set(open(path, "rb").read()) == {{3}}
assert standin.count("cuDevicePrimaryCtxRetain") == 1
tell()
"""
    assert run(library, tmp_path, script) == ""


ENDINGS = {
    "arrays alive": "arrays = [forebay.empty(size) for size in (100, 3 << 20, 9 << 20)]",
    "arrays in a cycle": """
class Holder: pass
holder = Holder()
holder.itself, holder.array = holder, forebay.empty(9 << 20)
del holder
""",
    "operations under way": """
operations = [handle.store_async(array, path + str(number)) for number in range(3)]
del operations, array
""",
    "handles unclosed with their pool": """
pool = forebay.Pool()
second = forebay.Handle(pool=pool, staging_bytes="1MiB")
second.load(array, path)
ticket = second.load_async(array, path)
""",
    "a daemon thread that goes on": """
def go_on():
    while True:
        handle.load(array, path)
        forebay.empty(3 << 20)
threading.Thread(target=go_on, daemon=True).start()
time.sleep(0.05)
""",
    "a thread that ends later": """
def later():
    time.sleep(0.1)
    handle.load(array, path)
threading.Thread(target=later).start()
""",
    "a forked child that ends as it likes": """
kept = forebay.empty(3 << 20)
ticket = handle.load_async(array, path)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_quietly_whatever_is_left(library: str, tmp_path: Path, ending: str) -> None:
    script = f"""
{IMPORT}
standin = started("delay_us=2000")
atexit.register(tell)
{MOVE}
{ENDINGS[ending]}
"""
    assert run(library, tmp_path, script) == ""


LOSSES = {
    "the driver goes": 'standin.configure("deinitialised=1")',
    "the device is reset": "standin.reset_device(1)",
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("order", ["before Forebay ends", "after Forebay ends"])
def test_the_end_of_cuda_and_that_of_forebay_come_in_either_order(
    library: str, tmp_path: Path, loss: str, order: str
) -> None:
    # What is registered first is called last.
    lose = f"""
def lose():
    {LOSSES[loss]}
atexit.register(lose)
"""
    first, last = (IMPORT, lose) if order == "before Forebay ends" else (lose, IMPORT)
    script = f"""
standin = started("delay_us=2000")
atexit.register(tell)
{first}
{last}
{MOVE}
arrays = [forebay.empty(size) for size in (100, 3 << 20, 9 << 20)]
handle.load(array, path)
"""
    assert run(library, tmp_path, script) == ""


@pytest.mark.parametrize("loss", LOSSES)
def test_memory_is_freed_quietly_after_cuda_is_gone(
    library: str, tmp_path: Path, loss: str
) -> None:
    script = f"""
{IMPORT}
standin = started()
{MOVE}
arrays = [forebay.empty(3 << 20) for _ in range(4)]
{LOSSES[loss]}
try:
    handle.load(array, path)
    raise SystemExit("the load must fail")
except forebay.ForebayError as error:
    # Memory that went with its device is nobody's.
    assert "CUDA_ERROR" in str(error) or "can't be written to" in str(error), error
unregistered = standin.count("cuMemHostUnregister")
arrays.clear()
assert standin.count("cuMemHostUnregister") == unregistered
arrays = [forebay.empty(3 << 20)]
handle.close()
tell()
"""
    assert run(library, tmp_path, script) == ""


def test_children_forked_before_and_after_cuda_came_up_use_pools_and_end(
    library: str, tmp_path: Path
) -> None:
    script = f"""
{IMPORT}
def in_child(work):
    child = os.fork()
    if child == 0:
        work()
        # As an interpreter ends, not at once.
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

kept = forebay.empty(3 << 20)
handle = forebay.Handle()

def on_its_own():
    mine = started()
    array = forebay.empty(3 << 20)
    assert not mine.is_registered(array.ctypes.data), "children don't look by themselves"
    assert forebay.register_with_cuda()
    assert mine.is_registered(array.ctypes.data)
    later = forebay.empty(3 << 20)
    assert mine.is_registered(later.ctypes.data)
    target = CudaArray(mine.allocate(0, 1000), (1000,), None)
    handle.store(target, path)
    assert mine.violations() == [], mine.violations()

in_child(on_its_own)
standin = started()
{MOVE}
assert standin.is_registered(kept.ctypes.data)

def without():
    # Another process's driver is refused, and its memory isn't here; pools are.
    array = forebay.empty(3 << 20)
    array[:] = 7
    handle.store(array, path + "2")
    assert not notice_cuda()

in_child(without)
assert standin.is_registered(kept.ctypes.data)
handle.load(array, path)
tell()
"""
    assert run(library, tmp_path, script) == ""
