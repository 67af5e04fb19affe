"""Tensors of files in models and in memory that is there: placed, tied, refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch

import forebay.torch
from forebay.errors import InvalidInputError
from forebay.torch.frame import FRAME
from reference import (
    answer,
    assert_holds,
    assert_identical,
    experts,
    random_tensor,
    read_json,
    save_shards,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

THEIRS = safetensors.torch
OURS = forebay.torch


# Into what is there


def test_tensors_are_loaded_into_the_memory_that_is_there(tmp_path: Path) -> None:
    wanted = experts()
    save_shards(tmp_path, wanted)
    target = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    addresses = {name: tensor.data_ptr() for name, tensor in target.items()}
    assert OURS.load_into(target, tmp_path) == ([], [])
    assert_holds(target, wanted)
    assert addresses == {name: tensor.data_ptr() for name, tensor in target.items()}


def test_what_cant_be_read_into_place_is_copied_there(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    wanted = {
        "strided": random_tensor((40, 30), torch.float32).nan_to_num(0),
        "cast": torch.linspace(0, 1, 100),
        "wide": torch.arange(10, dtype=torch.int32),
        "part": torch.arange(5.0),
    }
    OURS.save_file(wanted, path)
    base = torch.zeros(40, 60)
    longer = torch.zeros(9)
    target = {
        "strided": base[:, ::2],
        "cast": torch.zeros(100, dtype=torch.bfloat16),
        "wide": torch.zeros(10, dtype=torch.int64),
        "part": longer[2:7],
    }
    OURS.load_into(target, path)
    assert torch.equal(base[:, ::2], wanted["strided"])
    assert torch.equal(base[:, 1::2], torch.zeros(40, 30))
    assert torch.equal(target["cast"], wanted["cast"].bfloat16())
    assert torch.equal(target["wide"], wanted["wide"].long())
    assert longer.tolist() == [0, 0, 0, 1, 2, 3, 4, 0, 0]


def test_two_tensors_for_one_memory_are_loaded_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    first, second = torch.zeros(300_000), torch.ones(300_000)
    OURS.save_file({"a": first, "b": second}, path)
    memory = torch.full((300_000,), 7.0)
    OURS.load_into({"a": memory, "b": memory}, path)
    assert torch.equal(memory, second)


def test_nothing_is_loaded_where_shapes_or_names_differ(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"a": torch.ones(3), "b": torch.ones(4)}, path)
    target = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}
    with pytest.raises(InvalidInputError, match=r"'b'.*\(4,\).*\(2, 2\)"):
        OURS.load_into(target, path)
    for other in (
        {"a": torch.zeros(3)},
        {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(1)},
    ):
        with pytest.raises(RuntimeError, match=r"'[bc]'"):
            OURS.load_into(other, path)
        assert torch.equal(other["a"], torch.zeros(3))
    assert OURS.load_into({"a": target["a"], "c": torch.zeros(1)}, path, strict=False) == (
        ["c"],
        ["b"],
    )
    assert torch.equal(target["a"], torch.ones(3))
    with pytest.raises(InvalidInputError, match="to_empty"):
        OURS.load_into({"a": torch.zeros(3, device="meta")}, path, keys="a")


class Tied(torch.nn.Module):
    """A model whose head is its embedding."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_a_module_is_loaded_into_with_its_tied_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    model, target = Tied(), Tied()
    OURS.save_model(model, path)
    memory = target.embed.weight.data_ptr()
    assert OURS.load_into(target, path) == ([], [])
    assert target.head.weight.data_ptr() == target.embed.weight.data_ptr() == memory
    assert_holds(dict(target.state_dict()), dict(model.state_dict()))
    assert target.body.weight.requires_grad
    with pytest.raises(RuntimeError, match="head"):
        OURS.load_into(Tied(tied=False), path)


