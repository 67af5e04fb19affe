"""DeepSpeed on Forebay: its operators for drives and pinned memory are Forebay's, scripts stay.

Three ways to switch it on: :func:`install` in a program; ``python -m forebay.deepspeed train.py``
around one, with the processes that it starts; ``forebay deepspeed enable`` for an environment.
Nothing here imports DeepSpeed or torch by itself: :mod:`forebay.deepspeed.imports` waits for
DeepSpeed, :mod:`forebay.deepspeed.builders` then changes it, the modules named after DeepSpeed's
operators are what it gets, and :mod:`forebay.deepspeed.hook` keeps the ``.pth`` file.
"""

from forebay.deepspeed.imports import install

__all__ = ["install"]
