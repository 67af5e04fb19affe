"""Turns a state into tensors and text.

What JSON has is written as JSON has it. Everything else is an object with one key that begins with
``$``; ``docs/format.md`` lists them.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from forebay.checkpoint.arrays import framework_of
from forebay.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable


__all__ = ["TEXT_CODEC", "Encoded", "encode", "show_path"]

TEXT_CODEC = ("utf-8", "surrogatepass")
"""How text is written that JSON would change."""

_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""Two characters that JSON reads as one."""

_PLAIN_INT_BITS = 1024
"""Longer numbers are written in hexadecimal: Python limits the decimal digits that it reads."""

_RESERVED_NAME = "__metadata__"
"""What no tensor in a file can be called."""

_SCALAR_KINDS = "?bBhHiIlLqQefdgFDG"
"""Letters of numpy's numbers."""


class Encoded(NamedTuple):
    """A state, ready to be saved."""

    tensors: list[tuple[str, str, tuple[int, ...], Any]]
    """Name, dtype, shape and contiguous array of each."""
    rest: bytes
    """Everything else, as JSON."""


def encode(state: Any, allow_pickle: bool) -> Encoded:
    """Take a state apart.

    Raises
    ------
    InvalidInputError
        Something in it can't be saved; the message says what and where.
    """
    encoder = _Encoder(allow_pickle)
    try:
        node = encoder.node(state, ())
        text = json.dumps(node, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise InvalidInputError("the state is nested too deeply to be saved") from None
    return Encoded(encoder.tensors, text.encode("ascii"))


def show_path(path: Iterable[Any]) -> str:
    """Return where in a state something is, as Python would reach it."""
    return "state" + "".join(f"[{key!r}]" for key in path)


class _Encoder:
    """What has been found of one state so far."""

    def __init__(self, allow_pickle: bool) -> None:
        self.tensors: list[tuple[str, str, tuple[int, ...], Any]] = []
        self._allow_pickle = allow_pickle
        self._names: set[str] = {_RESERVED_NAME}
        self._known: dict[Hashable, str] = {}
        self._open: set[int] = set()

    def node(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return what stands for a value in JSON."""
        atom = _ATOMS.get(type(value))
        if atom is not None:
            return atom(value)
        if framework_of(value) is not None:
            return self._tensor(value, path)
        if type(value) in _MAPPINGS or isinstance(value, list | tuple):
            node = self._container(value, path)
            if node is not None:
                return node
        if _is_numpy_number(value):
            return {"$scalar": [value.dtype.str, _base64(value.tobytes())]}
        return self._object(value, path)

    def _container(self, value: Any, path: tuple[Any, ...]) -> Any:
        if id(value) in self._open:
            raise InvalidInputError(f"{show_path(path)} contains itself: it can't be saved")
        self._open.add(id(value))
        try:
            if isinstance(value, dict):
                return self._mapping(value, path)
            # A named tuple is more than a tuple; the shape of a torch tensor isn't.
            if type(value) not in {list, tuple} and type(value).__name__ != "Size":
                return None
            nodes = [self.node(item, (*path, index)) for index, item in enumerate(value)]
            return nodes if type(value) is list else {"$tuple": nodes}
        finally:
            self._open.discard(id(value))

    def _mapping(self, value: dict[Any, Any], path: tuple[Any, ...]) -> Any:
        is_plain = all(type(key) is str and _is_plain_key(key) for key in value)
        if is_plain and type(value) is not Counter:
            return {key: self.node(item, (*path, key)) for key, item in value.items()}
        pairs = [
            [self._key(key, path), self.node(item, (*path, key))] for key, item in value.items()
        ]
        return {"$counter" if type(value) is Counter else "$dict": pairs}

    def _key(self, key: Any, path: tuple[Any, ...]) -> Any:
        count = len(self.tensors)
        node = self.node(key, (*path, key))
        if len(self.tensors) > count or framework_of(key) is not None:
            raise InvalidInputError(f"{show_path(path)} has a tensor as a key: it can't be saved")
        return node

    def _tensor(self, value: Any, path: tuple[Any, ...]) -> Any:
        framework = framework_of(value)
        assert framework is not None  # noqa: S101 (the caller has looked)
        try:
            plain = framework.plain(value)
        except InvalidInputError as error:
            if self._allow_pickle and framework.name == "numpy":
                return self._object(value, path)
            raise InvalidInputError(f"{show_path(path)}: {error}") from None
        identity = framework.identity(value)
        name = self._known.get(identity)
        if name is None:
            name = self._known[identity] = self._name(path)
            self.tensors.append((name, plain.dtype, plain.shape, framework.contiguous(value)))
        node: dict[str, Any] = {"$tensor": name, "of": framework.name}
        if plain.own_dtype is not None:
            node["dtype"] = plain.own_dtype
        return node

    def _name(self, path: tuple[Any, ...]) -> str:
        """Return a name for a tensor by where it is, which no other has."""
        text = ".".join(str(key) for key in path) or "state"
        # A file's names are UTF-8.
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        name = text
        count = 1
        while name in self._names:
            count += 1
            name = f"{text}~{count}"
        self._names.add(name)
        return name

    def _object(self, value: Any, path: tuple[Any, ...]) -> Any:
        if not self._allow_pickle:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise InvalidInputError(
                f"{show_path(path)} is a {kind}: a state has dictionaries, lists, tuples, tensors "
                "of torch and numpy, numbers, text, bytes and None; convert it, or pass "
                "allow_pickle=True"
            )
        import pickle

        try:
            data = pickle.dumps(value, protocol=5)
        except Exception as error:
            raise InvalidInputError(f"{show_path(path)} can't be pickled: {error}") from error
        return {"$pickle": _base64(data)}


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode("ascii")


def _is_plain_key(key: str) -> bool:
    return not key.startswith("$") and _SURROGATE_PAIR.search(key) is None


def _text(value: str) -> Any:
    if _SURROGATE_PAIR.search(value) is None:
        return value
    return {"$text": _base64(value.encode(*TEXT_CODEC))}


def _int(value: int) -> Any:
    return value if value.bit_length() <= _PLAIN_INT_BITS else {"$int": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _itself(value: Any) -> Any:
    return value


_ATOMS: dict[type, Callable[[Any], Any]] = {
    type(None): _itself,
    bool: _itself,
    str: _text,
    int: _int,
    float: _float,
    complex: lambda value: {"$complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {"$bytes": _base64(value)},
    bytearray: lambda value: {"$bytearray": _base64(value)},
}
"""What stands for values without parts. Their subclasses are more than that."""

_MAPPINGS = {dict, OrderedDict, defaultdict, Counter}


def _is_numpy_number(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        return False
    return value.dtype.char in _SCALAR_KINDS
