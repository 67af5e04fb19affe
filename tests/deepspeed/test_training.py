"""Training with everything on a drive gives the losses of states in memory, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runs import FOREBAY, SECONDS_MAX, TRAIN, Training, run

pytestmark = pytest.mark.timeout(4 * SECONDS_MAX)

IN_MEMORY = {"optimizer": "cpu", "parameters": "none"}
ON_DRIVE = {"optimizer": "nvme", "parameters": "nvme"}
SWAPPERS = {False: "PartitionedOptimizerSwapper", True: "PipelinedOptimizerSwapper"}


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path)


@pytest.fixture(scope="session")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the losses of 20 steps with the optimizer's states in memory, without Forebay."""
    known: dict[str, list[list[str]]] = {}

    def losses(world_size: int, dtype: str, **more: Any) -> list[list[str]]:
        key = repr((world_size, dtype, more))
        if key not in known:
            training = Training(tmp_path_factory.mktemp("in_memory"))
            found = training.run(world_size, {"dtype": dtype, **more, **IN_MEMORY}, ())
            assert not any(one["forebay"] for one in found)
            known[key] = [one["losses"] for one in found]
        return known[key]

    return losses


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("pipeline", [False, True])
def test_losses_are_those_of_states_in_memory(
    training: Training, in_memory: Any, pipeline: bool, world_size: int, dtype: str
) -> None:
    expected = in_memory(world_size, dtype)
    found = training.run(world_size, {"dtype": dtype, "pipeline": pipeline, **ON_DRIVE})
    assert [one["losses"] for one in found] == expected
    assert len(set(expected[0])) > 10
    for one in found:
        assert one["forebay"]
        assert one["swapper"] == SWAPPERS[pipeline]
        for kind in ("_param.", "_gradient_", "exp_avg-", "exp_avg_sq-"):
            assert any(kind in name for name in one["files"]), kind


@pytest.mark.parametrize(
    ("world_size", "dtype", "pipeline"), [(1, "bf16", False), (2, "fp32", True)]
)
def test_a_saved_run_goes_on_as_if_it_hadnt_ended(
    training: Training,
    in_memory: Any,
    tmp_path: Path,
    world_size: int,
    dtype: str,
    pipeline: bool,
) -> None:
    # DeepSpeed doesn't save the states of groups too small to be on the drive: have one group.
    one_group = {"sub_group_size": 10_000_000}
    wanted = {
        "dtype": dtype,
        "pipeline": pipeline,
        "checkpoint": str(tmp_path / "checkpoint"),
        **one_group,
        **ON_DRIVE,
    }
    whole = in_memory(world_size, dtype, **one_group)
    assert training.losses(world_size, {**wanted, "save_after": 10, "steps": [0, 10]}) == [
        losses[:10] for losses in whole
    ]
    resumed = training.losses(world_size, {**wanted, "resume": True, "steps": [10, 20]})
    assert resumed == [losses[10:] for losses in whole]


def test_asserts_that_do_work_are_kept_when_python_leaves_asserts_out(
    training: Training, in_memory: Any
) -> None:
    found = training.run(1, {"dtype": "bf16", "pipeline": True, **ON_DRIVE}, ("-O", *FOREBAY))
    assert found[0]["losses"] == in_memory(1, "bf16")[0]
    assert any("exp_avg_sq-" in name for name in found[0]["files"])


def test_switches_written_as_text_in_the_configuration_work(
    training: Training, in_memory: Any
) -> None:
    aio = {"single_submit": "false", "overlap_events": "true", "block_size": 1 << 20}
    losses = training.losses(1, {"dtype": "bf16", "aio": aio, **ON_DRIVE})
    assert losses == in_memory(1, "bf16")


def test_workers_of_torchrun_run_on_forebay(training: Training, in_memory: Any) -> None:
    path, output = training.describe(
        {"dtype": "bf16", "pipeline": True, **ON_DRIVE}, rendezvous=False
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    logs = f"--log-dir={Path(path).parent}"
    run(*FOREBAY, *torchrun, logs, TRAIN, path)
    found = training.found(output, 2)
    assert all(one["forebay"] for one in found)
    assert [one["losses"] for one in found] == in_memory(2, "bf16")
