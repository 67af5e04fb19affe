"""Tuning: what it prints is what handles and DeepSpeed take, and nothing is lost or left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import forebay
from conftest import ROOT, need_root, pattern

if TYPE_CHECKING:
    from collections.abc import Callable

SWEEP = {"block_size": ["128K", "1M"], "queue_depth": [4, "16"], "io_parallel": [1]}


class Tuner:
    """The command in directories of its own."""

    def __init__(self, base: Path) -> None:
        self.directory = base / "drive"
        self.log = base / "log"
        self.profiles = base / "profiles.json"
        self.sweep = base / "sweep.json"
        self.directory.mkdir()
        self.sweep.write_text(json.dumps(SWEEP))

    def command(self, *arguments: str | Path) -> list[str]:
        """Return the command with its arguments."""
        return [sys.executable, "-m", "forebay", "tune", *map(str, arguments)]

    def small(self, *arguments: str | Path) -> list[str | Path]:
        """Arguments of a run of a few candidates."""
        sizes = ("--io-size", "8M", "--sweep-config", self.sweep, "--log-dir", self.log)
        return ["--nvme-dir", self.directory, *sizes, *arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment, with profiles of its own and no GPU."""
        own = {"FOREBAY_PROFILES": str(self.profiles), "CUDA_VISIBLE_DEVICES": ""}
        return {**os.environ, **own}

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
            env=self.environment,
        )

    def result(self, *arguments: str | Path) -> dict[str, Any]:
        """Run the command, which has to go well, and return its object."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def journal_lines(self) -> set[bytes]:
        """Return the lines of all journals."""
        texts = [path.read_bytes() for path in self.log.glob("*.jsonl")]
        return {line for text in texts for line in text.splitlines()}

    def start_long(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Start a run of all candidates, and wait until it has measured some."""
        before = self.journal_lines()
        process = subprocess.Popen(
            self.command(
                "--nvme-dir",
                self.directory,
                *("--io-size", "64M", "--loops", "200", "--log-dir", self.log),
                *arguments,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        for _ in range(500):
            if len(self.journal_lines() - before) > 5:
                return process
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.kill()
        raise AssertionError("nothing was measured")


@pytest.fixture
def tuner(tmp_path: Path) -> Tuner:
    return Tuner(tmp_path)


def test_the_block_loads_into_a_handle_as_it_is(tuner: Tuner, path: Path) -> None:
    target = tuner.result(*tuner.small())["targets"][0]
    block = target["block"]["aio"]
    assert block["single_submit"] is False
    assert block["overlap_events"] is True
    assert block["block_size"] in {128 << 10, 1 << 20}
    handle = forebay.aio_handle(**block)
    data = pattern(70_001)
    handle.sync_pwrite(data, str(path))
    assert path.read_bytes() == data.tobytes()
    assert handle.get_queue_depth() == block["queue_depth"]


def test_the_block_is_what_deepspeed_reads(tuner: Tuner) -> None:
    config = pytest.importorskip("deepspeed.runtime.swap_tensor.aio_config")
    block = tuner.result(*tuner.small())["targets"][0]["block"]
    read = config.get_aio_config(block)
    assert {key: read[key] for key in block["aio"]} == block["aio"]


def test_each_way_and_both_have_rates_and_nothing_is_left(tuner: Tuner) -> None:
    result = tuner.result(*tuner.small())
    assert result["schema"] == "forebay.tune/1"
    target = result["targets"][0]
    for way in ("read", "write"):
        winner = target[way]
        assert winner[way]["low"] <= winner[way]["bytes_per_second"] <= winner[way]["high"]
        assert isinstance(winner["verdict"]["conclusive"], bool)
    assert target["both"]["read"]["bytes_per_second"] > 0
    assert target["both"]["write"]["bytes_per_second"] > 0
    assert len(target["candidates"]) == 4
    assert os.listdir(tuner.directory) == []
    assert list(tuner.log.glob("*.jsonl")) == []


@pytest.mark.parametrize(
    ("flag", "there", "absent"), [("no-read", "write", "read"), ("no_write", "read", "write")]
)
def test_one_way_alone_is_tuned(tuner: Tuner, flag: str, there: str, absent: str) -> None:
    target = tuner.result(*tuner.small(f"--{flag}"))["targets"][0]
    assert target[there] is not None
    assert (target[absent], target["both"]) == (None, None)
    assert target["block"]["aio"]["queue_depth"] == target[there]["queue_depth"]
    shown = json.loads(tuner.run("--show", "--json").stdout)
    assert there in shown["profiles"][0]
    assert absent not in shown["profiles"][0]


def test_what_is_stored_is_shown_and_forgotten(tuner: Tuner) -> None:
    assert "nothing is stored" in tuner.run("--show").stdout
    target = tuner.result(*tuner.small())["targets"][0]
    assert target["profile"] == str(tuner.profiles)
    shown = tuner.run("--show").stdout
    assert target["directories"][0]["identity"] in shown
    assert "measured today" in shown
    done = tuner.run("--forget", tuner.directory)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(tuner.run("--show", "--json").stdout)["profiles"] == []
    assert "nothing was stored" in tuner.run("--forget").stdout


def test_ctrl_c_removes_the_files_and_the_same_command_goes_on(tuner: Tuner) -> None:
    process = tuner.start_long()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in errors
    assert os.listdir(tuner.directory) == []
    (journal,) = tuner.log.glob("*.jsonl")
    before = journal.read_bytes().splitlines()

    process = tuner.start_long()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert f"going on after {len(before) - 1} samples" in errors
    after = journal.read_bytes().splitlines()
    assert after[: len(before)] == before, "what was measured is kept"

    process = tuner.start_long("--restart")
    process.kill()
    _, errors = process.communicate(timeout=60)
    assert "going on" not in errors
    assert not set(before[1:]) & tuner.journal_lines()


def test_what_a_killed_run_left_goes_and_a_live_ones_stays(tuner: Tuner) -> None:
    killed = tuner.start_long()
    killed.kill()
    killed.communicate(timeout=60)
    (left,) = os.listdir(tuner.directory)
    live = tuner.start_long("--no-write")
    (used,) = os.listdir(tuner.directory)
    assert used != left
    assert tuner.run(*tuner.small()).returncode == 0
    assert os.listdir(tuner.directory) == [used]
    assert live.poll() is None
    live.send_signal(signal.SIGINT)
    live.communicate(timeout=60)
    assert os.listdir(tuner.directory) == []


def test_what_a_killed_run_left_takes_no_room_from_the_next(tuner: Tuner, small_ext4: Path) -> None:
    dead = small_ext4 / "forebay-tune-1-2-0"
    dead.mkdir()
    (dead / ".forebay.lock").touch()
    (dead / "sample.bin").write_bytes(bytes(5 << 20))
    done = tuner.run("--nvme-dir", small_ext4, "--io-size", "2M", *tuner.small()[4:])
    assert done.returncode == 0, done.stderr
    assert os.listdir(small_ext4) == ["lost+found"]


@pytest.mark.parametrize("text", ["{", None])
def test_what_was_found_is_shown_where_it_cannot_be_stored(tuner: Tuner, text: str | None) -> None:
    """The file of profiles can't be understood, or there is none to be: no home."""
    if text is not None:
        tuner.profiles.write_text(text)
    environment = tuner.environment
    if text is None:
        for name in ("HOME", "XDG_STATE_HOME", "FOREBAY_PROFILES"):
            environment.pop(name, None)
    command = tuner.command(*tuner.small(), "--json")
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=110, env=environment
    )
    assert done.returncode == 1
    target = json.loads(done.stdout)["targets"][0]
    assert target["profile"] is None
    assert target["read"]["read"]["samples"] > 0
    assert "not stored for handles" in str(target["warnings"])
    if text is not None:
        assert tuner.profiles.read_text() == text
        tuner.profiles.unlink()
    again = tuner.result(*tuner.small())["targets"][0]
    assert again["profile"] == str(tuner.profiles)
    assert again["resumed_samples"] > 0
    assert again["candidates"] == target["candidates"], "stored without measuring again"


def test_what_was_found_is_shown_where_the_page_cannot_be_written(tuner: Tuner) -> None:
    (tuner.log / "forebay-tune.html").mkdir(parents=True)
    done = tuner.run(*tuner.small(), "--json")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert result["page"] is None
    assert result["targets"][0]["profile"] == str(tuner.profiles)
    assert "cannot write" in done.stderr


def test_a_verdict_is_stored_and_shown_with_what_was_found(tuner: Tuner) -> None:
    target = tuner.result(*tuner.small())["targets"][0]
    sure = {way: target[way]["verdict"]["conclusive"] for way in ("read", "write")}
    sure["both"] = all(sure.values())
    (shown,) = json.loads(tuner.run("--show", "--json").stdout)["profiles"]
    assert {way: shown[way]["conclusive"] for way in sure} == sure
    stored = json.loads(tuner.profiles.read_text())
    (profile,) = stored["profiles"].values()
    profile["read"]["conclusive"], profile["write"]["conclusive"] = False, True
    tuner.profiles.write_text(json.dumps(stored))
    lines = {line.split()[0]: line for line in tuner.run("--show").stdout.splitlines() if line}
    assert "inconclusive" in lines["read"]
    assert "inconclusive" not in lines["write"]


def test_columns_are_apart(tuner: Tuner) -> None:
    lines = [line.split() for line in tuner.run(*tuner.small()).stdout.splitlines()]
    engines = {"uring", "aio", "threads"}
    assert [line[:2] for line in lines if line[:1] == ["both"]] == [
        ["both", "read"],
        ["both", "write"],
    ]
    assert all(engines & set(line) for line in lines if line[:1] == ["both"])


def test_two_runs_of_the_same_do_not_measure_each_other(tuner: Tuner) -> None:
    first = tuner.start_long()
    second = subprocess.run(
        first.args, capture_output=True, text=True, check=False, timeout=60, env=tuner.environment
    )
    assert second.returncode == 3
    assert "another run is tuning the same" in second.stderr
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 130


def test_several_directories_are_tuned_alone_and_striped(tuner: Tuner, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    small = tuner.small()
    result = tuner.result(small[0], other, *small[1:])
    names = [[entry["path"] for entry in target["directories"]] for target in result["targets"]]
    assert names == [[str(other)], [str(tuner.directory)], [str(other), str(tuner.directory)]]
    assert [target["striped"] for target in result["targets"]] == [False, False, True]
    assert "on the same drive" in str(result["targets"][2]["warnings"])
    assert os.listdir(other) == []


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ('{"block_sizes": [1]}', "one of: engine, block_size"),
        ('{"block_size": ["1X"]}', "1X"),
        ('{"queue_depth": [0]}', "queue_depth is 0"),
        ("nonsense", "JSON object"),
    ],
)
def test_a_sweep_that_cannot_be_used_is_wrong_use(tuner: Tuner, sweep: str, words: str) -> None:
    tuner.sweep.write_text(sweep)
    done = tuner.run(*tuner.small())
    assert done.returncode == 2
    assert words in done.stderr
    assert str(tuner.sweep) in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "--nvme-dir"),
        (("--nvme-dir", "/no/such/place"), 3, "/no/such/place"),
        (("--nvme_dir", ".", "--gds"), 3, "--gds takes a GPU"),
        (("--nvme_dir", ".", "--gpu", "1"), 3, "--gpu takes a GPU"),
        (("--nvme-dir", ".", "--no-read", "--no-write"), 2, "--no-write"),
        (("--nvme-dir", ".", "."), 2, "given twice"),
        (("--nvme-dir", ".", "--io-size", "9999T"), 3, "are free"),
        (("--nvme-dir", ".", "--io-size", "1K"), 2, "1 MiB"),
    ],
)
def test_what_cannot_be_done_has_its_code(
    tuner: Tuner, arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = tuner.run(*arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert done.stdout == ""


def test_a_drive_without_room_is_refused_with_numbers(tuner: Tuner, small_ext4: Path) -> None:
    done = tuner.run("--nvme-dir", small_ext4, "--io-size", "20M", "--log-dir", tuner.log)
    assert done.returncode == 3
    assert str(small_ext4) in done.stderr
    assert "20 MiB are needed" in done.stderr


def test_a_drive_that_fills_up_on_the_way_is_named_and_left_empty(
    tuner: Tuner, small_ext4: Path
) -> None:
    """A limit on the size of files stands in for a drive that another program fills."""
    command = ["prlimit", "--fsize=1000000", *tuner.command("--nvme-dir", small_ext4)]
    options = ["--io-size", "2M", "--log-dir", str(tuner.log)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, env=tuner.environment
    )
    assert done.returncode == 3, done.stderr
    assert str(small_ext4) in done.stderr
    assert set(os.listdir(small_ext4)) == {"lost+found"}


def test_a_read_only_drive_is_named(tuner: Tuner, small_ext4: Path) -> None:
    need_root()
    subprocess.run(["mount", "-o", "remount,ro", str(small_ext4)], check=True)
    done = tuner.run(
        "--nvme-dir",
        tuner.directory,
        small_ext4,
        "--io-size",
        "2M",
        "--sweep-config",
        tuner.sweep,
        "--log-dir",
        tuner.log,
    )
    assert done.returncode == 3
    assert str(small_ext4) in done.stderr
    assert os.listdir(tuner.directory) == []


def test_memory_is_flagged(tuner: Tuner, mount: Callable[..., Path]) -> None:
    memory = mount("-t", "tmpfs", "-o", "size=64m", "none")
    small = tuner.small()
    target = tuner.result("--nvme-dir", memory, *small[2:])["targets"][0]
    assert target["directories"][0]["memory"] is True
    assert "is in memory" in str(target["warnings"])


def keys(value: Any) -> set[str]:
    """Return the names of all fields."""
    if isinstance(value, dict):
        return set(value).union(*map(keys, value.values()))
    if isinstance(value, list):
        return set().union(*map(keys, value))
    return set()


def test_the_docs_name_every_field(tuner: Tuner) -> None:
    docs = (ROOT / "docs" / "tune.md").read_text()
    found = keys(tuner.result(*tuner.small()))
    found |= keys(json.loads(tuner.run("--show", "--json").stdout))
    found |= keys(json.loads(tuner.run("--forget", "--json").stdout))
    aio = {"aio", "overlap_events", "intra_op_parallelism", "schema"}
    assert {name for name in found - aio if f"`{name}`" not in docs} == set()


class _Loads(HTMLParser):
    """Collects what a page would fetch, and the text it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.shown = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attrs}
        if tag in {"script", "link", "img", "iframe"} or names & {"src", "href", "onload"}:
            self.fetched.append(tag)

    def handle_data(self, data: str) -> None:
        self.shown += data


def test_the_page_has_every_rate_and_loads_nothing(tmp_path: Path) -> None:
    base = tmp_path / "<b>&'\""
    base.mkdir()
    tuner = Tuner(base)
    result = tuner.result(*tuner.small())
    page = Path(result["page"]).read_text()
    parser = _Loads()
    parser.feed(page)
    assert parser.fetched == []
    assert str(tuner.directory) in parser.shown
    for candidate in result["targets"][0]["candidates"]:
        for way in ("read", "write"):
            assert f"{candidate[way]['bytes_per_second'] / 1e9:.2f}" in parser.shown
    assert "prefers-color-scheme: dark" in page


def test_progress_and_colours_are_for_terminals(tuner: Tuner) -> None:
    done = tuner.run(*tuner.small())
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert '"intra_op_parallelism": 1' in done.stdout
