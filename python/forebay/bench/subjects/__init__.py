"""All that can be compared, each an adapter of a few lines that says why where it isn't here.

The first is Forebay, with which the others are compared.
"""

from __future__ import annotations

from forebay.bench.subjects.fio import Fio
from forebay.bench.subjects.frameworks import (
    DistributedCheckpoint,
    Safetensors,
    Tensorizer,
    Torch,
)
from forebay.bench.subjects.loaders import FastSafetensors, InstantTensor, RunaiStreamer
from forebay.bench.subjects.native import DeepNvme, Kvikio
from forebay.bench.subjects.ours import Ordinary, Pinned
from forebay.bench.subjects.plain import Numpy, Python
from forebay.bench.subjects.subject import Subject

__all__ = ["SUBJECTS"]

SUBJECTS: dict[str, type[Subject]] = {
    subject.name: subject
    for subject in (
        Pinned,
        Ordinary,
        Fio,
        Python,
        Numpy,
        Torch,
        Safetensors,
        DeepNvme,
        Kvikio,
        FastSafetensors,
        RunaiStreamer,
        Tensorizer,
        DistributedCheckpoint,
        InstantTensor,
    )
}
