"""Checkpoints: states of a training run, each whole or not there at all.

A :class:`Checkpointer` saves nested dictionaries and lists of tensors into a directory, in the
background, and loads them. ``docs/format.md`` describes the files byte by byte.
"""

from __future__ import annotations

from forebay.checkpoint.checkpointer import Checkpointer
from forebay.checkpoint.saving import SaveOperation

__all__ = ["Checkpointer", "SaveOperation"]
