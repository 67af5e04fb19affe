"""``forebay bench --what files``: what is measured of files, cold, warm and in the background."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from conftest import pattern, undocumented_keys
from forebay import _forebay
from forebay.bench import background, chart, choice, figures, measure, report, worker
from forebay.bench.payload import Layout
from forebay.bench.problem import Problem
from forebay.bench.subjects import COMPARISONS
from forebay.bench.subjects.subject import Settings
from forebay.bench.tensor import Tensor
from test_bench_command import run, run_json

if TYPE_CHECKING:
    from pathlib import Path

SUBJECTS = COMPARISONS["files"]
FILES = ("--what", "files")
SMALL = ("--size", "100003", "--rounds", "2")
COST = {
    "copy_seconds": 1.0,
    "blocked_seconds": 1.25,
    "total_seconds": 4.0,
    "compute_loss": 0.03,
}


def test_every_library_has_the_same_bytes_cold_and_warm(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors", minversion="0.8")
    names = ["safetensors", "safetensors-pread", "torch-mmap", "dcp-hf"]
    arguments = ("--tensor-count", "59", "--only", ",".join(names))
    found = run_json(*FILES, "--dir", tmp_path, *SMALL, *arguments)
    assert found["schema"] == "forebay.bench.files/1"
    (part,) = found["files"]
    assert part["payload"] == {"bytes": 100003, "tensors": 59}
    assert [subject["name"] for subject in part["subjects"]] == names
    for subject in part["subjects"]:
        assert subject["checked"] is True
        assert subject["failure"] is None
        assert (subject["store"] is not None) == (subject["name"] == "safetensors")
        for way in ("load", "warm"):
            assert len(subject[way]["seconds"]) == 2
            assert subject[way]["touch_seconds"] > 0
    assert os.listdir(tmp_path) == []


def test_the_loaders_that_are_here_have_the_same_bytes(tmp_path: Path) -> None:
    names = ["runai", "fastsafetensors", "forebay", "forebay-foreign", "forebay-checkpoint"]
    listed = run_json(*FILES, "--list", "--dir", tmp_path, "--only", ",".join(names))
    here = [row["name"] for row in listed["subjects"] if row["unavailable"] is None]
    if not here:
        pytest.skip("none of them is installed")
    arguments = ("--tensor-count", "7", "--only", ",".join(here))
    found = run_json(*FILES, "--dir", tmp_path, *SMALL, *arguments)
    assert all(subject["checked"] for subject in found["files"][0]["subjects"])


def test_each_count_has_a_part_and_pictures_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    path = tmp_path / "files.html"
    arguments = ("--tensor-count", "3,40", "--only", "safetensors", "--output", path)
    done = run(*FILES, "--dir", tmp_path, *SMALL, *arguments)
    assert done.returncode == 0, done.stderr
    for words in ("3 tensors, ", "40 tensors, ", "store, on the drive", "load, warm cache"):
        assert words in done.stdout
    pictures = path.read_text(encoding="utf-8").split("<svg")[1:]
    assert len(pictures) == 2 * len(figures.WAYS)
    for picture in pictures:
        ET.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")


def test_without_loading_only_what_is_stored_is_compared(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors", minversion="0.8")
    only = "safetensors,safetensors-pread,torch-mmap"
    arguments = ("--no-read", "--tensor-count", "3", "--only", only)
    (part,) = run_json(*FILES, "--dir", tmp_path, *SMALL, *arguments)["files"]
    (subject,) = part["subjects"]
    assert (subject["load"], subject["warm"]) == (None, None)
    assert len(subject["store"]["seconds"]) == 2
    assert subject["checked"] is True
    assert {left["name"] for left in part["left_out"]} == {"safetensors-pread", "torch-mmap"}


def test_every_subject_is_here_or_says_why_not(tmp_path: Path) -> None:
    found = run_json(*FILES, "--list", "--dir", tmp_path)
    assert [subject["name"] for subject in found["subjects"]] == list(SUBJECTS)
    reasons = [subject["unavailable"] for subject in found["subjects"]]
    assert all(reason is None or reason.strip() for reason in reasons)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((*FILES, "--only", "numpy"), "'numpy' is not known; these are: forebay, "),
        ((*FILES, "--tensor-size", "64M"), "goes with --what tensors"),
        (("--tensor-count", "40"), "goes with --what files"),
        ((*FILES, "--size", "1000000", "--tensor-count", "65536"), "pass more --size"),
        ((*FILES, "--tensor-count", "65537"), "65536 are the most"),
        ((*FILES, "--tensor-count", "0"), "0"),
    ],
)
def test_wrong_use_is_said_to_be_so(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    done = run("--dir", tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def options(**given: Any) -> dict[str, Any]:
    return {
        "what": "files", "only": [], "skip": [], "no_read": False, "no_write": False,
        "size": 1 << 20, "tensor_size": [], "tensor_count": [40, 5000], **given,
    }  # fmt: skip


def test_room_is_asked_for_all_files_that_there_are_at_once() -> None:
    only = ["forebay-foreign", "safetensors", "torch", "runai"]
    # Two that store, and the file that is given.
    assert choice.files_at_once(options(only=only)) == 4
    assert choice.files_at_once(options(only=only, no_write=True)) == 3
    # The one stored, the given one, and two checkpoints.
    assert choice.files_at_once(options(only=only, no_read=True)) == 4


@pytest.mark.parametrize(
    ("total", "count"), [(100003, 59), (2 << 30, 40), (2 << 30, 5000), (17, 1)]
)
def test_a_split_has_all_bytes_in_as_many_tensors(total: int, count: int) -> None:
    layout = Layout.split(total, count)
    assert len(layout.sizes) == count
    assert sum(layout.sizes) == total
    assert max(layout.sizes) - min(layout.sizes) <= 32
    assert all(size % 16 == 0 for size in layout.sizes[:-1])
    ends = [place + size for place, size in zip(layout.places, layout.sizes, strict=True)]
    assert all(end <= place for end, place in zip(ends, layout.places[1:], strict=False))


def test_too_small_a_size_is_refused_with_the_numbers() -> None:
    with pytest.raises(Problem, match="5000 tensors of 16 bytes are more than 1000"):
        choice.layouts(options(size=1000))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 4096, 4099])
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_reading_all_reads_every_byte(length: int, shift: int) -> None:
    array = np.zeros(length + shift, np.uint8)[shift:]
    sums = []
    for index in range(length):
        array[index] = 1
        sums.append(worker.read_all([np.zeros(3, np.uint8), array]))
        array[index] = 0
    whole = length // 8 * 8
    assert sums == [1 << 8 * (index % 8) if index < whole else 1 for index in range(length)]


def test_a_file_is_in_the_page_cache_when_warm_and_not_when_cold(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    size = (3 << 20) + 5
    for name in "ab":
        path = directory / name
        path.write_bytes(pattern(size).tobytes())
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    stays = measure.make_cold(str(directory))
    if stays != 0:
        pytest.skip("the page cache of this file system can't be dropped or looked at")
    assert measure.make_warm(str(directory)) == 0
    assert all(_forebay.cached_bytes(str(path)) >= size for path in directory.iterdir())


class _Told:
    """A member that takes down what it is told."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def do(self, **step: Any) -> dict[str, Any]:
        self.steps.append(step["do"])
        if step["do"] == "background":
            os.makedirs(step["path"], exist_ok=True)
            return COST
        if step["do"] == "store":
            with open(step["path"], "wb") as file:
                file.write(b"bytes")
        took = {"seconds": 2.0, "cpu_seconds": 1.0, "extra_bytes": None}
        return {**took, "differs": None, "touch_seconds": 0.5 * (step["do"] == "load")}


