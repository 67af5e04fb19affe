"""Files opened for single tensors: ``safe_open``, as ``safetensors`` has it, and slices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from forebay._tensor_files.file import OpenFile
from forebay._tensor_files.frame import byte_count, frame_for
from forebay._tensor_files.load import Wish
from forebay._tensor_files.select import parse_path
from forebay.errors import TensorFileError

if TYPE_CHECKING:
    from types import TracebackType

    from forebay._tensor_files.frame import Frame, View
    from forebay._tensor_files.select import Path
    from forebay._tensor_files.source import Entry
    from forebay.handle import Handle

__all__ = ["TensorSlice", "is_mapped", "safe_open"]


class safe_open:  # noqa: N801 (the name that safetensors has)
    """A safetensors file whose tensors are read when they are asked for.

    Parameters
    ----------
    filename : path
        The file.
    framework : {"pt", "torch", "pytorch", "np", "numpy"}
        What tensors are to be.
    device : str or int
        Where to: ``"cpu"``, ``"cuda:1"``, the number of a GPU.
    backend : {"mmap", "pread"}
        Whether tensors that are in the page cache are mapped from there, or always read: see
        ``load_file``.
    verify : bool
        Check the checksums of whole tensors, where the file has them. Slices can't be checked.
    handle : Handle, optional
        What to read with; by default, a handle of the process.

    Raises
    ------
    TensorFileError
        The file isn't as the format has it, or the framework is none.
    SystemCallError
        It can't be opened (also an ``OSError``: ``FileNotFoundError``, …).
    """

    _file_class: type[OpenFile] = OpenFile

    def __init__(
        self,
        filename: Path,
        framework: str,
        device: Any = "cpu",
        *,
        backend: str = "mmap",
        verify: bool = True,
        handle: Handle | None = None,
    ) -> None:
        wish = Wish(verify=verify, mapped=is_mapped(backend))
        self._frame = frame_for(framework)
        self._device = self._frame.parse_device(device)
        self._path = parse_path(filename)
        self._file: OpenFile | None = self._file_class(self._path, wish, handle)

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._open().header.names)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order in which they are in the file."""
        return list(self._open().header.names)

    def metadata(self) -> dict[str, str] | None:
        """Return the text that was saved with the tensors, or None if there is none."""
        return self._open().header.metadata

    def get_tensor(self, name: str) -> Any:
        """Return a tensor."""
        return self._open().whole(self._frame, name, self._device)

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors, in the order in which they are in the file."""
        file = self._open()
        for name in file.header.names:
            entry = file.entry(name)
            self._frame.check(entry.dtype, entry.shape)
        return dict(file.some(self._frame, None, self._device))

    def get_slice(self, name: str) -> TensorSlice:
        """Return what can be indexed for a part of a tensor, and reads that part."""
        file = self._open()
        return TensorSlice(file, self._frame, self._device, file.entry(name))

    def _open(self) -> OpenFile:
        if self._file is None:
            raise TensorFileError(f"{self._path} is closed", filename=self._path)
        return self._file

    def __enter__(self) -> safe_open:  # noqa: PYI034 (typing.Self is in 3.11)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Slices that are held keep the file open, and can be read from.
        self._file = None

    def __reduce__(self) -> NoReturn:
        raise TypeError("an open file can't be copied: open it where it is needed")


class TensorSlice:
    """A tensor of a file, of which an index reads the part that it asks for."""

    def __init__(
        self,
        file: OpenFile,
        frame: Frame,
        device: Any | None,
        entry: Entry,
    ) -> None:
        self._file = file
        self._frame = frame
        self._device = device
        self._name = entry.name
        self._dtype = entry.dtype
        self._shape = entry.shape

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return what the format calls its type, such as ``"BF16"``."""
        return self._dtype

    def __getitem__(self, index: Any) -> Any:
        frame = self._frame
        view = frame.view(self._dtype, self._shape, index)
        if view is None:
            # Which items these are shows with the tensor only.
            return self._file.whole(frame, self._name, self._device)[index]
        if self._is_all(view):
            return self._file.whole(frame, self._name, self._device).reshape(view.sizes)
        return self._file.part(frame, self._name, view, self._device)

    def _is_all(self, view: View) -> bool:
        """Whether it is every item, in order: there is a checksum for that."""
        whole = byte_count("U8", self._shape)
        if view.offset or byte_count("U8", view.sizes) != whole:
            return False
        step = 1
        for size, stride in zip(reversed(view.sizes), reversed(view.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True


def is_mapped(backend: str) -> bool:
    """Return whether a backend maps what is in the page cache; refuse what ``safetensors`` does."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a text, not {type(backend).__name__}")
    if backend not in {"mmap", "pread"}:
        raise TensorFileError(f'backend {backend!r} is invalid: it can be "mmap" or "pread"')
    return backend == "mmap"
