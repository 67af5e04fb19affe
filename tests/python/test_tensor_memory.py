"""Where loaded tensors lie: in memory that forked children have, or over the page cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import forebay
import forebay.numpy
import forebay.torch
from conftest import run_python
from forebay.errors import MismatchError
from reference import data_start, write_file

if TYPE_CHECKING:
    from pathlib import Path

OURS = forebay.torch
MIB = 1 << 20


def model() -> dict[str, torch.Tensor]:
    """Return more tensors than are copied whatever the page cache has."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in (("a", (1 << 20,)), ("b", (513, 1025)), ("c", (1 << 20,)), ("d", ()))
    }


def save(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Save tensors, and have the page cache hold the file."""
    OURS.save_file(tensors, path)
    path.read_bytes()


def mapped_bytes(path: Path) -> int:
    """Return how many bytes of a file this process has mapped."""
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            if fields[5:] == [str(path)]:
                begin, end = (int(address, 16) for address in fields[0].split("-"))
                total += end - begin
    return total


def assert_equal(found: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_what_the_page_cache_has_is_mapped_and_what_it_lacks_is_read(tmp_path: Path) -> None:
    path = (tmp_path / "x.safetensors").resolve()
    tensors = model()
    save(path, tensors)
    found = OURS.load_file(path)
    assert mapped_bytes(path) > 8 * MIB
    assert_equal(found, tensors)
    del found
    assert mapped_bytes(path) == 0, "a mapping goes with its last tensor"
    found = OURS.load_file(path, backend="pread")
    assert mapped_bytes(path) == 0
    assert_equal(found, tensors)
    with forebay.Handle(pool=forebay.Pool()) as handle:
        assert_equal(OURS.load_file(path, handle=handle), tensors)
    forebay._forebay.drop_cached(str(path))
    if forebay._forebay.cached_bytes(str(path)):
        pytest.skip("this file system doesn't drop what it has cached")
    found = OURS.load_file(path)
    assert mapped_bytes(path) == 0
    assert_equal(found, tensors)


def test_mapped_tensors_are_the_programs_own(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = model()
    save(path, tensors)
    before = path.read_bytes()
    found = OURS.load_file(path)
    found["a"].fill_(7)
    assert path.read_bytes() == before
    other = OURS.load_file(path)
    assert_equal(other, tensors)
    save(path, {name: -tensor for name, tensor in tensors.items()})
    assert_equal(other, tensors)
    path.unlink()
    assert_equal(other, tensors)
    assert bool((found["a"] == 7).all())


def test_damage_in_a_mapped_file_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, model())
    with OURS.safe_open(path, "pt") as opened:
        names = opened.offset_keys()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(MismatchError, match=f"{names[-1]}.*x.safetensors"):
        OURS.load_file(path)
    assert mapped_bytes(path.resolve()) == 0
    assert set(OURS.load_file(path, verify=False)) == set(names)


@pytest.mark.parametrize("shift", range(9))
def test_files_with_their_data_at_any_offset_are_loaded_from_the_page_cache(
    tmp_path: Path, shift: int
) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"long": torch.arange(2 * MIB), "short": torch.arange(3, dtype=torch.int16)}
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    header = (
        b'{"long":{"dtype":"I64","shape":[2097152],"data_offsets":[0,16777216]},'
        b'"short":{"dtype":"I16","shape":[3],"data_offsets":[16777216,16777222]}}'
    )
    write_file(path, header, data, padding=shift)
    assert data_start(path) == 8 + len(header) + shift
    path.read_bytes()
    assert_equal(OURS.load_file(path), tensors)


def test_some_keys_of_a_cached_file_map_what_they_need(tmp_path: Path) -> None:
    path = (tmp_path / "x.safetensors").resolve()
    tensors = {f"t{index:02}": torch.full((MIB // 4,), index) for index in range(24)}
    save(path, tensors)
    wanted = [f"t{index:02}" for index in range(0, 24, 3)]
    found = OURS.load_file(path, keys=wanted)
    assert_equal(found, {name: tensors[name] for name in wanted})
    assert 0 < mapped_bytes(path) < 12 * (2 * MIB + 3 * 4096)


def test_a_forked_child_has_what_was_loaded_however_it_was_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, model())
    run_python(
        f"""
        import os, torch, forebay.torch
        torch.set_num_threads(1)  # a forked child has none of the others
        path = {str(path)!r}
        whole = forebay.torch.load_file(path)
        read = forebay.torch.load_file(path, backend="pread")
        cast = forebay.torch.load_file(path, dtype="bfloat16")
        streamed = dict(forebay.torch.stream(path))
        with forebay.torch.safe_open(path, "pt") as opened:
            part = opened.get_slice("b")[3:70, 5:1000]
        both = forebay.torch.stream(path, dtype="float64")
        doubled = dict(both)
        sums = [float(found["a"].double().sum()) for found in (whole, read, streamed, doubled)]
        assert len(set(sums)) == 1, sums
        child = os.fork()
        if child == 0:
            again = [float(found["a"].double().sum()) for found in (whole, read, streamed, doubled)]
            right = again == sums
            right = right and torch.equal(part, whole["b"][3:70, 5:1000])
            right = right and torch.equal(cast["c"], whole["c"].bfloat16())
            whole["a"].zero_()
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert float(whole["a"].double().sum()) == sums[0], "what a child writes is its own"
        """
    )


def test_workers_of_a_data_loader_read_tensors_that_were_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save(path, model())
    dataset = torch.utils.data.TensorDataset(OURS.load_file(path)["b"])
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=64, num_workers=2, multiprocessing_context="fork"
    )
    found = torch.cat([rows for (rows,) in loader])
    assert torch.equal(found, model()["b"])


def test_a_child_forked_while_a_thread_reads_ahead_can_load(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    forebay.numpy.save_file({"x": np.arange(1000, dtype=np.float32)}, path)
    done = run_python(
        f"""
        import os, signal, threading, warnings
        from forebay.transformers import ahead
        warnings.simplefilter("ignore", DeprecationWarning)
        begun, end, parent = threading.Event(), threading.Event(), os.getpid()
        class Slow(ahead._AheadFile):
            def some(self, *arguments):
                if os.getpid() == parent:
                    begun.set()
                    end.wait()
                return super().some(*arguments)
        class Open(ahead.AheadOpen):
            _file_class = Slow
        file = Open({str(path)!r}, "numpy")
        reads = threading.Thread(target=file.get_tensor, args=("x",))
        reads.start()
        begun.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(0 if file.get_tensor("x").sum() == 999 * 500 else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        end.set()
        reads.join()
        """
    )
    assert done.stdout == "0\n"


def test_a_child_forked_while_a_thread_makes_the_shared_handle_can_load(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    forebay.numpy.save_file({"x": np.arange(1000, dtype=np.float32)}, path)
    done = run_python(
        f"""
        import os, signal, threading, warnings, forebay, forebay.numpy
        from forebay._tensor_files import shared
        warnings.simplefilter("ignore", DeprecationWarning)
        begun, end, parent = threading.Event(), threading.Event(), os.getpid()
        def make():
            if os.getpid() == parent:
                begun.set()
                end.wait()
            return forebay.Handle()
        shared.Handle, shared._handles = make, type(shared._handles)()
        loads = threading.Thread(target=forebay.numpy.load_file, args=({str(path)!r},))
        loads.start()
        begun.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            loaded = forebay.numpy.load_file({str(path)!r})["x"]
            os._exit(0 if loaded.sum() == 999 * 500 else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        end.set()
        loads.join()
        """
    )
    assert done.stdout == "0\n"
