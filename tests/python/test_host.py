"""What the host allows: refused engines, small installations, short imports."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import forebay
from conftest import run_python
from forebay import _forebay

if TYPE_CHECKING:
    from pathlib import Path

IO_URING_SETUP = 425
IO_SETUP = 206

ROUND_TRIP = """
    import logging, forebay
    logging.basicConfig(format="LOG %(message)s")
    with forebay.Handle() as handle:
        data = bytes(range(256)) * 8192 + b"odd"
        handle.store(data, {path!r})
        back = bytearray(len(data))
        handle.load(back, {path!r})
        assert back == data
        print(handle.engine)
    with forebay.Handle() as handle:
        pass
"""


@pytest.mark.parametrize("code", [1, 38, 13], ids=["EPERM", "ENOSYS", "EACCES"])
@pytest.mark.parametrize(
    ("calls", "engine"),
    [([IO_URING_SETUP], "aio"), ([IO_URING_SETUP, IO_SETUP], "threads")],
    ids=["no io_uring", "neither"],
)
def test_a_refused_engine_falls_back_with_one_line_of_log(
    deny_syscalls: str, path: Path, code: int, calls: list[int], engine: str
) -> None:
    refused = ",".join(map(str, calls))
    wrapper = [deny_syscalls, "--errno", str(code), refused]
    done = run_python(ROUND_TRIP.format(path=str(path)), *wrapper)
    assert done.stdout == f"{engine}\n"
    lines = [line for line in done.stderr.splitlines() if "uring" in line]
    assert len(lines) == 1, done.stderr
    assert path.read_bytes() == bytes(range(256)) * 8192 + b"odd"


def test_an_engine_by_name_is_that_or_an_error(deny_syscalls: str) -> None:
    run_python(
        """
        import forebay
        try:
            forebay.Handle("uring")
        except forebay.ForebayError as error:
            assert "uring" in str(error)
        else:
            raise AssertionError("it was refused, and yet there")
        print(forebay.probe_engines())
        """,
        deny_syscalls,
        str(IO_URING_SETUP),
    )


def test_notices_are_logged_once_whatever_the_number_of_handles(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Core:
        def notices(self) -> list[str]:
            return ["this happened"]

    monkeypatch.setattr("forebay.handle._logged", set())
    with caplog.at_level(logging.WARNING, "forebay"):
        for _ in range(2):
            handle = forebay.Handle.__new__(forebay.Handle)
            handle._core = Core()  # type: ignore[assignment]
            handle._closed = True
            handle._log_notices()
    assert [record.message for record in caplog.records] == ["this happened"]


def test_importing_brings_in_no_framework_and_no_numpy() -> None:
    done = run_python(
        """
        import sys
        before = set(sys.modules)
        import forebay
        heavy = {"numpy", "torch", "jax", "asyncio", "ml_dtypes", "safetensors", "multiprocessing"}
        print(sorted(heavy & (set(sys.modules) - before)))
        """
    )
    assert done.stdout == "[]\n"


def test_bytes_can_be_moved_without_numpy(path: Path) -> None:
    run_python(
        f"""
        import sys
        sys.modules["numpy"] = sys.modules["torch"] = None
        import forebay
        with forebay.Handle() as handle:
            handle.store(b"abc", {str(path)!r})
            back = bytearray(3)
            handle.load(back, {str(path)!r})
            assert back == b"abc"
        """
    )


def test_the_shared_object_needs_only_libc_and_its_kin() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    done = subprocess.run(
        ["readelf", "-d", str(_forebay.__file__)], capture_output=True, text=True, check=True
    )
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", done.stdout))
    kin = {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libdl.so.2"}
    loader = {name for name in needed if name.startswith("ld-linux")}
    assert needed - kin - loader == set()


def test_the_module_is_built_for_the_stable_abi() -> None:
    assert str(_forebay.__file__).endswith("_forebay.abi3.so")


def test_the_facts_of_files_and_directories_are_told(path: Path) -> None:
    path.write_bytes(bytes(5000))
    facts = forebay.file_facts(path)
    assert facts["size"] == 5000
    assert facts["direct"] == (facts["reason"] is None)
    assert forebay.file_facts(str(path.parent))["direct"] == facts["direct"]
    with pytest.raises(FileNotFoundError):
        forebay.file_facts(path / "missing" if False else path.with_name("missing"))


def test_engines_are_probed_in_order_of_preference() -> None:
    probes = forebay.probe_engines()
    assert [name for name, _, _ in probes] == ["uring", "aio", "threads"]
    assert probes[2][1]
    assert all(isinstance(detail, str) for _, _, detail in probes)


def test_idle_handles_use_no_processor() -> None:
    import resource
    import time

    with forebay.Handle(intra_op_parallelism=8) as handle:
        handle.stats()
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(0.5)
        after = resource.getrusage(resource.RUSAGE_SELF)
    # A spinning worker would be switched out hundreds of times; a sleeping one isn't at all.
    assert after.ru_nivcsw - before.ru_nivcsw < 100
    assert sys.version_info >= (3, 10)
