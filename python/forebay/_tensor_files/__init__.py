"""What loading and saving safetensors files has in common for all frameworks.

``forebay.numpy`` and ``forebay.torch`` are its faces; what a framework does in its own way (types,
arrays over memory, indexing) is behind :class:`forebay._tensor_files.frame.Frame`. The format, the
reads and the checks are the compiled module's.
"""

from __future__ import annotations

__all__: list[str] = []
