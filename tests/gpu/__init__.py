"""Tests on real GPUs: ``pytest -m gpu``.

Where there is no GPU they are skipped, with the reason. ``pytest tests/gpu --gpu-device cpu`` is a
dry run on the processor, which tells whether the tests themselves are right.
"""
