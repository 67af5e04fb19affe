"""A training run that is killed goes on as if it hadn't been."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 14
EVERY = 3

TRAINING = f"""
import os, signal, sys
import numpy as np, torch
from forebay.checkpoint import Checkpointer

directory, death = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
random = np.random.default_rng(0)
model = torch.nn.Sequential(
    torch.nn.Linear(32, 64), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(64, 32)
)
model[3].weight = torch.nn.Parameter(model[0].weight.detach().T.clone())
model.register_buffer("tied", model[0].weight)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5),
    ],
    milestones=[4],
)
saver = Checkpointer(directory, keep=2, budget="64MiB")
first = 0
if saver.latest() is not None:
    state = saver.load()
    first = state["step"]
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["torch_random"])
    random.bit_generator.state = state["numpy_random"]
for step in range(first, {STEPS}):
    inputs = torch.from_numpy(random.normal(size=(16, 32)).astype("float32"))
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(step, loss.item().hex(), scheduler.get_last_lr()[0].hex(), flush=True)
    if (step + 1) % {EVERY} == 0:
        saver.save_async(step + 1, {{
            "step": step + 1,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "torch_random": torch.get_rng_state(),
            "numpy_random": random.bit_generator.state,
        }})
    if step == death:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def train(directory: Path, death: int) -> dict[int, tuple[str, ...]]:
    """Train until the end or the death after a step; return what each step came to."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", TRAINING, str(directory), str(death)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == (-9 if death >= 0 else 0), done.stderr
    lines = (line.split() for line in done.stdout.splitlines())
    return {int(step): tuple(numbers) for step, *numbers in lines}


def test_losses_are_bit_equal_to_those_of_a_run_that_was_not_killed(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", -1)
    assert sorted(whole) == list(range(STEPS))
    resumed: dict[int, tuple[str, ...]] = {}
    for death in (1, 4, 6, 11, -1):
        part = train(tmp_path / "killed", death)
        first = min(part)
        assert first % EVERY == 0
        assert first <= max(resumed, default=-1) + 1
        for step, numbers in part.items():
            # What is trained again comes to the same as before.
            assert resumed.setdefault(step, numbers) == numbers
    assert resumed == whole
