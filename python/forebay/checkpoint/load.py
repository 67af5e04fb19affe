"""Loads a state shard by shard: as new tensors over its memory, or into those that are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.checkpoint.arrays import Plain, framework_named, framework_of
from forebay.checkpoint.decode import Place, decode, tensors_in
from forebay.checkpoint.encode import show_path
from forebay.errors import InvalidBufferError, InvalidInputError, MismatchError

if TYPE_CHECKING:
    from forebay._forebay import CheckpointReader

__all__ = ["load"]


def load(reader: CheckpointReader, into: Any, allow_pickle: bool) -> Any:
    """Return the state of an open checkpoint.

    Parameters
    ----------
    reader : CheckpointReader
        The checkpoint.
    into : nested state or None
        Has the tensors to fill. Nothing is filled unless all of them can be.
    allow_pickle : bool
        Whether Python objects are made again.
    """
    places: list[Place] = []
    # Before a byte is loaded: a state that can't be put together is refused.
    decode(reader.rest, places.append, allow_pickle)
    loader = _Loader(reader, places)
    if into is not None:
        loader.aim(tensors_in(into))
    for index in range(reader.shard_count):
        loader.take(index)
    return decode(reader.rest, loader.tensor, allow_pickle)


class _Loader:
    """The tensors of a checkpoint, and where they go."""

    def __init__(self, reader: CheckpointReader, places: list[Place]) -> None:
        self._reader = reader
        self._entries = {entry[0]: entry for entry in reader.tensors}
        self._places: dict[str, list[Place]] = {}
        for place in places:
            if place.name not in self._entries:
                raise MismatchError(
                    f"{show_path(place.path)} is tensor {place.name!r}, which the checkpoint of "
                    f"step {reader.step} doesn't have"
                )
            self._places.setdefault(place.name, []).append(place)
        self._by_shard: dict[int, list[str]] = {}
        for name in self._places:
            self._by_shard.setdefault(self._entries[name][1], []).append(name)
        self._targets: dict[tuple[Any, ...], Any] = {}
        self._made: dict[str, Any] = {}

    def aim(self, targets: dict[tuple[Any, ...], Any]) -> None:
        """Have tensors be filled; an error says which can't be."""
        places = {place.path: place for listed in self._places.values() for place in listed}
        for path, target in targets.items():
            place = places.get(path)
            where = show_path(path)
            if place is None:
                raise InvalidInputError(
                    f"{where} is a tensor to load into, and the checkpoint of step "
                    f"{self._reader.step} has none there"
                )
            framework = framework_of(target)
            assert framework is not None  # noqa: S101 (only tensors are looked for)
            try:
                wanted = framework.plain(target)
                framework.refuse_target(target)
            except InvalidInputError as error:
                raise InvalidBufferError(f"{where}: {error}") from None
            found = self._plain(place)
            if (*wanted[:2], _own_name(wanted)) != (*found[:2], _own_name(found)):
                raise InvalidBufferError(
                    f"{where} has shape {_shape(wanted)} and type {_type(wanted)}, in the "
                    f"checkpoint of step {self._reader.step} it has {_shape(found)} and "
                    f"{_type(found)}"
                )
        self._targets = targets

    def take(self, index: int) -> None:
        """Load a shard, and hand its tensors out."""
        import numpy as np

        shard = np.asarray(self._reader.load_shard(index))
        for name in self._by_shard.get(index, ()):
            *_, start, end = self._entries[name]
            memory = shard[start:end]
            for place in self._places[name]:
                target = self._targets.get(place.path)
                if target is None:
                    if name not in self._made:
                        framework = framework_named(place.framework)
                        self._made[name] = framework.build(memory, self._plain(place))
                    continue
                filler = framework_of(target)
                if filler is not None:
                    # What files don't have may have another name here.
                    filler.fill(target, filler.build(memory, filler.plain(target)))

    def tensor(self, place: Place) -> Any:
        """Return what has come to a place."""
        target = self._targets.get(place.path)
        return self._made[place.name] if target is None else target

    def _plain(self, place: Place) -> Plain:
        _, _, dtype, shape, _, _ = self._entries[place.name]
        return Plain(dtype, tuple(shape), place.own_dtype)


_NUMPY_NAMES = {"complex128": "<c16"}
"""What numpy calls types of torch that files don't have."""


def _own_name(plain: Plain) -> str | None:
    own = plain.own_dtype
    return None if own is None else _NUMPY_NAMES.get(own, own)


def _type(plain: Plain) -> str:
    return plain.dtype if plain.own_dtype is None else plain.own_dtype


def _shape(plain: Plain) -> tuple[int, ...]:
    return plain.shape if plain.own_dtype is None else plain.shape[:-1]
