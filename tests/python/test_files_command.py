"""Files of tensors by the command, as the libraries that the formats belong to see them."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import run_python, undocumented_keys
from forebay._cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
]
PACKED = getattr(torch, "float4_e2m1fn_x2", None)
NAMES = ["", "..", "../../etc/passwd", "/absolute", "größe", "a\nb", "100%2F", "a.b"]


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return a tensor of random bits, which NaNs and the like are among."""
    item = torch.empty((), dtype=dtype).element_size()
    count = int(np.prod(shape)) * item
    bits = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    if dtype == torch.bool:
        bits &= 1
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def bits_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits_of(found[name]) == bits_of(tensor), name


def zoo() -> dict[str, torch.Tensor]:
    tensors = {f"dtype.{dtype}": random_tensor(dtype, 3, 5) for dtype in DTYPES}
    tensors.update({name: random_tensor(torch.uint8, 7) for name in NAMES})
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 5, dtype=torch.bfloat16)
    tensors["large"] = random_tensor(torch.float32, 1003, 1009)
    return tensors


def well(*arguments: str | Path) -> None:
    assert main([str(argument) for argument in arguments]) == 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(zoo(), path, metadata={"format": "pt"})
    return path


def test_the_reference_library_reads_what_was_converted(model: Path, tmp_path: Path) -> None:
    copy, arrays, back = tmp_path / "copy.safetensors", tmp_path / "arrays", tmp_path / "b"
    well("convert", model, copy)
    assert_equal(load_file(copy), zoo())
    well("convert", copy, arrays)
    well("convert", arrays, back, "--shards", "4")
    found: dict[str, torch.Tensor] = {}
    for shard in back.glob("*.safetensors"):
        found.update(load_file(shard))
    assert_equal(found, zoo())
    index = json.loads((back / "model.safetensors.index.json").read_text(encoding="utf-8"))
    for name, file in index["weight_map"].items():
        assert name in load_file(back / file)
    assert index["metadata"]["total_size"] == sum(map(len, map(bits_of, zoo().values())))


def test_torch_reads_what_was_converted_for_it(model: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.pt"
    well("convert", model, state)
    assert_equal(torch.load(state, weights_only=True), zoo())
    assert_equal(torch.load(state, weights_only=True, mmap=True), zoo())
    with zipfile.ZipFile(state) as archive:
        assert archive.testzip() is None
    well("convert", state, tmp_path / "back.safetensors")
    assert_equal(load_file(tmp_path / "back.safetensors"), zoo())


def test_numpy_reads_what_was_converted_for_it(model: Path, tmp_path: Path) -> None:
    well("convert", model, tmp_path / "arrays")
    assert sorted(os.listdir(tmp_path)) == ["arrays", "model.safetensors"]
    found = np.load(tmp_path / "arrays" / "large.npy")
    assert found.tobytes() == bits_of(zoo()["large"])
    assert found.shape == (1003, 1009)
    assert np.load(tmp_path / "arrays" / "scalar.npy") == np.float32(3.5)
    half = np.load(tmp_path / "arrays" / "dtype.torch.bfloat16.npy").view(ml_dtypes.bfloat16)
    assert half.shape == (3, 5)
    assert half.tobytes() == bits_of(zoo()["dtype.torch.bfloat16"])
    assert np.load(tmp_path / "arrays" / "%2E..npy").tobytes() == bits_of(zoo()[".."])


@pytest.mark.parametrize("code", ["<f4", ">f4", ">c8", ">i2", "|b1", ">f8"])
@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (3, 4), (2, 3, 5), (1, 7, 1)])
def test_arrays_of_any_order_are_read(tmp_path: Path, code: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    array = (np.arange(count).reshape(shape) % 120).astype(code)
    (tmp_path / "arrays").mkdir()
    np.save(tmp_path / "arrays" / "c.npy", array)
    np.save(tmp_path / "arrays" / "f.npy", np.asfortranarray(array))
    well("convert", tmp_path / "arrays", tmp_path / "model.safetensors")
    wanted = array.astype(np.dtype(code).newbyteorder("<"))
    for tensor in load_file(tmp_path / "model.safetensors").values():
        assert tensor.numpy().dtype == wanted.dtype
        np.testing.assert_array_equal(tensor.numpy(), wanted)


@pytest.mark.parametrize(
    "array",
    [np.array(["text"]), np.array([{}], dtype=object), np.zeros(2, "M8[s]"), np.zeros(2, "c16")],
    ids=["text", "objects", "dates", "complex128"],
)
def test_arrays_that_are_no_tensors_are_refused(
    tmp_path: Path, array: np.ndarray[Any, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "a.npy", array)
    assert main(["convert", str(tmp_path / "a.npy"), str(tmp_path / "out.safetensors")]) == 2
    assert "a.npy" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["a.npy"]


def test_an_array_in_fortran_order_that_exceeds_the_budget_is_refused_with_the_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    array = np.asfortranarray(np.arange(10 << 17).reshape(1 << 10, -1).astype("<f8"))
    np.save(tmp_path / "a.npy", array)
    arguments = ["convert", str(tmp_path / "a.npy"), str(tmp_path / "b.safetensors")]
    assert main([*arguments, "--budget", "16M"]) == 3
    assert f"twice its {array.nbytes} bytes" in capfd.readouterr().err
    well(*arguments, "--budget", "40M")
    np.testing.assert_array_equal(load_file(tmp_path / "b.safetensors")["a"].numpy(), array)


def test_a_name_that_is_no_unicode_is_refused_for_torch_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    odd = os.path.join(tmp_path, os.fsdecode(b"\xff.pt"))
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "a.pt").rename(odd)
    assert main(["ls", odd]) == 2
    assert "Unicode" in capfd.readouterr().err
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    odd = os.path.join(tmp_path, os.fsdecode(b"\xff.safetensors"))
    well("convert", tmp_path / "a.safetensors", odd)
    well("verify", odd)


def nested() -> dict[str, Any]:
    weight = random_tensor(torch.float32, 6, 10)
    return {
        "model": {
            "weight": torch.nn.Parameter(weight),
            "tied": weight,
            "transposed": weight.t(),
            "column": weight[:, 3],
            "part": weight[2:4],
            "flipped": random_tensor(torch.complex64, 5).conj(),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(7), "lr": 0.1}}},
        "layers": [torch.zeros(2), (torch.ones(0, 3),)],
        "epoch": 3,
    }


