"""Files of tensors that are open: what is loaded later is what was looked at."""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay import _forebay
from forebay._tensor_files.select import parse_source, select
from forebay._tensor_files.shared import core_of, tell
from forebay.errors import ForebayError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from forebay._tensor_files.select import Keys, Source
    from forebay.handle import Handle

__all__ = ["Entry", "OpenSource"]


@dataclass(frozen=True)
class Entry:
    """A tensor of a file.

    Attributes
    ----------
    name, dtype, shape
        What the file says of it; the type is the format's.
    file : int
        Which file it is in.
    offset : int
        Where it begins there.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int


class OpenSource:
    """A file, several, or a model's, as they were when they were opened."""

    def __init__(self, source: Source) -> None:
        self.core = _forebay.TensorSource(parse_source(source))
        self.paths = [os.fspath(path) for path in self.core.paths]
        self.descriptors = self.core.descriptors

    @functools.cached_property
    def headers(self) -> list[_forebay.TensorHeader]:
        """What the files say, in their order."""
        return [self._header(file) for file in range(len(self.paths))]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read from the descriptors, and refuse what was read if a file was written to meanwhile.

        That is also said where it made the reading fail, which knows of a descriptor only.
        """
        try:
            yield
        except ForebayError as error:
            try:
                self.core.check_unchanged()
            except MismatchError as changed:
                raise changed from error
            raise
        self.core.check_unchanged()

    def path(self, file: int) -> str:
        """Return a file's name."""
        return self.paths[file]

    def target(self, file: int) -> int:
        """Return a file's descriptor."""
        return self.descriptors[file]

    def drive(self, file: int) -> int:
        """Return the number of the drive that a file is on."""
        return os.fstat(self.descriptors[file]).st_dev

    def checksum(self, entry: Entry) -> int | None:
        """Return the CRC32C of a tensor, if its file has one that counts."""
        return self.headers[entry.file].checksum(entry.name)

    def note_unverified(self, handle: Handle, files: Iterable[int]) -> None:
        """Say of files that were read that their checksums say nothing, where that is so."""
        for file in files:
            self.core.note_unverified(core_of(handle), file)
        tell(handle)

    def entries(self, keys: Keys) -> list[Entry]:
        """Return the tensors that are asked for, file by file, in the order of the files."""
        names = self.core.names
        chosen = select(names, keys)
        return [self.entry(name) for name in (names if chosen is None else chosen)]

    def entry(self, name: str) -> Entry:
        """Return what is known of a tensor, by a name that is there."""
        file = self.core.file_of(name)
        found = None if file is None else self.headers[file].get(name)
        if file is None or found is None:
            raise KeyError(name)
        dtype, extents, start, _ = found
        offset = self.headers[file].data_start + start
        return Entry(name, dtype, tuple(extents), file, offset)

    def _header(self, file: int) -> _forebay.TensorHeader:
        header = self.core.header(file)
        if header is None:
            raise IndexError(file)
        return header
