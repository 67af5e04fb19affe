"""What the tests share: a handle, patterns, child processes, and the kernel's own obstacles."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from cuda_standin import Standin, find_standin
from forebay._forebay import search_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]

# A shell has what it runs in the background ignore Ctrl-C, and nohup a hang-up, and programs hand
# that on to those that they start: tests that end one so would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def no_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the tests not depend on what was stored for this machine's drives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FOREBAY_PROFILES", str(tmp_path_factory.mktemp("state") / "profiles.json"))
        yield


@pytest.fixture
def handle() -> Iterator[forebay.Handle]:
    with forebay.Handle() as handle:
        yield handle


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tensor.bin"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Find the stand-in, and have the driver looked for there in this process."""
    built = find_standin()
    if built is None:
        pytest.skip("the stand-in for CUDA is not built: cargo build -p forebay-standin")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "libcuda.so.1").symlink_to(built)
    search_cuda([str(folder)], False)
    return built


@pytest.fixture
def standin(library: str) -> Iterator[Standin]:
    standin = Standin(library)
    yield standin
    standin.close()


def pattern(length: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return random bytes: a block in the wrong place, or twice, shows."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def run_python(
    code: str, *wrapper: str, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, under the command ``wrapper`` if given."""
    command = [*wrapper, sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, **options
    )
    if check:
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def need_strace() -> None:
    """Skip the test where calls can't be traced."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run(
        ["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True, check=False
    )
    if probe.returncode != 0:
        pytest.skip("strace may not trace here")


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a file system: ``mount("-t", "tmpfs", …)`` returns the directory."""
    need_root()
    points: list[Path] = []

    def do_mount(*arguments: str) -> Path:
        point = tmp_path / f"mount-{len(points)}"
        point.mkdir()
        done = subprocess.run(
            ["mount", *arguments, str(point)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            pytest.skip(f"cannot mount here: {done.stderr.strip()}")
        points.append(point)
        return point

    yield do_mount
    for point in reversed(points):
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@pytest.fixture
def small_ext4(tmp_path: Path, mount: Callable[..., Path]) -> Path:
    """Mount an ext4 of 8 MiB on a loop device."""
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    image = tmp_path / "drive.img"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
    return mount("-o", "loop", str(image))


@pytest.fixture(scope="session")
def deny_syscalls() -> str:
    """Find the test kit's launcher that refuses system calls."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    for profile in ("debug", "release"):
        program = target / profile / "deny-syscalls"
        if program.exists():
            return str(program)
    pytest.skip("deny-syscalls is not built: cargo build -p forebay-testkit --bins")


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def descriptors_fall_to(count: int) -> bool:
    """Whether they do in a while: a worker lets go of an event a moment after signalling it."""
    deadline = time.monotonic() + 20
    while descriptor_count() > count and time.monotonic() < deadline:
        time.sleep(0.001)
    return descriptor_count() <= count


def undocumented_keys(found: dict[str, Any], document: str, schema: str) -> list[str]:
    """Return the keys of a command's object that its section in the docs doesn't name."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    section = text.split(f"`{schema}`", 1)[1].split("\n## ", 1)[0]
    return [key for key in keys_of(found) if f"`{key}`" not in section]


def keys_of(value: Any) -> set[str]:
    """Return the keys of an object and of those in it; options have the names of the command."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if not isinstance(value, dict):
        return set()
    inner = (keys_of(item) for key, item in value.items() if key != "options")
    return set(value).union(*inner)