def test_files_are_stored_once_for_all_loads_and_saved_in_rounds_of_their_own(
    tmp_path: Path,
) -> None:
    (tmp_path / ".lock").touch()
    told, result = _Told(), measure.Result(SUBJECTS["forebay-checkpoint"])
    loads, stores = choice.phases(options())
    for ways in (loads, stores):
        measure.measure([(told, result)], str(tmp_path), 2, ways, lambda _: None)  # type: ignore[list-item]
        assert os.listdir(tmp_path) == [".lock"]
    first = ["store", "load", "load", "load", "load", "load"]
    second = ["store", "load", "background", "store", "background", "store", "background"]
    assert told.steps == first + second
    assert (result.failure, result.checked) == (None, True)
    for way in (result.store, result.load, result.warm, result.background):
        assert len(way) == 2


def document() -> dict[str, Any]:
    """Return a document in which everything was measured."""
    turns = [measure.Turn(number, 2.0, 0.5, 7, 0.5) for number in range(3)]
    faster = [measure.Turn(number, 1.0, 0.5, 7) for number in range(3)]
    ours = measure.Result(SUBJECTS["forebay"], load=turns, warm=turns, store=turns)
    ours.background = [COST, {**COST, "blocked_seconds": 0.75}, COST]
    fio = measure.Result(SUBJECTS["fio"], load=faster, store=faster)
    part = figures.part([ours, fio], Layout.split(1 << 30, 40), [("runai", "not installed")])
    return {"directory": "/nvme", "file_system": "ext4", "rounds": 3, "files": [part]}


