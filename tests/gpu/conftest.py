"""Which devices are tested on, and what tests ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import forebay
from gpu.machine import Gpu, devices, missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_DRY = "a dry run on the processor: {}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-device",
        metavar="DEVICE",
        help="test on this device, such as cuda:1, or cpu for a dry run; else on all GPUs",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have each test that takes a GPU run on all of them."""
    if "gpu" in metafunc.fixturenames:
        found = devices(metafunc.config.getoption("--gpu-device"))
        # Without one, the test is there all the same, to be skipped with the reason.
        metafunc.parametrize("gpu", found or ["cuda"], indirect=True)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Gpu:
    """Give a GPU; each test runs on all of them."""
    asked = request.config.getoption("--gpu-device")
    reason = missing()
    if asked != "cpu" and reason is not None:
        pytest.skip(reason)
    return Gpu(request.param)


@pytest.fixture
def real_gpu(gpu: Gpu) -> Gpu:
    """Give a GPU, for what a processor hasn't."""
    if not gpu.is_real:
        pytest.skip(_DRY.format("it has neither streams nor memory of its own"))
    return gpu


@pytest.fixture
def gpus(request: pytest.FixtureRequest) -> list[Gpu]:
    """Give two GPUs at least; the processor twice in a dry run."""
    asked = request.config.getoption("--gpu-device")
    if asked == "cpu":
        return [Gpu("cpu"), Gpu("cpu")]
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    found = devices(None)
    if len(found) < 2:
        pytest.skip(f"there is {len(found)} GPU, this takes two")
    return [Gpu(name) for name in found]


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
