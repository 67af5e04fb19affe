"""Files striped over directories: right bytes, or an error that names the drive."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import forebay
from conftest import need_root, pattern
from forebay.errors import (
    FileMissingError,
    InvalidInputError,
    MismatchError,
    OperationCancelledError,
    ShortFileError,
    SystemCallError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STRIPE = 4096
NAME = "weights.bin"


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"drive-{index}" for index in range(3)]
    for directory in made:
        directory.mkdir()
    return made


@pytest.fixture
def striped(directories: list[Path]) -> Iterator[forebay.Handle]:
    with forebay.Handle(stripe=directories, stripe_size=STRIPE) as handle:
        yield handle


def load(handle: forebay.Handle, length: int, offset: int = 0, name: str = NAME) -> bytes:
    back = np.full(length, 0xEE, np.uint8)
    handle.load(back, name, offset)
    return back.tobytes()


def joined(directories: list[Path], name: str = NAME, stripe: int = STRIPE) -> bytes:
    """Put a file together from its members, by the layout that the docs describe."""
    members = [(directory / name).read_bytes() for directory in directories]
    longest = max(len(member) for member in members)
    return b"".join(
        member[row : row + stripe] for row in range(0, longest, stripe) for member in members
    )


@pytest.mark.parametrize(
    "length", [0, 1, 4095, 4096, 4097, 8192, 12288, 12289, 24575, 100_003, 3 * (1 << 20) + 100]
)
def test_every_length_comes_back_and_lies_where_the_layout_says(
    striped: forebay.Handle, directories: list[Path], length: int
) -> None:
    data = pattern(length)
    striped.store(data, NAME)
    assert load(striped, length) == data.tobytes()
    assert joined(directories) == data.tobytes()
    assert striped.stripe is not None
    assert striped.stripe.size(NAME) == length
    sizes = [(directory / NAME).stat().st_size for directory in directories]
    for directory in directories:
        manifest = json.loads((directory / f"{NAME}.stripe.json").read_text())
        assert manifest["member_bytes"] == sizes
        assert manifest["logical_bytes"] == length


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("shift", [0, 1, 64])
def test_any_number_of_directories_takes_arrays_at_any_address(
    tmp_path: Path, count: int, shift: int
) -> None:
    directories = [tmp_path / str(index) for index in range(count)]
    for directory in directories:
        directory.mkdir()
    data = pattern(count * 3 * STRIPE + 777 + shift)[shift:]
    with forebay.Handle(stripe=directories, stripe_size=STRIPE) as handle:
        handle.store(data, NAME)
        back = np.zeros(len(data) + shift, np.uint8)[shift:]
        handle.load(back, NAME)
        assert np.array_equal(back, data)
        assert load(handle, 5000, 4000) == data[4000:9000].tobytes()
    assert joined(directories) == data.tobytes()


def test_a_longer_file_leaves_no_tail_in_any_member(
    striped: forebay.Handle, directories: list[Path]
) -> None:
    for length in (100_000, 12_289, 1, 0, 5000):
        striped.store(pattern(length, length), NAME)
        assert joined(directories) == pattern(length, length).tobytes()
        with pytest.raises(ShortFileError, match=str(length)):
            load(striped, length + 1)


def test_a_store_at_an_offset_keeps_the_rest_and_grows_the_file(
    striped: forebay.Handle, directories: list[Path]
) -> None:
    expected = bytearray(pattern(20_001).tobytes())
    striped.store(bytes(expected), NAME)
    for offset, length in [(100, 4096), (0, 1), (19_999, 5), (30_000, 10), (90_000, 1), (0, 9000)]:
        new = pattern(length, offset).tobytes()
        striped.store(new, NAME, offset=offset)
        expected.extend(bytes(max(0, offset + length - len(expected))))
        expected[offset : offset + length] = new
        assert load(striped, len(expected)) == bytes(expected)
        assert striped.stripe is not None
        assert striped.stripe.size(NAME) == len(expected)
    assert joined(directories) == bytes(expected)


def test_stores_at_offsets_of_a_new_file_side_by_side_make_it_together(
    striped: forebay.Handle,
) -> None:
    data = pattern(300_007)
    for start in range(0, len(data), 10_007):
        striped.store_async(data[start : start + 10_007], NAME, offset=start)
    striped.wait()
    assert load(striped, len(data)) == data.tobytes()


def test_many_files_and_arrays_go_in_one_operation(striped: forebay.Handle) -> None:
    items = [(pattern(5000 + index, index), f"layers/{index}/w") for index in range(20)]
    operation = striped.store_many_async(items)
    operation.wait()
    assert operation.bytes_done == operation.bytes_total == sum(len(a) for a, _ in items)
    backs = [np.zeros_like(array) for array, _ in items]
    striped.load_many([(back, name) for back, (_, name) in zip(backs, items, strict=True)])
    for back, (array, _) in zip(backs, items, strict=True):
        assert np.array_equal(back, array)
    one = [(pattern(4000, 1), "one", 0), (pattern(9000, 2), "one", 50_000)]
    striped.store_many(one, whole_file=True)
    expected = one[0][0].tobytes() + bytes(46_000) + one[1][0].tobytes()
    assert load(striped, len(expected), name="one") == expected


def test_it_can_be_awaited_cancelled_and_given_a_priority(directories: list[Path]) -> None:
    data = pattern(4 << 20)
    with forebay.Handle(stripe=directories) as handle:

        async def round_trip() -> bytes:
            await handle.store_async(data, NAME, durability="full", priority="prefetch")
            back = np.zeros_like(data)
            await handle.load_async(back, NAME)
            return back.tobytes()

        assert asyncio.run(round_trip()) == data.tobytes()
    with forebay.Handle(
        stripe=directories, throttle="2MiB", block_size="64KiB", queue_depth=2
    ) as slow:
        operation = slow.store_async(data, "new.bin")
        operation.cancel()
        with pytest.raises(OperationCancelledError):
            operation.wait()
        assert slow.stripe is not None
        assert not slow.stripe.exists("new.bin")
        assert not [path for one in directories for path in one.glob("new*")]


def test_the_last_of_many_stores_of_one_name_stays(
    striped: forebay.Handle, directories: list[Path]
) -> None:
    for turn in range(30):
        data = [pattern(20_000 + 4096 * index, turn + index) for index in range(5)]
        for one in data[:-1]:
            striped.store_async(one, NAME)
        striped.store_async(data[-1][:17], NAME, offset=5)
        striped.store_async(data[-1], NAME).wait()
        striped.wait()
        assert load(striped, len(data[-1])) == data[-1].tobytes()
    assert joined(directories) == data[-1].tobytes()


def test_a_cancelled_store_does_not_undo_a_later_one(directories: list[Path]) -> None:
    with forebay.Handle(
        stripe=directories, throttle="32MiB", block_size="64KiB", queue_depth=2
    ) as handle:
        for turn in range(5):
            first = handle.store_async(pattern(2 << 20, 1), NAME)
            second = handle.store_async(pattern(300_001, turn), NAME)
            time.sleep(0.01 * turn)
            first.cancel()
            second.wait()
            assert load(handle, 300_001) == pattern(300_001, turn).tobytes()
            with pytest.raises(OperationCancelledError):
                first.wait()


def test_a_load_never_mixes_two_stores(directories: list[Path]) -> None:
    """Loads while another handle stores over and over: one content, or an error."""
    length = 1 << 20
    seen = set()
    with forebay.Handle(stripe=directories) as writer, forebay.Handle(stripe=directories) as reader:
        writer.store(np.zeros(length, np.uint8), NAME)
        for value in range(1, 60):
            operation = writer.store_async(np.full(length, value, np.uint8), NAME)
            back = np.zeros(length, np.uint8)
            try:
                reader.load(back, NAME)
            except MismatchError as error:
                assert NAME in str(error)  # noqa: PT017 (either outcome is right)
            else:
                assert (back == back[0]).all()
                seen.add(int(back[0]))
            operation.wait()
        assert load(writer, length) == bytes([59]) * length


def test_two_handles_do_not_store_to_one_file_at_once(directories: list[Path]) -> None:
    slow = {"throttle": "8MiB", "block_size": "64KiB", "queue_depth": 2}
    with (
        forebay.Handle(stripe=directories, **slow) as one,
        forebay.Handle(stripe=directories[::-1]) as other,
    ):
        one.store(b"old", NAME)
        operation = one.store_async(pattern(2 << 20), NAME)
        while operation.bytes_done == 0:
            time.sleep(0.001)
        for offset in (None, 0):
            with pytest.raises(SystemCallError) as caught:
                other.store(b"mine", NAME, offset)
            assert caught.value.errno == errno.EBUSY or "hasn't finished" in str(caught.value)
        operation.wait()
        assert load(other, 2 << 20) == pattern(2 << 20).tobytes()


# Drives that are missing, full or failing


def test_a_missing_member_is_named_and_is_never_an_empty_one(
    striped: forebay.Handle, directories: list[Path]
) -> None:
    striped.store(pattern(50_000), NAME)
    for index, directory in enumerate(directories):
        kept = directory.with_suffix(".kept")
        shutil.copytree(directory, kept)
        for part in (NAME, f"{NAME}.stripe.json", "*"):
            for path in list(directory.glob(part)):
                path.unlink()
            with pytest.raises(FileMissingError) as caught:
                load(striped, 50_000)
            assert str(caught.value.filename).startswith(str(directory)), index
            assert striped.stripe is not None
            with pytest.raises(FileNotFoundError):
                striped.stripe.verify(NAME)
            if part != NAME:
                with pytest.raises(FileMissingError, match="is its drive mounted"):
                    striped.store(b"not over the rest", NAME)
        for path in kept.iterdir():
            shutil.copy(path, directory)
    assert load(striped, 50_000) == pattern(50_000).tobytes()


def test_a_drive_that_is_unmounted_or_mounted_over_is_named(
    mount: Callable[..., Path], tmp_path: Path
) -> None:
    drive = mount("-t", "tmpfs", "-o", "size=1m", "tmpfs")
    other = tmp_path / "other"
    other.mkdir()
    with forebay.Handle(stripe=[other, drive], stripe_size=STRIPE) as handle:
        handle.store(pattern(20_000), NAME)
        subprocess.run(["umount", "--lazy", str(drive)], check=True)
        try:
            for act in (lambda: load(handle, 20_000), lambda: handle.store(b"x", NAME)):
                with pytest.raises(SystemCallError, match="is its drive mounted") as caught:
                    act()
                assert str(caught.value.filename) == str(drive)
            # A handle that is made only now finds an empty directory.
            with forebay.Handle(stripe=[other, drive]) as late:
                with pytest.raises(FileMissingError) as caught:
                    load(late, 20_000)
                assert str(drive) in str(caught.value.filename)
                with pytest.raises(FileMissingError, match="is its drive mounted"):
                    late.store(b"x", NAME)
            assert list(drive.iterdir()) == []
        finally:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(drive)], check=True)


def test_a_removed_directory_is_named(striped: forebay.Handle, directories: list[Path]) -> None:
    striped.store(pattern(50_000), NAME)
    shutil.rmtree(directories[1])
    for act in (lambda: load(striped, 50_000), lambda: striped.store(b"x", NAME)):
        with pytest.raises(FileMissingError) as caught:
            act()
        assert caught.value.filename == str(directories[1])
    assert not directories[1].exists()
    with pytest.raises(FileNotFoundError, match="mount its drive"):
        forebay.Stripe(directories)


@pytest.mark.parametrize("engine", ["uring", "aio", "threads"])
def test_a_full_drive_is_named_and_the_old_file_stays(
    small_ext4: Path, tmp_path: Path, engine: str
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    old = pattern(1 << 20)
    with forebay.Handle(engine, stripe=[other, small_ext4], stripe_size="64KiB") as handle:
        handle.store(old, NAME)
        with pytest.raises(OSError, match="No space left") as caught:
            handle.store(pattern(32 << 20), NAME)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(small_ext4 / NAME)
        assert load(handle, len(old)) == old.tobytes()
        with pytest.raises(OSError, match="No space left"):
            handle.store(pattern(32 << 20), "new.bin")
        assert handle.stripe is not None
        assert not handle.stripe.exists("new.bin")
        assert not list(other.glob("new*"))
        assert not list(small_ext4.glob("new*"))
        handle.store(old[:5], NAME)
        assert load(handle, 5) == old[:5].tobytes()


@pytest.mark.parametrize(
    ("call", "said"), [("pwrite64", "store"), ("pread64", "load"), ("fsync", "store")]
)
def test_a_failing_drive_is_named(directories: list[Path], call: str, said: str) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    bad = directories[1] / NAME
    code = f"""
        import forebay, numpy as np
        data = np.arange(1_000_000, dtype=np.int32)
        with forebay.Handle("threads", stripe={[str(one) for one in directories]!r},
                            stripe_size="64KiB", page_cache=False) as handle:
            handle.store(data, {NAME!r}, durability="full")
            handle.load(np.empty_like(data), {NAME!r})
    """
    bad.touch()
    inject = ["-P", str(bad), "-e", f"inject={call}:error=EIO:when=1+"]
    done = subprocess.run(
        ["strace", "-f", "-qq", "-o", "/dev/null", *inject, sys.executable, "-c",
         textwrap.dedent(code)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if "ptrace" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode != 0
    assert "os error 5" in done.stderr
    assert f"{said}: " in done.stderr
    assert str(bad) in done.stderr
    if said == "store":
        with (
            forebay.Handle(stripe=directories) as handle,
            pytest.raises((MismatchError, FileMissingError)),
        ):
            load(handle, 4_000_000)


def test_members_of_different_stores_are_not_taken_for_one_file(
    striped: forebay.Handle, directories: list[Path]
) -> None:
    striped.store(pattern(50_000, 1), NAME)
    shutil.copytree(directories[2], directories[2].with_suffix(".old"))
    striped.store(pattern(50_000, 2), NAME)
    for path in directories[2].with_suffix(".old").iterdir():
        shutil.copy(path, directories[2])
    with pytest.raises(MismatchError, match="different stores") as caught:
        load(striped, 50_000)
    assert caught.value.filename == str(directories[2] / NAME)
    striped.store(pattern(50_000, 3), NAME)
    assert load(striped, 50_000) == pattern(50_000, 3).tobytes()


def test_a_cut_member_and_a_damaged_manifest_are_named(
    striped: forebay.Handle, directories: list[Path]
) -> None:
    striped.store(pattern(50_000), NAME)
    os.truncate(directories[0] / NAME, 100)
    with pytest.raises(MismatchError, match=r"100 of \d+ bytes") as caught:
        load(striped, 10)
    assert caught.value.filename == str(directories[0] / NAME)
    manifest = directories[2] / f"{NAME}.stripe.json"
    for text in ("", "{", "[]", '{"format": "forebay-stripe"}', "x" * 100_000):
        manifest.write_text(text)
        with pytest.raises(MismatchError, match="damaged") as caught:
            load(striped, 10)
        assert caught.value.filename == str(manifest)
    striped.store(pattern(7), NAME)
    assert load(striped, 7) == pattern(7).tobytes()


WRITER = """
    import forebay, numpy as np, sys
    with forebay.Handle(stripe={directories!r}, stripe_size="64KiB", block_size="64KiB",
                        queue_depth=2) as handle:
        print("ready", flush=True)
        value = int(sys.argv[1])
        while True:
            value = value % 255 + 1
            handle.store(np.full(1_000_000 + value * 4097, value, np.uint8), {name!r})
