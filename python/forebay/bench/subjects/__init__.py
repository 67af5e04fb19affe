"""All that can be compared, each an adapter of a few lines that says why where it isn't here.

Each comparison has a set of them. The first is Forebay, with which the others are compared.
"""

from __future__ import annotations

from forebay.bench.subjects.files import HuggingFaceReader, MappedTorch, SafetensorsPread
from forebay.bench.subjects.fio import Fio
from forebay.bench.subjects.frameworks import (
    DistributedCheckpoint,
    Safetensors,
    Tensorizer,
    Torch,
)
from forebay.bench.subjects.gpu_rivals import (
    AioThroughHost,
    FastSafetensorsGds,
    FastSafetensorsHost,
    GdsHandle,
    InstantTensorGpu,
    KvikioGpu,
    RunaiGpu,
    SafetensorsGpu,
    TorchGpu,
    TorchThenCuda,
)
from forebay.bench.subjects.loaders import FastSafetensors, InstantTensor, RunaiStreamer
from forebay.bench.subjects.native import DeepNvme, Kvikio
from forebay.bench.subjects.our_files import Checkpoint, Foreign, Unverified, Verified
from forebay.bench.subjects.our_gpu import (
    AutoRoute,
    FileToGpu,
    ForeignToGpu,
    GdsRoute,
    HostRoute,
    UnverifiedToGpu,
)
from forebay.bench.subjects.ours import Ordinary, Pinned
from forebay.bench.subjects.plain import Numpy, Python
from forebay.bench.subjects.subject import Subject
from forebay.bench.subjects.yardsticks import HostMemory, PinnedCopy

__all__ = ["COMPARISONS"]

_TENSORS: tuple[type[Subject], ...] = (
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
_FILES: tuple[type[Subject], ...] = (
    Verified,
    Unverified,
    Foreign,
    Checkpoint,
    Fio,
    Safetensors,
    SafetensorsPread,
    RunaiStreamer,
    FastSafetensors,
    Torch,
    MappedTorch,
    HuggingFaceReader,
)
_GPU: tuple[type[Subject], ...] = (
    FileToGpu,
    UnverifiedToGpu,
    ForeignToGpu,
    AutoRoute,
    HostRoute,
    GdsRoute,
    Fio,
    HostMemory,
    PinnedCopy,
    TorchGpu,
    TorchThenCuda,
    SafetensorsGpu,
    FastSafetensorsHost,
    FastSafetensorsGds,
    RunaiGpu,
    InstantTensorGpu,
    KvikioGpu,
    AioThroughHost,
    GdsHandle,
)

COMPARISONS: dict[str, dict[str, type[Subject]]] = {
    what: {subject.name: subject for subject in subjects}
    for what, subjects in (("tensors", _TENSORS), ("files", _FILES), ("gpu", _GPU))
}
"""What ``--what`` can be, and who is compared then, by the names that ``--only`` takes."""