def test_a_part_of_a_module_is_loaded_into(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    model, target = Tied(tied=False), Tied(tied=False)
    OURS.save_model(model, path)
    before = target.head.weight.clone()
    OURS.load_into(target, path, keys="body.*")
    assert torch.equal(target.body.weight, model.body.weight)
    assert torch.equal(target.head.weight, before)


class Copying(torch.nn.Linear):
    """A module whose state is a copy, and takes a state back as any module does."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._register_state_dict_hook(self._copied)

    @staticmethod
    def _copied(module: Any, state: dict[str, Any], prefix: str, local: Any) -> dict[str, Any]:
        del module, prefix, local
        return {name: tensor.clone() for name, tensor in state.items()}


class Sealed(torch.nn.Linear):
    """A module with a tensor of its own making in its state."""

    taken: torch.Tensor

    def get_extra_state(self) -> torch.Tensor:
        """Return what is saved."""
        return torch.zeros(3)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Keep what was loaded."""
        self.taken = state


def test_what_a_module_only_makes_a_copy_of_is_never_said_to_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    model = torch.nn.Linear(3, 3)
    OURS.save_model(model, path)
    target = Copying(3, 3)
    with pytest.raises(InvalidInputError, match=r"'weight'.*load_model"):
        OURS.load_into(target, path)
    OURS.save_file({**model.state_dict(), "_extra_state": torch.ones(3)}, path)
    sealed = Sealed(3, 3)
    with pytest.raises(InvalidInputError, match=r"'_extra_state'.*load_model"):
        OURS.load_into(sealed, path)
    OURS.load_into(sealed, path, keys="weight")
    assert torch.equal(sealed.weight, model.weight)


@pytest.fixture
def cpu_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models on the CPU take the way of those on a GPU."""

    def reaches(self: Any, device: torch.device) -> bool:
        del self
        return device.type == "cpu"

    monkeypatch.setattr(type(FRAME), "reaches", reaches)


@pytest.mark.usefixtures("cpu_as_a_device")
def test_models_on_a_device_whose_state_is_a_copy_are_loaded_by_their_own_way(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.safetensors"
    model = torch.nn.Linear(3, 3)
    extra = torch.arange(3.0)
    OURS.save_file({**model.state_dict(), "_extra_state": extra}, path)
    sealed = Sealed(3, 3)
    assert OURS.load_model(sealed, path) == (set(), [])
    assert torch.equal(sealed.taken, extra)
    assert torch.equal(sealed.weight, model.weight)
    OURS.save_model(model, path)
    for target in (Copying(3, 3), torch.nn.Linear(3, 3)):
        assert OURS.load_model(target, path) == (set(), [])
        assert_holds(dict(target.state_dict()), dict(model.state_dict()))


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as those that are quantized or distributed are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type[Wrapper], inner: torch.Tensor) -> Wrapper:  # noqa: PYI034 (3.11 has it)
        """Make one around another."""
        made: Wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        if function is torch.ops.aten.copy_.default:
            args[0].inner.copy_(args[1])
            return args[0]
        raise NotImplementedError(str(function), kwargs)


def test_tensors_without_memory_of_their_own_are_copied_to_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"a": torch.arange(8.0)}, path)
    target = Wrapper(torch.zeros(8))
    assert OURS.load_into({"a": target}, path) == ([], [])
    assert target.inner.tolist() == list(range(8))

    class Distributed(Wrapper):
        def to_local(self) -> torch.Tensor:
            return self.inner

    distributed = Distributed(torch.zeros(8))
    with pytest.raises(InvalidInputError, match="to_local"):
        OURS.load_into({"a": distributed}, path)
    assert distributed.inner.tolist() == [0] * 8


def test_tensors_without_memory_of_their_own_are_refused_by_their_names(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_buffer("whole", Wrapper(torch.ones(3)))
    tensors = {"a": torch.ones(1), "whole": Wrapper(torch.ones(3))}
    path = tmp_path / "x.safetensors"
    with pytest.raises(InvalidInputError, match=r"'whole' \(Wrapper\).*to_local"):
        OURS.save_file(tensors, path)
    with pytest.raises(InvalidInputError, match=r"'whole' \(Wrapper\).*to_local"):
        OURS.save(tensors)
    with pytest.raises(InvalidInputError, match=r"'whole' \(Wrapper\).*to_local"):
        OURS.save_model(model, path)
    assert not path.exists()


def test_a_type_that_files_lack_is_converted_to(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    OURS.save_file({"a": torch.arange(4).to(torch.complex64)}, path)
    target = torch.zeros(4, dtype=torch.complex128)
    OURS.load_into({"a": target}, path)
    assert target.tolist() == [0, 1, 2, 3]


# Models


def models() -> dict[str, Callable[[], torch.nn.Module]]:
    def buffers(**tensors: torch.Tensor) -> torch.nn.Module:
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        return module

    base = torch.arange(12.0)
    square = torch.arange(12.0).reshape(3, 4)
    return {
        "tied": Tied,
        "untied": lambda: Tied(tied=False),
        "a part alone": lambda: buffers(a=base[:3]),
        "two halves": lambda: buffers(a=base[:6], b=base[6:]),
        "whole and parts": lambda: buffers(x=base, y=base[:2], z=base[1:3]),
        "parts after a gap": lambda: buffers(x=base, y=base[3:5], z=base[6:8]),
        "two shapes": lambda: buffers(x=base, y=base.view(3, 4)),
        "not contiguous": lambda: buffers(x=square.t()),
        "every other column": lambda: buffers(x=square[:, ::2]),
        "a transposed twin": lambda: buffers(x=square, y=square.t()),
        "without memory": lambda: torch.nn.Linear(2, 2, device="meta"),
        "without tensors": torch.nn.Module,
    }


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("force_contiguous", [True, False])
@pytest.mark.parametrize("metadata", [None, {"head.weight": "mine", "y": "z"}])
def test_models_are_saved_and_refused_as_by_the_reference(
    tmp_path: Path, name: str, force_contiguous: bool, metadata: dict[str, str] | None
) -> None:
    torch.manual_seed(0)
    model = models()[name]()

    def saved(save: Any, path: Path) -> Any:
        given = None if metadata is None else dict(metadata)
        save(model, path, given, force_contiguous)
        read = read_json(path).get("__metadata__", {})
        read.pop("forebay.crc32c", None)
        return THEIRS.load_file(path), read, given

    ours = answer(lambda: saved(OURS.save_model, tmp_path / "a"))
    theirs = answer(lambda: saved(THEIRS.save_model, tmp_path / "b"))
    assert ours[0] == theirs[0], f"{ours[1]!r}\n{theirs[1]!r}"
    if ours[0]:
        assert_identical(ours[1][0], theirs[1][0])
        assert ours[1][1:] == theirs[1][1:]
    else:
        assert isinstance(ours[1], ValueError) == isinstance(theirs[1], ValueError)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("saved", ["tied", "untied", "other", "wrong shape", "only the head"])
@pytest.mark.parametrize("tied", [True, False])
def test_models_are_loaded_and_refused_as_by_the_reference(
    tmp_path: Path, strict: bool, saved: str, tied: bool
) -> None:
    path = tmp_path / "x.safetensors"
    torch.manual_seed(1)
    if saved in {"tied", "untied"}:
        OURS.save_model(Tied(tied=saved == "tied"), path)
    else:
        contents = {
            "other": {"z": torch.ones(1)},
            "wrong shape": {"embed.weight": torch.ones(2, 2)},
            "only the head": {"head.weight": torch.ones(50, 8)},
        }[saved]
        OURS.save_file(contents, path)
    ours, theirs = Tied(tied), Tied(tied)
    ours.load_state_dict(theirs.state_dict())
    found = answer(lambda: OURS.load_model(ours, path, strict))
    wanted = answer(lambda: THEIRS.load_model(theirs, path, strict))
    assert found[0] == wanted[0], f"{found[1]!r}\n{wanted[1]!r}"
    if found[0]:
        missing, unexpected = wanted[1]
        assert (found[1][0], sorted(found[1][1])) == (missing, sorted(unexpected))
    else:
        assert isinstance(found[1], RuntimeError)
    assert_holds(dict(ours.state_dict()), dict(theirs.state_dict()))


def test_a_module_with_state_that_is_no_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"turns": 3}

    path = tmp_path / "x.safetensors"
    OURS.save_model(torch.nn.Linear(2, 2), path)
    with pytest.raises(InvalidInputError, match="'_extra_state' is a dict"):
        OURS.load_into(Counting(2, 2), path)
