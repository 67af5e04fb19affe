"""The examples in the docstrings are run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import tempfile
from typing import TYPE_CHECKING

import pytest

import forebay

if TYPE_CHECKING:
    from pathlib import Path

MODULES = [
    "forebay",
    *(
        module.name
        for module in pkgutil.walk_packages(forebay.__path__, "forebay.")
        if not module.name.endswith((".torch", ".__main__", "._forebay", ".tensor_cast"))
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_hold(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    modules = map(importlib.import_module, MODULES)
    assert sum(len(test.examples) for module in modules for test in finder.find(module)) > 15
