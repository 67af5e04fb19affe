"""``forebay bench``: subjects in turn, each in its process, and what becomes of those that fail."""

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

from conftest import need_root, pattern, undocumented_keys
from forebay.bench import chart, figures, measure, payload, worker
from forebay.bench.crew import Lost, Member, crew
from forebay.bench.problem import Problem
from forebay.bench.subjects import COMPARISONS
from forebay.bench.subjects.fio import Setting, _block, parse_setting
from forebay.bench.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

SUBJECTS = COMPARISONS["tensors"]
COMMAND = [sys.executable, "-m", "forebay", "bench"]
PLAIN = ("--only", "forebay,forebay-ordinary,python,numpy")
LONG = ("--rounds", "100000")
SMALL = ("--size", "100003", "--tensor-size", "7,4097,1001", "--rounds", "2")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=110
    )


def run_json(*arguments: str | Path) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a long run, and return it once it has stored something."""
    before = set(directory.glob("forebay-bench-*"))
    child = subprocess.Popen(
        [*COMMAND, "--dir", str(directory), "--size", "1M", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(6000):
        if {path.parent for path in directory.glob("forebay-bench-*/[!.]*")} - before:
            return child
        assert child.poll() is None, child.communicate()
        time.sleep(0.01)
    child.kill()
    raise AssertionError(child.communicate())


def worker_of(child: subprocess.Popen[str], name: str) -> int:
    """Return the number of the process of a subject."""
    listed = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    for number in listed:
        words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
        if name.encode() in words:
            return int(number)
    raise AssertionError(f"{name} has no process among {listed}")


def test_odd_sizes_are_stored_loaded_and_compared(tmp_path: Path) -> None:
    found = run_json("--dir", tmp_path, *SMALL, *PLAIN)
    assert found["payload"] == {"bytes": 100003, "tensors": 59}
    assert [subject["name"] for subject in found["subjects"]] == PLAIN[1].split(",")
    for subject in found["subjects"]:
        assert subject["checked"] is True
        assert subject["failure"] is None
        for way in ("store", "load"):
            assert len(subject[way]["seconds"]) == 2
            assert subject[way]["time_ratio"]["median"] > 0
    assert os.listdir(tmp_path) == []


def test_frameworks_and_loaders_have_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = run_json("--dir", tmp_path, *SMALL, "--only", "torch,safetensors,dcp")
    assert found["baseline"] is None
    checked = {subject["name"]: subject["checked"] for subject in found["subjects"]}
    assert checked["torch"] is True
    assert checked["dcp"] is True
    assert {subject["load"]["time_ratio"] for subject in found["subjects"]} == {None}


def test_the_json_has_every_key_that_the_docs_name(tmp_path: Path) -> None:
    found = run_json("--dir", tmp_path, *SMALL, "--only", "forebay,kvikio,instanttensor")
    assert next(iter(found)) == "schema"
    assert found["schema"] == "forebay.bench/1"
    assert not undocumented_keys(found, "bench.md", "forebay.bench/1")


@pytest.mark.parametrize(("option", "left"), [("--no-read", "store"), ("--no-write", "load")])
def test_one_way_alone_is_measured_and_compared_all_the_same(
    tmp_path: Path, option: str, left: str
) -> None:
    found = run_json("--dir", tmp_path, *SMALL, "--only", "forebay,python", option)
    for subject in found["subjects"]:
        assert {way for way in ("store", "load") if subject[way]} == {left}
        assert subject["checked"] is True
    assert os.listdir(tmp_path) == []


def test_every_subject_is_here_or_says_why_not(tmp_path: Path) -> None:
    found = run_json("--list", "--dir", tmp_path)
    assert [subject["name"] for subject in found["subjects"]] == list(SUBJECTS)
    reasons = {subject["name"]: subject["unavailable"] for subject in found["subjects"]}
    assert reasons["forebay"] is None
    assert reasons["python"] is None
    assert all(reason is None or reason.strip() for reason in reasons.values())


def test_a_subject_whose_process_is_killed_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    child = start(tmp_path, "--only", "forebay,python,numpy", "--rounds", "200", "--json")
    os.kill(worker_of(child, "python"), signal.SIGKILL)
    output, errors = child.communicate(timeout=110)
    assert (child.returncode, errors) == (1, "")
    subjects = {subject["name"]: subject for subject in json.loads(output)["subjects"]}
    assert "was killed by SIGKILL" in subjects["python"]["failure"]
    for name in ("forebay", "numpy"):
        assert subjects[name]["failure"] is None
        assert len(subjects[name]["load"]["seconds"]) == 200
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_neither_files_nor_processes(
    tmp_path: Path, number: signal.Signals
) -> None:
    child = start(tmp_path, *PLAIN, *LONG)
    mine = worker_of(child, "numpy")
    child.send_signal(number)
    output, errors = child.communicate(timeout=60)
    assert (child.returncode, output, errors) == (128 + number, "", "")
    assert os.listdir(tmp_path) == []
    assert not Path(f"/proc/{mine}").exists()


def test_two_at_once_leave_each_other_alone_and_a_dead_ones_files_go(tmp_path: Path) -> None:
    killed = start(tmp_path, *PLAIN, *LONG)
    (dead,) = tmp_path.glob("forebay-bench-*")
    live = start(tmp_path, *PLAIN, *LONG)
    (owned,) = set(tmp_path.glob("forebay-bench-*")) - {dead}
    try:
        killed.kill()
        killed.communicate()
        found = run_json("--dir", tmp_path, *SMALL, "--only", "forebay")
        assert found["subjects"][0]["checked"] is True
        assert not dead.exists()
        assert owned.exists()
        assert live.poll() is None
    finally:
        live.terminate()
        live.communicate(timeout=60)
    assert os.listdir(tmp_path) == []


class _Told:
    """A member that answers as told."""

    name = "python"

    def __init__(self, differs: str | None) -> None:
        self._differs = differs

    def do(self, **step: Any) -> dict[str, Any]:
        if step["do"] == "store":
            Path(step["path"]).write_bytes(b"bytes")
        took = {"seconds": 1.0, "cpu_seconds": 1.0, "extra_bytes": None}
        return {**took, "differs": self._differs if step.get("compare") else None}


def test_a_subject_with_wrong_bytes_fails_and_the_next_goes_on(tmp_path: Path) -> None:
    wrong, right = measure.Result(SUBJECTS["python"]), measure.Result(SUBJECTS["python"])
    pairs: Any = [(_Told("layers.3.weight"), wrong), (_Told(None), right)]
    measure.measure(pairs, str(tmp_path), 3, ["store", "load"], lambda _: None)
    assert wrong.failure == "tensor 'layers.3.weight' came back with different bytes"
    assert wrong.load == []
    assert not wrong.checked
    assert (right.failure, len(right.load), right.checked) == (None, 3, True)


def test_a_flipped_bit_is_found() -> None:
    tensors = [Tensor(name, "U8", (5000,), pattern(5000, index)) for index, name in enumerate("ab")]
    loaded = [tensor.data.copy() for tensor in tensors]
    assert worker.difference(tensors, loaded) is None
    loaded[1][-1] ^= 1
    assert worker.difference(tensors, loaded) == "b"


def test_a_layout_has_all_bytes_and_no_overlap() -> None:
    layout = payload.Layout.of([7, 4097, 64], 10_000)
    assert sum(layout.sizes) == 10_000
    ends = [place + size for place, size in zip(layout.places, layout.sizes, strict=True)]
    assert all(end <= place for end, place in zip(ends, layout.places[1:], strict=False))
    assert all(place % 64 == 0 for place in layout.places)
    assert ends[-1] <= layout.memory_bytes


def test_our_safetensors_file_is_one_to_the_library(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "model.safetensors"
    tensors = [Tensor("a", "F32", (3, 7), pattern(84)), Tensor("b", "U8", (5,), pattern(5, 1))]
    payload.write_safetensors(str(path), tensors)
    loaded = numpy.load_file(path)
    for tensor in tensors:
        assert loaded[tensor.name].shape == tensor.shape
        assert loaded[tensor.name].tobytes() == tensor.data.tobytes()


def test_ratios_are_of_the_same_rounds() -> None:
    def result(name: str, seconds: dict[int, float]) -> measure.Result:
        turns = [measure.Turn(number, time, 0.5, 7) for number, time in seconds.items()]
        return measure.Result(SUBJECTS[name], store=turns)

    ours, theirs = result("forebay", {0: 1.0, 1: 2.0, 2: 4.0}), result("numpy", {1: 6.0, 2: 8.0})
    ways = [figures._way(one.store, ours.store, (), 1 << 30) for one in (ours, theirs)]
    assert ways[0] is not None
    assert ways[1] is not None
    assert ways[0]["time_ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert ways[1]["time_ratio"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert ways[1]["cpu_seconds_per_gib"] == 0.5


def test_the_chart_is_a_page_that_needs_nothing_beside_itself(tmp_path: Path) -> None:
    path = tmp_path / "chart.html"
    done = run("--dir", tmp_path, *SMALL, "--only", "forebay,python", "--output", path)
    assert done.returncode == 0, done.stderr
    text = path.read_text(encoding="utf-8")
    assert "http" not in text
    assert "prefers-color-scheme: dark" in text
    pictures = text.split("<svg")[1:]
    assert len(pictures) == 2
    for picture in pictures:
        drawn = ET.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")
        assert len(drawn.findall(".//rect")) == 2


@pytest.mark.parametrize("most", [0.0007, 0.9, 1.0, 3.7, 12.0, 999.0])
def test_ticks_reach_what_is_shown_and_not_far_beyond(most: float) -> None:
    end = chart._step(most) * 5
    assert most <= end * (1 + 1e-9)
    assert end <= 2.5 * most


def test_settings_of_fio_are_read_and_refused() -> None:
    assert parse_setting("libaio:64k:8") == Setting("libaio", 64 << 10, 8, 1)
    assert parse_setting("io_uring:4M:8:2") == Setting("io_uring", 4 << 20, 8, 2)
    for text in (
        "libaio",
        "libaio:1M",
        "libaio:1X:8",
        "libaio:7:8",
        ":1M:8",
        "a:1M:0",
        "a:1M:1:1:1",
    ):
        with pytest.raises(Problem, match="--fio") as caught:
            parse_setting(text)
        assert caught.value.code == 2


def test_fio_moves_nearly_all_of_a_stripe_whatever_its_size() -> None:
    page, mebi = 4096, 1 << 20
    assert _block(2 * mebi, 4 * mebi) == 2 * mebi
    assert _block(2 * mebi, 40 * mebi + page) == 2 * mebi
    for pages in [*range(1, 1200), 4097, 9973]:
        for wanted in (512, page, mebi, 2 * mebi):
            stripe = pages * page
            block = _block(wanted, stripe)
            assert 0 < block <= wanted
            assert block % 512 == 0
            assert stripe // block * block * 10 >= stripe * 9, (pages, wanted)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--only", "nonsense"), "'nonsense' is not known; these are: forebay, "),
        (("--skip", ",".join(SUBJECTS)), "nothing left to compare"),
        (("--size", "0"), "at least 1 byte"),
        (("--tensor-size", "1"), "tensors, 65536 are the most"),
        (("--fio", "x"), "ENGINE:BLOCK:DEPTH"),
    ],
)
def test_wrong_use_is_said_to_be_so(tmp_path: Path, words: tuple[str, str], text: str) -> None:
    done = run("--dir", tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_what_is_no_place_to_store_in_is_refused(
    tmp_path: Path, mount: Callable[..., Path], small_ext4: Path
) -> None:
    memory = mount("-t", "tmpfs", "-o", "size=64k", "none")
    for directory, text in (
        (tmp_path / "none", "is not a directory"),
        (memory, "tmpfs, which is memory"),
        (small_ext4, "are needed"),
    ):
        done = run("--dir", directory, "--size", "20M")
        assert (done.returncode, done.stdout) == (3, "")
        assert text in done.stderr


def test_a_read_only_directory_is_said_to_be_so(small_ext4: Path) -> None:
    need_root()
    subprocess.run(["mount", "-o", "remount,ro", str(small_ext4)], check=True)
    done = run("--dir", small_ext4, *SMALL)
    assert done.returncode == 3
    assert "cannot write in" in done.stderr


def test_a_drive_that_fills_up_on_the_way_is_said_to_be_full(small_ext4: Path) -> None:
    layout = payload.Layout.of([1 << 20], 20 << 20)
    number = payload.make(layout)
    try:
        with crew("tensors", ["python"], number, str(small_ext4)) as (member,):
            member.do(
                do="setup", fio=None, compile=False, device="cpu", look=False, layout=vars(layout),
                directory=str(small_ext4),
            )  # fmt: skip
            with pytest.raises(Problem, match="is full") as caught:
                member.do(do="store", path=str(small_ext4 / "file"))
    finally:
        os.close(number)
    assert caught.value.code == 3


def test_a_process_that_cannot_be_spoken_to_is_lost_with_its_last_words(tmp_path: Path) -> None:
    number = os.memfd_create("nothing")
    member = Member("tensors", "no-such-subject", number, str(tmp_path))
    try:
        with pytest.raises(Lost, match=r"ended with code 1: .*KeyError"):
            member.do(do="setup")
    finally:
        member.end()
        os.close(number)


def test_a_chart_that_cannot_be_written_is_refused_before_measuring(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "chart.html"):
        done = run("--dir", tmp_path, *SMALL, "--output", path)
        assert done.returncode == 3
        assert f"cannot write {path}: " in done.stderr


def test_a_reader_that_goes_away_is_taken_in_silence(tmp_path: Path) -> None:
    script = 'set -o pipefail; "$@" | head -1'
    arguments = [*COMMAND, "--dir", str(tmp_path), *SMALL, *PLAIN]
    done = subprocess.run(
        ["bash", "-c", script, "bash", *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("59 tensors")