def test_loads_are_compared_with_fio_without_the_touching() -> None:
    ours, fio = document()["files"][0]["subjects"]
    assert ours["load"]["fio_time_ratio"] == {"median": 1.5, "min": 1.5, "max": 1.5}
    assert ours["load"]["touch_seconds"] == 0.5
    assert fio["load"]["time_ratio"]["median"] == 0.5
    assert ours["warm"]["fio_time_ratio"] is None
    assert report.columns(ours["load"])[-2] == "67 %"


def test_a_save_in_the_background_is_shown_beside_the_copy() -> None:
    found = document()
    (part,) = found["files"]
    cost = part["subjects"][0]["background"]
    assert cost["blocked_copy_ratio"] == {"median": 1.25, "min": 0.75, "max": 1.25}
    shown = report.table(part)
    assert "save in the background" in shown
    assert "1.25 ×" in shown
    assert "computing lost" in chart.page(found)
    assert not undocumented_keys(found, "bench.md", "forebay.bench/1")


class _Save:
    """A save that is done when it has been asked a few times."""

    def __init__(self, failure: Exception | None) -> None:
        self.asked = self.waited = 0
        self._failure = failure

    def done(self) -> bool:
        self.asked += 1
        return self.asked == 5

    def wait(self) -> None:
        self.waited += 1
        if self._failure is not None:
            raise self._failure


class _Saver(SUBJECTS["forebay-checkpoint"]):  # type: ignore[misc]
    """A subject that takes down what it saves, and where."""

    def __init__(self, save: _Save) -> None:
        self.paths: list[str] = []
        self._save = save
        self._settings = Settings()

    def save_async(self, path: str) -> _Save:
        self.paths.append(path)
        return self._save


def test_a_loop_computes_until_the_save_is_done() -> None:
    tensors = [Tensor("a", "U8", (5000,), pattern(5000))]
    save = _Save(None)
    saver = _Saver(save)
    took = background.measure_background(saver, tensors, "/nvme/checkpoints")
    assert (saver.paths, save.asked, save.waited) == (["/nvme/checkpoints"], 5, 1)
    assert set(took) == set(COST)
    assert 0 < took["blocked_seconds"] <= took["total_seconds"]
    assert took["compute_loss"] < 1


def test_a_save_that_fails_in_the_background_is_told() -> None:
    tensors = [Tensor("a", "U8", (1,), pattern(1))]
    with pytest.raises(OSError, match="full"):
        background.measure_background(_Saver(_Save(OSError("full"))), tensors, "/nvme")
