"""Memory of a program's that tensors are loaded into, no two at the same time."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

__all__ = ["Room", "Rooms"]


@dataclass(frozen=True)
class Room:
    """Memory that bytes of a file can go to as they are.

    Attributes
    ----------
    memory : array
        What the core takes.
    address, length : int
        Where it is, and its bytes.
    """

    memory: Any
    address: int
    length: int


class Rooms:
    """What is loaded into."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []

    def take(self, room: Room) -> bool:
        """Whether no other tensor is read into the same memory: the order would be by chance."""
        begin, end = room.address, room.address + room.length
        if begin == end:
            return True
        place = bisect.bisect(self._taken, (begin, end))
        before = self._taken[place - 1][1] if place else 0
        after = self._taken[place][0] if place < len(self._taken) else end
        if before > begin or after < end:
            return False
        self._taken.insert(place, (begin, end))
        return True
