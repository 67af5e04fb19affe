"""Models of local directories."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import transformers

from forebay._tensor_files.select import parse_path
from forebay.errors import FileMissingError, NotDirectoryError
from forebay.transformers.swap import loading

if TYPE_CHECKING:
    from forebay._tensor_files.select import Path
    from forebay.handle import Handle

__all__ = ["from_pretrained"]


def from_pretrained(
    directory: Path,
    *,
    model_class: Any = None,
    verify: bool = True,
    handle: Handle | None = None,
    **options: Any,
) -> Any:
    """Load the model of a local directory, its weights through Forebay.

    Parameters
    ----------
    directory : path
        What ``save_pretrained`` has written: a configuration, and weights in safetensors files.
    model_class : optional
        A class with ``from_pretrained``, such as ``transformers.AutoModelForCausalLM``; by default,
        the one that the configuration names.
    verify : bool
        Check the checksums of files that have them.
    handle : Handle, optional
        What to read with; by default, a handle of the process.
    **options
        For the ``from_pretrained`` of ``transformers``, such as ``dtype="auto"``.

    Raises
    ------
    SystemCallError
        There is no such directory: nothing is downloaded (also an ``OSError``).
    """
    path = parse_path(directory, "directory")
    if not os.path.isdir(path):
        kind = NotDirectoryError if os.path.exists(path) else FileMissingError
        raise kind(f"{path} isn't a directory: save the model there with save_pretrained")
    if model_class is None:
        model_class = _named_class(path)
    with loading(verify=verify, handle=handle):
        return model_class.from_pretrained(path, local_files_only=True, **options)


def _named_class(path: str) -> Any:
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    return transformers.AutoModel
