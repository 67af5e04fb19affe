"""Files of tensors and checkpoints, from and into the memory of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from forebay.errors import MismatchError
from gpu.machine import contents, held, pattern, resident_peak

if TYPE_CHECKING:
    from pathlib import Path

    from gpu.machine import Gpu

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LARGE = (64 << 20) + 12


def _state(gpu: Gpu) -> dict[str, Any]:
    """Return tensors of many types and sizes, of none and of one item too."""
    half = torch.from_numpy(pattern(2 * 100_003, 1)).to(gpu.device).view(torch.bfloat16)
    return {
        "half": half,
        "empty": torch.empty(0, 5, device=gpu.device),
        "scalar": torch.tensor(42.5, dtype=torch.float64, device=gpu.device),
        "large": gpu.bytes(LARGE, 2),
        "matrix": torch.arange(1001 * 13, device=gpu.device, dtype=torch.int32).reshape(1001, 13),
        **{f"small.{index}": gpu.bytes(1 + 37 * index, index) for index in range(200)},
    }


def _same(found: dict[str, Any], wanted: dict[str, Any], gpu: Gpu) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].device.type == gpu.device.type
        and found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and contents(found[name]) == contents(tensor)
        for name, tensor in wanted.items()
    )


def test_a_file_of_tensors_comes_back_on_the_gpu(gpu: Gpu, path: Path) -> None:
    from forebay.torch import load_file, save_file

    state = _state(gpu)
    save_file(state, path)
    for verify in (True, False):
        assert _same(load_file(path, device=gpu.name, verify=verify), state, gpu)


def test_what_kernels_are_still_making_is_saved_as_it_becomes(gpu: Gpu, path: Path) -> None:
    from forebay.torch import load_file, save_file

    source, tensor = gpu.bytes(LARGE, 3), gpu.empty(LARGE)
    gpu.synchronize()
    with gpu.stream():
        gpu.keep_busy()
        torch.bitwise_xor(source, 0x3C, out=tensor)
        save_file({"made": tensor}, path)
    assert contents(load_file(path)["made"]) == (pattern(LARGE, 3) ^ 0x3C).tobytes()


def test_other_libraries_read_the_file_and_write_what_is_loaded(gpu: Gpu, path: Path) -> None:
    reference = pytest.importorskip("safetensors.torch")
    from forebay.torch import load_file, save_file

    state = _state(gpu)
    save_file(state, path)
    assert _same(reference.load_file(path, device=gpu.name), state, gpu)
    reference.save_file(state, path)
    assert _same(load_file(path, device=gpu.name), state, gpu)


def test_a_flipped_bit_is_found_on_the_way_to_the_gpu(gpu: Gpu, path: Path) -> None:
    from forebay.torch import load_file, save_file

    save_file({"first": gpu.bytes(1000, 1), "large": gpu.bytes(LARGE, 2)}, path)
    with path.open("r+b") as file:
        file.seek(-12345, 2)
        (byte,) = file.read(1)
        file.seek(-12345, 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(MismatchError, match="large"):
        load_file(path, device=gpu.name)


def test_loads_are_cast_on_the_way(gpu: Gpu, path: Path) -> None:
    from forebay.torch import load_file, save_file

    state = {
        "weights": torch.linspace(-3, 3, 100_003, device=gpu.device),
        "ids": torch.arange(1001, device=gpu.device),
    }
    save_file(state, path)
    found = load_file(path, device=gpu.name, dtype=torch.bfloat16)
    assert torch.equal(found["weights"], state["weights"].to(torch.bfloat16))
    assert torch.equal(found["ids"], state["ids"])


def test_a_load_of_much_takes_little_of_the_host(real_gpu: Gpu, path: Path) -> None:
    from forebay.torch import load_file, save_file

    count, length = 8, 64 << 20
    save_file({str(index): real_gpu.bytes(length, index) for index in range(count)}, path)
    load_file(path, device=real_gpu.name)
    before = held().resident_bytes
    resident_peak(reset=True)
    found = load_file(path, device=real_gpu.name)
    assert resident_peak() - before < count * length // 4
    for index in range(count):
        assert contents(found[str(index)]) == pattern(length, index).tobytes()


def test_a_checkpoint_comes_back_into_tensors_of_the_gpu(gpu: Gpu, tmp_path: Path) -> None:
    from forebay.checkpoint import Checkpointer

    state = {"step": 7, "model": _state(gpu)}
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(7, state)
        target = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}
        loaded = checkpointer.load(into={"step": 0, "model": target})
        assert loaded["step"] == 7
        assert _same(loaded["model"], state["model"], gpu)
        assert all(loaded["model"][name] is tensor for name, tensor in target.items())


def test_a_save_in_the_background_holds_the_old_values(gpu: Gpu, tmp_path: Path) -> None:
    from forebay.checkpoint import Checkpointer

    source, tensor = gpu.bytes(LARGE, 4), gpu.empty(LARGE)
    gpu.synchronize()
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        for step in range(3):
            with gpu.stream():
                gpu.keep_busy()
                torch.bitwise_xor(source, step, out=tensor)
                checkpointer.save_async(step, {"tensor": tensor})
                tensor.fill_(0xEE)
            loaded = checkpointer.load(step)["tensor"]
            assert contents(loaded) == (pattern(LARGE, 4) ^ step).tobytes()
            gpu.synchronize()


def test_a_training_run_goes_on_where_it_was(gpu: Gpu, tmp_path: Path) -> None:
    from forebay.checkpoint import Checkpointer

    def train(model: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(32, 64, generator=generator).to(gpu.device)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    def begin() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 3))
        model = model.to(gpu.device)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = begin()
    train(model, optimizer, range(3))
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpointer.save_async(3, state)
        saved = {name: contents(tensor) for name, tensor in model.state_dict().items()}
        train(model, optimizer, range(3, 6))
        other, its_optimizer = begin()
        loaded = checkpointer.load()
    other.load_state_dict(loaded["model"])
    its_optimizer.load_state_dict(loaded["optimizer"])
    assert {name: contents(tensor) for name, tensor in other.state_dict().items()} == saved
    train(other, its_optimizer, range(3, 6))
    # The same kernels on the same values: what was not restored to the bit drifts.
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
