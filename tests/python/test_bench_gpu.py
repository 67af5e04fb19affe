"""``forebay bench --gpu``: refused without a GPU, and right in all that needs none.

What is compared runs here with the processor in the place of the GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from conftest import pattern, undocumented_keys
from forebay.bench import choice, figures, goals, hardware, measure, report, worker
from forebay.bench.crew import Lost
from forebay.bench.payload import Layout
from forebay.bench.subjects import COMPARISONS
from forebay.bench.subjects.subject import Settings, no_device
from forebay.bench.tensor import Tensor
from test_bench_command import run, run_json

if TYPE_CHECKING:
    from pathlib import Path

SUBJECTS = COMPARISONS["gpu"]
SMALL = ("--size", "1000003", "--tensor-count", "7", "--rounds", "2")

ON_THE_PROCESSOR = """
import sys
from forebay.bench import main
main.device = lambda options: "cpu"
from forebay._cli import main as command
sys.exit(command(["bench", "--gpu", *sys.argv[1:]]))
"""


def on_the_processor(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ON_THE_PROCESSOR, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )


def need_no_gpu() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")


@pytest.mark.parametrize("way", [("--gpu",), ("--gpu=1",), ("--what", "gpu")])
def test_without_a_gpu_it_is_refused_with_the_reason_before_anything_is_made(
    tmp_path: Path, way: tuple[str, ...]
) -> None:
    need_no_gpu()
    done = run(*way, "--dir", tmp_path, *SMALL)
    assert (done.returncode, done.stdout) == (3, "")
    assert "nothing can be compared on a GPU here" in done.stderr
    assert "CUDA" in done.stderr
    assert os.listdir(tmp_path) == []
    # It is the GPU that is missing, whatever else is.
    done = run(*way, "--dir", tmp_path, "--size", "1000T")
    assert "nothing can be compared on a GPU here" in done.stderr
    found = json.loads(run(*way, "--dir", tmp_path, *SMALL, "--json").stdout)
    assert (found["schema"], found["exit"]) == ("forebay.error/1", 3)


def test_every_subject_is_here_or_says_why_not(tmp_path: Path) -> None:
    found = run_json("--gpu", "--list", "--dir", tmp_path)
    assert [subject["name"] for subject in found["subjects"]] == list(SUBJECTS)
    reasons = [subject["unavailable"] for subject in found["subjects"]]
    assert all(reason is None or reason.strip() for reason in reasons)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--gpu", "--what", "files"), "cannot be used with"),
        (("--gpu=-1",), "-1"),
        (("--gpu", "--tensor-size", "64M"), "goes with --what tensors"),
        (("--gpu", "--only", "numpy"), "'numpy' is not known; these are: forebay, "),
    ],
)
def test_wrong_use_is_said_to_be_so(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    done = run("--dir", tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_all_that_is_here_has_the_same_bytes_and_every_key_is_documented(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    asked = (
        "forebay,forebay-unverified,forebay-foreign,forebay-host,host-memory,pinned-copy,torch,"
        "torch-cuda,safetensors"
    )
    listed = on_the_processor("--list", "--dir", tmp_path, "--only", asked, "--json")
    here = json.loads(listed.stdout)["subjects"]
    names = [subject["name"] for subject in here if subject["unavailable"] is None]
    assert names[:3] == asked.split(",")[:3]
    chart = tmp_path / "chart.html"
    arguments = ("--only", ",".join(names), "--output", chart, "--json")
    done = on_the_processor("--dir", tmp_path, *SMALL, *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "forebay.bench.gpu/1"
    assert not undocumented_keys(found, "bench.md", "forebay.bench/1")
    (part,) = found["files"]
    assert part["payload"] == {"bytes": 1000003, "tensors": 7}
    assert [subject["name"] for subject in part["subjects"]] == names
    for subject in part["subjects"]:
        assert subject["failure"] is None
        assert subject["checked"] == (subject["name"] != "pinned-copy")
        stores = subject["name"] not in {"forebay-foreign", "torch-cuda"}
        assert (subject["store"] is not None) == stores
        for way in ("load", "warm"):
            if subject[way] is not None:
                assert len(subject[way]["seconds"]) == 2
                assert subject[way]["limit_share"]["median"] > 0
    assert len(part["goals"]) == len(goals.GOALS)
    for goal in part["goals"]:
        assert (goal["measured"] is not None) == (goal["subject"] in names)
    assert "<h2>Goals</h2>" in chart.read_text(encoding="utf-8")
    assert os.listdir(tmp_path) == ["chart.html"]


def test_the_table_has_the_hardware_the_limits_and_the_goals(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    names = "forebay,host-memory,pinned-copy"
    done = on_the_processor("--dir", tmp_path, *SMALL, "--only", names)
    assert done.returncode == 0, done.stderr
    for words in ("kernel: Linux", "NVIDIA driver: ", "of the limit", "goals", "not measured"):
        assert words in done.stdout


def result(name: str, **ways: list[float]) -> measure.Result:
    found = measure.Result(SUBJECTS[name])
    for way, seconds in ways.items():
        turns = [measure.Turn(number, one, 0.0, None) for number, one in enumerate(seconds)]
        setattr(found, way, turns)
    return found


def test_the_slower_of_drive_and_copy_is_the_limit_of_its_round() -> None:
    results = [
        result("pinned-copy", load=[1.0, 4.0, 1.0], store=[5.0]),
        result("fio", load=[2.0, 2.0, 9.0]),
        result("host-memory", load=[3.0, 1.0, 2.0], store=[1.0]),
    ]
    assert goals.limits(results, "load") == {0: 2.0, 1: 4.0, 2: 2.0}
    assert goals.limits(results, "store") == {0: 5.0}
    assert goals.limits(results, "warm") == {0: 1.0, 1: 4.0, 2: 1.0}
    assert goals.limits(results[:1], "load") == {}
    assert goals.limits(results[1:], "warm") == {}


def test_goals_are_judged_by_the_median_and_left_open_where_nothing_was_measured() -> None:
    results = [
        result("forebay", load=[1.0, 1.0, 1.0], warm=[2.0, 2.0, 2.0]),
        result("forebay-host", load=[1.0, 1.0, 10.0], store=[1.0]),
        result("pinned-copy", load=[0.96, 0.95, 1.0], store=[0.1]),
        result("host-memory", load=[0.5, 0.5, 0.5], store=[0.94]),
        result("torch", load=[0.9, 3.0, 3.0]),
    ]
    judged = {(goal["subject"], goal["way"], goal["wanted"]): goal for goal in goals.judge(results)}
    assert judged["forebay-host", "load", 0.95]["reached"] is True
    assert judged["forebay-host", "load", 0.95]["measured"]["median"] == 0.95
    assert judged["forebay-host", "store", 0.95]["reached"] is False
    assert judged["forebay", "load", 1.0]["reached"] is True
    assert judged["forebay", "warm", 1.0]["measured"] is None
    assert judged["forebay", "warm", 1.0]["reached"] is None
    assert judged["forebay", "warm", 0.8]["reached"] is False
    assert judged["forebay-host", "warm", 0.8]["reached"] is None
    shown = [report.goal_columns(goal)[-1] for goal in goals.judge(results)]
    assert shown == ["yes", "no", "yes", "not measured", "not measured", "no"]


def test_each_goal_is_of_a_subject_that_is_compared() -> None:
    for goal in goals.GOALS:
        assert goal.subject in SUBJECTS
        assert goal.beside is None or goal.beside in SUBJECTS
        assert goal.way in figures.WAYS


class _Later:
    """A member whose tensors are wrong in a round in which only sums are compared."""

    name = "forebay"

    def do(self, **step: Any) -> dict[str, Any]:
        wrong = step["do"] == "load" and not step["compare"]
        took = {"seconds": 1.0, "cpu_seconds": 1.0, "extra_bytes": None}
        return {**took, "differs": "layers.2.weight" if wrong else None}


def test_wrong_bytes_in_any_round_are_a_failure(tmp_path: Path) -> None:
    (tmp_path / measure.GIVEN).write_bytes(b"bytes")
    wrong = result("forebay-foreign")
    pairs: Any = [(_Later(), wrong)]
    with pytest.raises(Lost, match=r"layers\.2\.weight"):
        measure._load(pairs[0][0], "path", compare=False)
    measure.measure(pairs, str(tmp_path), 3, ["load", "warm"], lambda _: None)
    assert wrong.failure == "tensor 'layers.2.weight' came back with different bytes"
    assert wrong.load == []


@pytest.mark.parametrize("length", [1, 7, 8, 4099])
def test_sums_tell_every_flipped_bit_wherever_a_tensor_begins(length: int) -> None:
    torch = pytest.importorskip("torch")
    tensors = [Tensor("a", "U8", (length,), pattern(length))]
    subject = SUBJECTS["torch"](tensors, Settings())
    memory = torch.from_numpy(np.concatenate([pattern(3, 1), pattern(length)]))
    right = subject.sums([memory[3:]])
    assert subject.sums([torch.from_numpy(pattern(length))]) == right
    for place in {0, length // 2, length - 1}:
        memory[3 + place] ^= 0x10
        assert subject.sums([memory[3:]]) != right
        memory[3 + place] ^= 0x10


def test_a_subject_that_changes_a_byte_later_is_found_by_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    layout = Layout.split(100_003, 3)
    number = os.memfd_create("test")
    os.ftruncate(number, layout.memory_bytes)
    kind = SUBJECTS["torch"]
    work = worker._Work("gpu", "torch", number)
    step = {
        "fio": None, "compile": False, "device": "cpu", "look": False, "layout": vars(layout),
        "directory": str(tmp_path), "path": str(tmp_path / "file"), "compare": True,
    }  # fmt: skip
    assert work.setup(step)["unavailable"] is None
    work.store(step)
    assert work.load(step)["differs"] is None
    assert work.load({**step, "compare": False})["differs"] is None
    load = kind.load

    def spoiled(self: Any, path: str) -> Any:
        loaded: Any = load(self, path)
        loaded[1].view(torch.uint8).view(-1)[-1] += 1
        return loaded

    monkeypatch.setattr(kind, "load", spoiled)
    assert work.load({**step, "compare": False})["differs"] == "layers.1.weight"
    os.close(number)


@pytest.mark.parametrize(
    ("cuda", "count", "device", "reason"),
    [
        ("13.0", 2, "cuda:1", None),
        ("13.0", 2, "cuda:2", "needs GPU 2, and there are 2"),
        ("13.0", 0, "cuda:0", "there is none"),
        (None, 0, "cuda:0", "built without CUDA"),
        (None, 0, "cpu", None),
    ],
)
def test_a_missing_device_is_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, count: int, device: str, reason: str | None
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    found = no_device(device)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_room_is_asked_for_all_files_that_there_are_at_once() -> None:
    given: dict[str, Any] = {
        "what": "gpu", "gpu": 0, "only": ["forebay", "forebay-foreign", "torch"], "skip": [],
        "no_read": False, "no_write": False,
    }  # fmt: skip
    assert choice.phases(given) == [["load", "warm"], ["store"]]
    assert choice.files_at_once(given) == 3
    assert choice.device(given) == "cuda:0"
    assert choice.device({**given, "what": "files"}) == "cpu"


def test_the_hardware_is_what_the_report_says_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles = [found["title"] for found in hardware.describe(str(tmp_path))]
    assert "kernel" in titles
    assert "NVIDIA driver" in titles
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    assert hardware.describe(str(tmp_path)) == []
