from collections.abc import Sequence
from typing import Any, TypedDict, final

from forebay.errors import ForebayError

class Stats(TypedDict):
    engine: str
    operations: int
    failures: int
    cancelled: int
    bytes_read: int
    bytes_written: int
    bytes_direct: int
    bytes_staged: int
    bytes_buffered: int
    bytes_cached: int
    bytes_registered: int
    transfers: int
    retries: int
    short_transfers: int
    queue_depth_max: int
    latency_us_p50: int
    latency_us_p99: int
    latency_us_max: int
    staging_bytes: int
    fallbacks: dict[str, int]

class PoolStats(TypedDict):
    budget_bytes: int | None
    used_bytes: int
    mapped_bytes: int
    locked_bytes: int
    peak_bytes: int
    buffers: int
    regions: int
    lock_refused: str | None

class FileFacts(TypedDict):
    direct: bool
    reason: str | None
    memory_alignment: int
    offset_alignment: int
    size: int

@final
class Handle:
    def __new__(cls, **options: Any) -> Handle: ...
    def submit(
        self,
        store: bool,
        items: Sequence[tuple[Any, str | int, int]],
        whole_file: bool,
        priority: str,
        durability: str | None,
    ) -> Operation: ...
    def run(
        self,
        store: bool,
        items: Sequence[tuple[Any, str | int, int]],
        whole_file: bool,
        priority: str,
        durability: str | None,
    ) -> None: ...
    def close(self) -> None: ...
    def pending(self) -> int: ...
    def take_unseen_failures(self) -> list[ForebayError]: ...
    def notices(self) -> list[str]: ...
    @property
    def engine(self) -> str: ...
    def pool(self) -> Pool: ...
    def stats(self) -> Stats: ...

@final
class Operation:
    def wait(self, timeout: float | None = None) -> bool: ...
    def done(self) -> bool: ...
    def cancel(self) -> None: ...
    def notify(self, event: WakeEvent) -> None: ...
    def release(self) -> None: ...
    @property
    def heard(self) -> bool: ...
    @property
    def bytes_done(self) -> int: ...
    @property
    def bytes_total(self) -> int: ...

@final
class WakeEvent:
    def __new__(cls) -> WakeEvent: ...
    def fileno(self) -> int: ...
    def consume(self) -> bool: ...

@final
class Pool:
    def __new__(
        cls, budget_bytes: int | None = None, lock: bool = True, huge_pages: bool = True
    ) -> Pool: ...
    @staticmethod
    def shared() -> Pool: ...
    def allocate(
        self, length: int, alignment: int, timeout: float | None = 0.0
    ) -> PinnedBuffer: ...
    def stats(self) -> PoolStats: ...

@final
class PinnedBuffer:
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def __len__(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def is_locked(self) -> bool: ...

def compare(array: Any, path: str, offset: int) -> int | None: ...
def drain_all() -> None: ...
def file_facts(path: Any) -> FileFacts: ...
def probe_engines() -> list[tuple[str, bool, str]]: ...
