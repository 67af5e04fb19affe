"""Trains a tiny model with DeepSpeed's ZeRO-3 and writes its losses: a program like any user's.

It knows nothing of Forebay. What it is to do is in a JSON file: the numeric type, where parameters
and optimizer states are, whether the optimizer's swapper is pipelined, how many steps, and whether
to save or to resume on the way.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

WIDTH = 1024
"""Each layer has 2**20 parameters: in halves, still enough bytes for DeepSpeed to swap them."""


class Layers(torch.nn.Module):
    """A few layers, some too small for DeepSpeed to swap, and one whose size divides by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.odd = torch.nn.Linear(WIDTH, 1031)
        self.last = torch.nn.Linear(1031, 7)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.wide:
            batch = torch.tanh(layer(batch))
        return self.last(torch.tanh(self.odd(batch)))


def configuration(wanted: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": wanted.get("sub_group_size", 1_100_000),
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 2_000_000,
        "offload_optimizer": {"device": wanted["optimizer"], "pin_memory": False},
    }
    if wanted["optimizer"] == "nvme":
        zero["offload_optimizer"] |= {
            "nvme_path": wanted["folder"],
            "buffer_count": 8,
            "pipeline_read": wanted["pipeline"],
            "pipeline_write": wanted["pipeline"],
        }
    if wanted["parameters"] != "none":
        zero["offload_param"] = {"device": wanted["parameters"], "pin_memory": False}
    if wanted["parameters"] == "nvme":
        zero["offload_param"] |= {
            "nvme_path": wanted["folder"],
            "buffer_count": 8,
            "buffer_size": 2_200_000,
            "max_in_cpu": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": wanted["dtype"] == "bf16"},
        "zero_optimization": zero,
        "aio": {"block_size": 262144, "queue_depth": 8, "intra_op_parallelism": 2}
        | wanted.get("aio", {}),
        "steps_per_print": 1_000_000,
    }


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step: the same in every run."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (
        torch.randn(2, WIDTH, generator=generator).to(dtype),
        torch.randn(2, 7, generator=generator).to(dtype),
    )


def train_once(engine: Any, step: int, dtype: torch.dtype) -> str:
    """Take one step; return its loss to the last bit."""
    data, target = batch(step, int(os.environ["RANK"]), dtype)
    loss = torch.nn.functional.mse_loss(engine(data), target)
    engine.backward(loss)
    engine.step()
    return loss.float().item().hex()


def resume(engine: Any, wanted: dict[str, Any], dtype: torch.dtype) -> None:
    """Load the checkpoint; for states on a drive, in a way that DeepSpeed finds all of them.

    It reads an optimizer's states from a drive only if they were there before the checkpoint was
    loaded, so a step is taken first, and overwritten; and it doesn't restore what it keeps in
    memory: Adam's count of steps.
    """
    on_drive = wanted["optimizer"] == "nvme"
    if on_drive:
        train_once(engine, 0, dtype)
    engine.load_checkpoint(wanted["checkpoint"])
    if on_drive:
        for state in engine.optimizer.optimizer.state.values():
            state["step"].fill_(engine.global_steps)


def main() -> None:
    """Train, and leave the losses of this rank in a file."""
    wanted = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    torch.manual_seed(7)
    # Its reductions through shared memory would be compiled first; gloo's will do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dtype = torch.bfloat16 if wanted["dtype"] == "bf16" else torch.float32
    rank = int(os.environ["RANK"])
    if "rendezvous" in wanted:
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{wanted['rendezvous']}",
            rank=rank,
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    settings = configuration(wanted)
    # Else DeepSpeed takes 2-byte parameters for granted when they go to a drive; and with a type
    # named here, on processors without half precision too.
    partitioned = wanted["parameters"] == "nvme" and wanted["dtype"] == "fp32"
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=partitioned):
        model = Layers()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config=settings,
    )
    if wanted.get("resume"):
        resume(engine, wanted, dtype)
    losses = []
    for step in range(*wanted["steps"]):
        losses.append(train_once(engine, step, dtype))
        if step + 1 == wanted.get("save_after"):
            engine.save_checkpoint(wanted["checkpoint"])
    files = [path.name for path in Path(wanted["folder"]).rglob("*.swp")]
    swapper = type(getattr(engine.optimizer, "optimizer_swapper", None)).__name__
    handles = "forebay.deepspeed.async_io" in sys.modules
    found = {"losses": losses, "swapper": swapper, "files": files, "forebay": handles}
    Path(f"{wanted['output']}.{rank}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
