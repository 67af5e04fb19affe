"""Loads a state shard by shard: as new tensors over its memory, or into those that are there.

A shard of which nothing goes to a device is loaded as a whole; of others, see
:mod:`forebay.checkpoint.devices`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay._tensor_files.rooms import Rooms
from forebay._tensor_files.source import Entry
from forebay.checkpoint.arrays import Plain, framework_named, framework_of
from forebay.checkpoint.decode import Place, decode, tensors_in
from forebay.checkpoint.devices import ShardLoad, Wanted
from forebay.checkpoint.encode import show_path
from forebay.errors import InvalidBufferError, InvalidInputError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay._forebay import CheckpointReader
    from forebay.checkpoint.arrays import Framework

__all__ = ["load"]


def load(reader: CheckpointReader, into: Any, device: Any, allow_pickle: bool, verify: bool) -> Any:
    """Return the state of an open checkpoint.

    Parameters
    ----------
    reader : CheckpointReader
        The checkpoint.
    into : nested state or None
        Has the tensors to fill. Nothing is filled unless all of them can be.
    device : str, int or None
        Where the other tensors go, those of frameworks with devices.
    allow_pickle : bool
        Whether Python objects are made again.
    verify : bool
        Whether what is loaded is compared with its checksums.
    """
    places: list[Place] = []
    # Before a byte is loaded: a state that can't be put together is refused.
    decode(reader.rest, places.append, allow_pickle)
    loader = _Loader(reader, places, device, verify)
    if into is not None:
        loader.aim(tensors_in(into))
    for index in range(reader.shard_count):
        loader.take(index)
    return decode(reader.rest, loader.tensor, allow_pickle)


class _Loader:
    """The tensors of a checkpoint, and where they go."""

    def __init__(
        self, reader: CheckpointReader, places: list[Place], device: Any, verify: bool
    ) -> None:
        self._reader = reader
        self._device = device
        self._shards = ShardLoad(reader, verify)
        self._rooms = Rooms()
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
        names = self._by_shard.get(index, ())
        wanted = [item for name in names for item in self._wanted(name)]
        if any(item.device is not None for item in wanted):
            self._shards.run(wanted)
            return
        import numpy as np

        shard = np.asarray(self._reader.load_shard(index))
        for name in names:
            *_, start, end = self._entries[name]
            for place in self._places[name]:
                self._take_to(place, shard[start:end])

    def _wanted(self, name: str) -> list[Wanted]:
        """Return where a tensor goes: once for each device, and for the host."""
        _, shard, _, _, start, end = self._entries[name]
        entry = Entry(name, "U8", (end - start,), shard, start)
        sites: dict[tuple[str, Any], list[Place]] = {}
        for place in self._places[name]:
            framework, device = self._site(place)
            sites.setdefault((framework.name, device), []).append(place)
        found = []
        for (title, device), places in sites.items():
            framework = framework_named(title)
            memory, others = (None, places) if device is None else self._room(framework, places)
            found.append(Wanted(entry, framework, device, memory, self._taker(others)))
        return found

    def _site(self, place: Place) -> tuple[Framework, Any | None]:
        """Return the framework that takes a tensor, and the device that it takes it to."""
        target = self._targets.get(place.path)
        framework = None if target is None else framework_of(target)
        if framework is not None:
            return framework, framework.device(target)
        framework = framework_named(place.framework)
        device = framework.parse_device(self._device)
        return framework, device if device is None or framework.reaches(device) else None

    def _room(self, framework: Framework, places: list[Place]) -> tuple[Any | None, list[Place]]:
        """Return memory of one of the places, if it can be loaded into, and the other places."""
        targets = [self._targets.get(place.path) for place in places]
        if any(target is None for target in targets):
            return None, places
        for place, target in zip(places, targets, strict=True):
            room = framework.room(target)
            if room is not None and self._rooms.take(room):
                return room.memory, [other for other in places if other is not place]
        return None, places

    def _taker(self, places: list[Place]) -> Callable[[Any], None]:
        def take(memory: Any) -> None:
            for place in places:
                self._take_to(place, memory)

        return take

    def _take_to(self, place: Place, memory: Any) -> None:
        """Take the bytes of a tensor, of the host or a device, to a place."""
        target = self._targets.get(place.path)
        if target is None:
            if place.name not in self._made:
                framework = framework_named(place.framework)
                made = framework.build(memory, self._plain(place))
                device = framework.parse_device(self._device)
                if device is not None and not framework.reaches(device):
                    made = framework.move(made, device)
                self._made[place.name] = made
            return
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