"""


def test_a_killed_writer_leaves_old_or_new_or_a_clear_error(directories: list[Path]) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    code = textwrap.dedent(
        WRITER.format(directories=[str(directory) for directory in directories], name=NAME)
    )
    with forebay.Handle(stripe=directories) as handle:
        assert handle.stripe is not None
        for turn in range(30):
            writer = subprocess.Popen(
                [sys.executable, "-c", code, str(turn)], stdout=subprocess.PIPE, text=True
            )
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
            try:
                size = handle.stripe.size(NAME)
                data = np.frombuffer(load(handle, size), np.uint8)
            except MismatchError as error:
                assert "store it again" in str(error)  # noqa: PT017 (either outcome is right)
            except FileMissingError:
                assert not handle.stripe.exists(NAME)
            else:
                assert len(data) == 1_000_000 + int(data[0]) * 4097, f"seed {seed}"
                assert (data == data[0]).all(), f"seed {seed}"
        handle.store(b"and it can be stored again", NAME)
        assert load(handle, 26) == b"and it can be stored again"


# What users say


def test_directories_may_come_in_another_order(directories: list[Path]) -> None:
    data = pattern(50_000)
    with forebay.Handle(stripe=directories, stripe_size=STRIPE) as handle:
        handle.store(data, NAME)
    with forebay.Handle(stripe=directories[::-1], stripe_size="64KiB") as handle:
        assert load(handle, 50_000) == data.tobytes()
        handle.store(b"in place", NAME, offset=40_000)
        expected = data.tobytes()[:40_000] + b"in place" + data.tobytes()[40_008:]
        assert load(handle, 50_000) == expected
        assert joined(directories) == expected


def test_too_few_or_too_many_directories_are_told(directories: list[Path], tmp_path: Path) -> None:
    with forebay.Handle(stripe=directories, stripe_size=STRIPE) as handle:
        handle.store(pattern(50_000), NAME)
    with (
        forebay.Handle(stripe=[directories[0], directories[2]]) as handle,
        pytest.raises(FileMissingError, match=r"has 3 members.*none has member 1"),
    ):
        load(handle, 50_000)
    more = tmp_path / "more"
    more.mkdir()
    with forebay.Handle(stripe=[*directories, more]) as handle:
        with pytest.raises(MismatchError, match="has 3 members") as caught:
            load(handle, 50_000)
        assert str(more) in str(caught.value.filename)


def test_a_directory_given_twice_is_refused_under_any_name(
    directories: list[Path], tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(directories[0])
    for twin in (directories[0], link, directories[1] / ".." / directories[0].name):
        with pytest.raises(InvalidInputError, match="twice"):
            forebay.Stripe([directories[0], directories[1], twin])


def test_a_bind_mount_of_a_directory_is_the_same_directory(
    mount: Callable[..., Path], directories: list[Path]
) -> None:
    need_root()
    with pytest.raises(InvalidInputError, match="twice"):
        forebay.Stripe([directories[0], mount("--bind", str(directories[0]))])


def test_directories_on_one_device_are_allowed_and_logged_once(
    directories: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "forebay"):
        for _ in range(3):
            forebay.Handle(stripe=directories[:2]).close()
    assert len([text for text in caplog.messages if "on one device" in text]) == 1


@pytest.mark.parametrize("size", [0, 1, 4095, 6000, "1KiB", (1 << 30) + 4096])
def test_stripe_sizes_out_of_bounds_are_refused(directories: list[Path], size: int | str) -> None:
    with pytest.raises(InvalidInputError, match="multiple of 4096"):
        forebay.Handle(stripe=directories, stripe_size=size)


def test_arguments_that_do_not_fit_together_are_refused(directories: list[Path]) -> None:
    with pytest.raises(InvalidInputError, match="1 to 64"):
        forebay.Stripe([])
    with pytest.raises(TypeError, match="list of directories"):
        forebay.Stripe(str(directories[0]))
    with pytest.raises(InvalidInputError, match="without stripe"):
        forebay.Handle(stripe_size="1MiB")
    with pytest.raises(InvalidInputError, match="already"):
        forebay.Handle(stripe=forebay.Stripe(directories), stripe_size="1MiB")


def test_names_that_lead_elsewhere_are_refused(
    striped: forebay.Handle, directories: list[Path]
) -> None:
    absolute = directories[0] / NAME
    for name in (absolute, str(absolute), "../w", "a/../../w", ".", f"{NAME}.stripe.json"):
        for act in (striped.store, striped.load):
            with pytest.raises(ValueError, match="name"):
                act(bytearray(5), name)
    with (directories[0] / "open").open("wb") as file, pytest.raises(ValueError, match="name"):
        striped.store(b"x", file)


def test_modes_follow_the_umask_and_those_of_old_files_stay(
    striped: forebay.Handle, directories: list[Path]
) -> None:
    before = os.umask(0o027)
    try:
        striped.store(pattern(50_000), NAME)
    finally:
        os.umask(before)
    parts = [path for directory in directories for path in directory.iterdir()]
    assert len(parts) == 6
    assert {path.stat().st_mode & 0o777 for path in parts} == {0o640}
    for path in parts:
        path.chmod(0o606)
    striped.store(pattern(60_000), NAME)
    assert {path.stat().st_mode & 0o777 for path in parts} == {0o606}


def test_a_file_is_removed_from_all_directories(
    striped: forebay.Handle, directories: list[Path]
) -> None:
    stripe = striped.stripe
    assert stripe is not None
    striped.store(pattern(50_000), NAME)
    assert stripe.exists(NAME)
    (directories[1] / NAME).unlink()
    # What a store leaves that is killed while it writes a manifest.
    (directories[0] / f"{NAME}.stripe.json.new").write_text("{")
    stripe.remove(NAME)
    assert not stripe.exists(NAME)
    assert not [path for directory in directories for path in directory.iterdir()]
    with pytest.raises(FileNotFoundError):
        stripe.remove(NAME)


def test_a_pipe_in_the_place_of_a_manifest_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    drives = [tmp_path / "one", tmp_path / "two"]
    for drive in drives:
        drive.mkdir()
    array = pattern(3 * STRIPE)
    with forebay.Handle(stripe=drives, stripe_size=STRIPE) as handle:
        handle.store(array, NAME)
        manifest = drives[1] / f"{NAME}.stripe.json"
        manifest.unlink()
        os.mkfifo(manifest)
        for use in (handle.load, handle.store):
            with pytest.raises(SystemCallError, match="pipe") as caught:
                use(array, NAME)
            assert caught.value.filename == str(manifest)