def flat() -> dict[str, torch.Tensor]:
    state = nested()
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    tensors["optimizer.state.0.step"] = state["optimizer"]["state"][0]["step"]
    tensors["layers.0"], tensors["layers.1.0"] = state["layers"][0], state["layers"][1][0]
    return tensors


def test_a_nested_state_has_the_keys_of_its_tensors_joined(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save(nested(), tmp_path / "state of größe\n.pt")
    well("convert", tmp_path / "state of größe\n.pt", tmp_path / "state.safetensors")
    assert_equal(load_file(tmp_path / "state.safetensors"), flat())
    told = capfd.readouterr().err
    assert "optimizer.state.0.lr (float)" in told
    assert "epoch (int)" in told
    assert "model.weight, model.tied" in told


def test_a_state_is_listed_without_its_bytes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save(nested(), tmp_path / "state.pt")
    well("ls", tmp_path / "state.pt", "--json")
    listed = json.loads(capfd.readouterr().out)
    tensors = {tensor["name"]: tensor for tensor in listed["tensors"]}
    everything = (tmp_path / "state.pt").read_bytes()
    for name in ("model.weight", "model.part", "optimizer.state.0.step"):
        found = everything[tensors[name]["offset"] :][: tensors[name]["bytes"]]
        assert found == bits_of(flat()[name])
    assert tensors["model.transposed"]["offset"] is None
    assert listed["tied"] == [["model.weight", "model.tied"]]
    totals = listed["totals"].pop("dtypes")
    assert totals["C64"]["tensors"] == 1
    assert undocumented_keys(listed, "command.md", "forebay.ls/1") == ["schema"]
    assert os.listdir(tmp_path) == ["state.pt"]


def test_the_old_format_of_torch_is_read_within_the_budget(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.pt"
    wanted = {"a": random_tensor(torch.float32, 1000), "b": random_tensor(torch.int8, 5 << 20, 4)}
    torch.save(wanted, old, _use_new_zipfile_serialization=False)
    assert main(["convert", str(old), str(tmp_path / "a.safetensors"), "--budget", "16M"]) == 3
    assert str(old.stat().st_size) in capfd.readouterr().err
    well("convert", old, tmp_path / "a.safetensors")
    assert_equal(load_file(tmp_path / "a.safetensors"), wanted)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_nothing_in_a_file_is_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "mark"
    torch.save({"a": torch.ones(2), "b": Evil(mark)}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Evil(mark), protocol=2))
    for name in ("zip.pt", "plain.pt"):
        assert main(["convert", str(tmp_path / name), str(tmp_path / "out.safetensors")]) == 2
        assert "never unpickled" in capfd.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["plain.pt", "zip.pt"]


def test_what_torch_cannot_read_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a": torch.ones(1000)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    torch.save({"a": torch.ones(3).to_sparse()}, tmp_path / "sparse.pt")
    torch.save({"a": torch.ones(3, dtype=torch.complex128)}, tmp_path / "wide.pt")
    torch.save({"a.b": torch.ones(3), "a": {"b": torch.ones(3)}}, tmp_path / "twice.pt")
    for name, words in [
        ("cut.pt", "cut.pt"),
        ("sparse.pt", "no plain bytes"),
        ("wide.pt", "complex128"),
        ("twice.pt", "'a.b'"),
    ]:
        assert main(["convert", str(tmp_path / name), str(tmp_path / "out.safetensors")]) == 2
        text = capfd.readouterr().err
        assert words in text
        assert text.count("\n") == 1
        assert str(tmp_path / name) in text
    assert not (tmp_path / "out.safetensors").exists()
    assert main(["verify", str(tmp_path / "cut.pt")]) == 1


def test_a_drive_without_room_is_told_where_torch_writes(
    small_ext4: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    torch.save({"scattered": torch.ones(4, 3).T}, tmp_path / "scattered.pt")
    torch.save({"endless": torch.ones(1).expand(1 << 42)}, tmp_path / "endless.pt")
    command = ["convert", str(tmp_path / "endless.pt"), str(small_ext4 / "out.safetensors")]
    assert main(command) == 3
    assert str(1 << 44) in capfd.readouterr().err
    with (small_ext4 / "fill").open("wb", 0) as fill:
        with contextlib.suppress(OSError):
            while fill.write(bytes(512)):
                pass
        # Two blocks are left: for a directory, and for less than any file takes.
        fill.truncate(fill.tell() - 2048)
    for source, name in [("a.safetensors", "out.pt"), ("scattered.pt", "out.safetensors")]:
        assert main(["convert", str(tmp_path / source), str(small_ext4 / name)]) == 3
        text = capfd.readouterr().err
        assert str(small_ext4) in text
        assert "free some space" in text
    assert sorted(os.listdir(small_ext4)) == ["fill", "lost+found"]


def test_a_compressed_archive_has_the_bytes_that_were_compressed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted = {"a": torch.arange(5 << 20, dtype=torch.float32), "b": torch.ones(3)}
    torch.save(wanted, tmp_path / "stored.pt")
    stored, path = zipfile.ZipFile(tmp_path / "stored.pt"), tmp_path / "compressed.pt"
    with stored, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as compressed:
        for member in stored.infolist():
            compressed.writestr(member.filename, stored.read(member))
    out = tmp_path / "out.safetensors"
    assert main(["convert", str(path), str(out), "--budget", "16M"]) == 3
    assert "compressed" in capfd.readouterr().err
    well("convert", path, out)
    assert_equal(load_file(out), wanted)


def test_a_file_that_misleads_torch_is_refused_as_a_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state.pt"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    # The keys of storages come last, each behind an X and its length in four bytes.
    keys = b"\x80\x02]q\x00X"
    at = whole.rindex(keys) + len(keys) + 4
    path.write_bytes(whole[:at] + b"?" + whole[at + 1 :])
    for command, code in [("ls", 2), ("verify", 1)]:
        assert main([command, str(path)]) == code
        assert f"{path} can't be read by torch" in capfd.readouterr().err


def test_without_torch_its_files_are_refused_and_others_are_not(
    model: Path, tmp_path: Path
) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    code = f"""
        import sys
        sys.modules["torch"] = None
        from forebay._cli import main
        assert main(["ls", {str(model)!r}]) == 0
        assert main(["convert", {str(model)!r}, {str(tmp_path / "arrays")!r}]) == 0
        assert main(["ls", {str(tmp_path / "a.pt")!r}]) == 3
        assert main(["convert", {str(model)!r}, {str(tmp_path / "b.pt")!r}]) == 3
    """
    done = run_python(code)
    assert done.stderr.count("pip install torch") == 2
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "arrays", "model.safetensors"]


def cat(path: Path, name: str) -> bytes:
    command = [sys.executable, "-m", "forebay", "cat", str(path), "--tensor", name]
    return subprocess.run(command, capture_output=True, check=True, timeout=100).stdout


def test_a_tensor_of_any_format_is_printed_as_an_array(model: Path, tmp_path: Path) -> None:
    (tmp_path / "printed.npy").write_bytes(cat(model, "large"))
    assert np.load(tmp_path / "printed.npy").tobytes() == bits_of(zoo()["large"])
    torch.save(nested(), tmp_path / "state.pt")
    for name in ("model.transposed", "model.weight"):
        (tmp_path / "printed.npy").write_bytes(cat(tmp_path / "state.pt", name))
        assert np.load(tmp_path / "printed.npy").tobytes() == bits_of(flat()[name])


BUDGET_MIB = 32
LARGE_MIB = 256


@pytest.mark.parametrize("way", ["copy.safetensors", "arrays", "shards", "state.pt"])
def test_the_memory_of_a_conversion_stays_within_its_budget(tmp_path: Path, way: str) -> None:
    large = random_tensor(torch.float32, LARGE_MIB << 17)  # half of it, twice
    save_file({"a": large, "b": large.clone()}, tmp_path / "large.safetensors")
    save_file({"a": torch.ones(3)}, tmp_path / "small.safetensors")
    torch.save({"a": torch.ones(3)}, tmp_path / "small.pt")
    more = ["--shards", "2"] if way == "shards" else []
    code = f"""
        from pathlib import Path
        from forebay._cli import main

        def most():
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

        def convert(source, target, *more):
            arguments = ["convert", source, target, "--budget", "{BUDGET_MIB}M", *more]
            assert main(arguments) == 0

        convert("small.safetensors", "small-{way}")
        if {way!r} == "state.pt":
            convert("small.pt", "small-back.safetensors")
        before = most()
        convert("large.safetensors", {way!r}, *{more!r})
        if {way!r} == "state.pt":
            convert({way!r}, "back.safetensors")
        print(most() - before)
    """
    done = run_python(code, cwd=tmp_path)
    grown = int(done.stdout.splitlines()[-1]) >> 10
    assert grown <= BUDGET_MIB, done.stdout
    if way == "state.pt":
        assert_equal(load_file(tmp_path / "back.safetensors"), {"a": large, "b": large})


def test_a_full_disk_is_told_and_nothing_is_left(
    mount: Callable[..., Path], small_ext4: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": random_tensor(torch.uint8, 20 << 20)}, tmp_path / "large.safetensors")
    for directory in (small_ext4, mount("-t", "tmpfs", "-o", "size=64k", "none")):
        before = sorted(os.listdir(directory))
        for target in ("copy.safetensors", "arrays", "state.pt"):
            arguments = ["convert", str(tmp_path / "large.safetensors"), str(directory / target)]
            assert main(arguments) == 3
            assert "No space left" in capfd.readouterr().err
            assert sorted(os.listdir(directory)) == before


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}'
    path = tmp_path / "cut.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(3999))
    assert main(["verify", str(path)]) == 1
    path.write_bytes(struct.pack("<Q", 1 << 60) + header)
    assert main(["verify", str(path)]) == 1


@pytest.mark.skipif(PACKED is None, reason="this torch has no floats of 4 bits")
def test_floats_of_four_bits_go_to_torch_and_back(tmp_path: Path) -> None:
    assert PACKED is not None
    state = {"x": random_tensor(torch.uint8, 3, 5).view(PACKED)}
    torch.save(state, tmp_path / "a.pt")
    well("convert", tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert_equal(load_file(tmp_path / "b.safetensors"), state)
    well("convert", tmp_path / "b.safetensors", tmp_path / "c.pt")
    assert_equal(torch.load(tmp_path / "c.pt"), state)


def test_a_name_that_no_file_can_have_is_refused_by_itself(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.save({"a\ud800": torch.ones(1)}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "b.safetensors")]) == 2
    assert "ud800" in capfd.readouterr().err
