"""The dictionaries that the compiled half returns."""

from __future__ import annotations

from typing import Literal, TypedDict

__all__ = ["DeviceRoute", "FileFacts", "PoolStats", "Stats"]


class DeviceRoute(TypedDict):
    """Which way the device memory of a file went last, and why.

    ``"gds"`` is between drive and device. ``"host"`` is through the host's memory. ``"compat"`` is
    that too, where cuFile would take the file and then go that way itself, in its compatibility
    mode.
    """

    route: Literal["gds", "compat", "host"]
    reason: str


class Stats(TypedDict):
    """What a handle did: bytes by route, transfers, latencies of transfers, fallbacks taken.

    ``bytes_gds`` and ``bytes_device`` are bytes of device memory: those that went by GPUDirect
    Storage, and those that were copied. ``device_routes`` has the newest 64 files with device
    memory, by name.
    """

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
    bytes_gds: int
    bytes_device: int
    transfers: int
    retries: int
    short_transfers: int
    queue_depth_max: int
    latency_us_p50: int
    latency_us_p99: int
    latency_us_max: int
    staging_bytes: int
    fallbacks: dict[str, int]
    device_routes: dict[str, DeviceRoute]


class PoolStats(TypedDict):
    """What a pool holds, and why memory isn't locked if it isn't."""

    budget_bytes: int | None
    used_bytes: int
    mapped_bytes: int
    kept_bytes: int
    locked_bytes: int
    peak_bytes: int
    buffers: int
    regions: int
    lock_refused: str | None


class FileFacts(TypedDict):
    """How a file can be read and written: direct or not and why, alignments, size."""

    direct: bool
    reason: str | None
    memory_alignment: int
    offset_alignment: int
    size: int
