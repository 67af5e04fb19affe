"""Turns text and tensors back into a state, and finds where tensors are in one.

The text comes from outside: whatever it is, the result is a state or an error, and nothing in it is
run unless ``allow_pickle`` says so.
"""

from __future__ import annotations

import base64
import json
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.checkpoint.arrays import framework_of
from forebay.checkpoint.encode import TEXT_CODEC, show_path
from forebay.errors import InvalidInputError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Place", "decode", "tensors_in"]


class Place(NamedTuple):
    """A tensor in a state."""

    path: tuple[Any, ...]
    """The keys that lead to it."""
    name: str
    """What the checkpoint calls it: the same for places that share one tensor."""
    framework: str
    own_dtype: str | None
    """What its framework calls its type, where files don't have that."""


def decode(rest: bytes, tensor: Callable[[Place], Any], allow_pickle: bool) -> Any:
    """Put a state together again.

    Parameters
    ----------
    rest : bytes
        What :func:`forebay.checkpoint.encode.encode` made of everything but the tensors.
    tensor : callable
        Returns what goes to a place.
    allow_pickle : bool
        Whether Python objects are made again, which runs code that the checkpoint brings.

    Raises
    ------
    MismatchError
        It isn't what a checkpoint has.
    InvalidInputError
        It has Python objects, and they aren't allowed.
    """
    try:
        node = json.loads(rest)
        return _Decoder(tensor, allow_pickle).value(node, ())
    except RecursionError:
        raise MismatchError("the state is nested too deeply to be loaded") from None
    except (InvalidInputError, MismatchError):
        raise
    except (ValueError, TypeError, KeyError, LookupError, struct.error) as error:
        raise MismatchError(f"the state of the checkpoint is damaged: {error}") from error


class _Decoder:
    """How the tensors and objects of one state are made."""

    def __init__(self, tensor: Callable[[Place], Any], allow_pickle: bool) -> None:
        self._tensor = tensor
        self._allow_pickle = allow_pickle

    def value(self, node: Any, path: tuple[Any, ...]) -> Any:
        """Return what a node stands for."""
        if isinstance(node, list):
            return [self.value(item, (*path, index)) for index, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        tag = next((key for key in node if key.startswith("$")), None)
        if tag is None:
            return {key: self.value(item, (*path, key)) for key, item in node.items()}
        # Here, not with the others: what could be saved is nested no deeper than can be loaded.
        if tag == "$tuple" and len(node) == 1 and isinstance(node[tag], list):
            return tuple([self.value(item, (*path, index)) for index, item in enumerate(node[tag])])
        if tag == "$tensor":
            own_dtype = node.get("dtype")
            if not isinstance(own_dtype, str | None):
                raise MismatchError(f"{show_path(path)} of the checkpoint is damaged")
            return self._tensor(Place(path, str(node[tag]), str(node["of"]), own_dtype))
        if len(node) != 1:
            raise MismatchError(f"{show_path(path)} of the checkpoint is damaged")
        return self._tagged(tag, node[tag], path)

    def _tagged(self, tag: str, content: Any, path: tuple[Any, ...]) -> Any:
        if tag in {"$dict", "$counter"}:
            pairs = [(self.value(pair[0], path), pair[1]) for pair in content]
            items = {key: self.value(item, (*path, key)) for key, item in pairs}
            return Counter(items) if tag == "$counter" else items
        if tag == "$pickle":
            return self._unpickle(content, path)
        make = _MAKERS.get(tag)
        if make is None:
            raise MismatchError(
                f"{show_path(path)} of the checkpoint is a {tag}, which isn't known"
            )
        return make(content)

    def _unpickle(self, content: str, path: tuple[Any, ...]) -> Any:
        if not self._allow_pickle:
            raise InvalidInputError(
                f"{show_path(path)} of the checkpoint is a pickled Python object, and loading it "
                "runs code: pass allow_pickle=True if you trust who saved it"
            )
        import pickle

        return pickle.loads(base64.b64decode(content, validate=True))  # noqa: S301 (asked for)


def _complex(content: Any) -> complex:
    parts = [_float(part["$float"]) if isinstance(part, dict) else float(part) for part in content]
    real, imaginary = parts
    return complex(real, imaginary)


def _float(content: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(content))
    return float(value)


def _scalar(content: Any) -> Any:
    import numpy as np

    dtype, data = content
    (value,) = np.frombuffer(base64.b64decode(data, validate=True), dtype=np.dtype(dtype))
    return value


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "$text": lambda content: base64.b64decode(content, validate=True).decode(*TEXT_CODEC),
    "$int": lambda content: int(content, 16),
    "$float": _float,
    "$complex": _complex,
    "$bytes": lambda content: base64.b64decode(content, validate=True),
    "$bytearray": lambda content: bytearray(base64.b64decode(content, validate=True)),
    "$scalar": _scalar,
}


def tensors_in(state: Any) -> dict[tuple[Any, ...], Any]:
    """Return the tensors of a state by the keys that lead to them."""
    found: dict[tuple[Any, ...], Any] = {}

    def look(value: Any, path: tuple[Any, ...]) -> None:
        if framework_of(value) is not None:
            found[path] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                look(item, (*path, key))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                look(item, (*path, index))

    try:
        look(state, ())
    except RecursionError:
        raise InvalidInputError("the state to load into is nested too deeply") from None
    return found
