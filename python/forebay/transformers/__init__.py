"""Hugging Face models, loaded through Forebay.

:func:`loading` makes the loading of safetensors files Forebay's wherever ``transformers`` and its
relatives do it; :func:`from_pretrained` is one line for a model in a local directory. Weights are
read in few large requests, checked where they have checksums, and equal to what ``safetensors``
gives, bit by bit.
"""

from __future__ import annotations

from forebay.transformers.pretrained import from_pretrained
from forebay.transformers.swap import loading

__all__ = ["from_pretrained", "loading"]
