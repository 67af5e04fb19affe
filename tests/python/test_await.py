"""Operations in asyncio: awaited, gathered, cancelled, failing, in several loops."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import forebay
from conftest import descriptor_count, descriptors_fall_to, pattern

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


def test_an_operation_can_be_awaited(handle: forebay.Handle, path: Path) -> None:
    data = pattern(MIB + 7)

    async def main() -> None:
        await handle.store_async(data, path)
        back = np.zeros_like(data)
        operation = handle.load_async(back, path)
        await operation
        await operation
        assert np.array_equal(back, data)

    asyncio.run(main())


def test_many_operations_can_be_gathered(handle: forebay.Handle, tmp_path: Path) -> None:
    arrays = [pattern(50_000 + index, index) for index in range(300)]
    backs = [np.zeros_like(array) for array in arrays]

    async def main() -> None:
        names = [tmp_path / str(index) for index in range(300)]
        await asyncio.gather(*map(handle.store_async, arrays, names))
        await asyncio.gather(*map(handle.load_async, backs, names))

    asyncio.run(main())
    assert all(map(np.array_equal, arrays, backs))


def test_awaiting_raises_what_the_operation_met(path: Path) -> None:
    path.write_bytes(bytes(MIB))

    async def main() -> None:
        with forebay.Handle(
            throttle="1MiB", page_cache=False, block_size="4k", queue_depth=1
        ) as handle:
            operation = handle.load_async(bytearray(MIB), path)
            task = asyncio.ensure_future(wrap(operation))
            await asyncio.sleep(0)
            operation.cancel()
            with pytest.raises(forebay.errors.OperationCancelledError):
                await task

    asyncio.run(main())


async def wrap(operation: forebay.Operation) -> None:
    await operation


def test_the_loop_goes_on_while_an_operation_is_awaited(path: Path) -> None:
    path.write_bytes(bytes(2 * MIB))

    async def main() -> int:
        turns = 0
        with forebay.Handle(throttle="8MiB", page_cache=False, block_size="64k") as handle:
            task = asyncio.ensure_future(wrap(handle.load_async(bytearray(2 * MIB), path)))
            while not task.done():
                turns += 1
                await asyncio.sleep(0.001)
            await task
        return turns

    assert asyncio.run(main()) > 10


def test_a_cancelled_task_leaves_the_operation_going(path: Path) -> None:
    data = pattern(MIB)

    async def main() -> None:
        with forebay.Handle(throttle="8MiB", block_size="64k") as handle:
            operation = handle.store_async(data, path)
            with pytest.raises((asyncio.TimeoutError, TimeoutError)):
                await asyncio.wait_for(wrap(operation), 0.01)
            await operation

    asyncio.run(main())
    assert path.read_bytes() == data.tobytes()


def test_loops_in_several_threads_each_wake_up(handle: forebay.Handle, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    async def main(number: int) -> None:
        for turn in range(20):
            data: Any = pattern(200_000, number + turn)
            await handle.store_async(data, tmp_path / str(number))
            back = np.zeros_like(data)
            await handle.load_async(back, tmp_path / str(number))
            assert np.array_equal(back, data)

    def work(number: int) -> None:
        try:
            asyncio.run(main(number))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_loops_come_and_go_without_a_trace(handle: forebay.Handle, path: Path) -> None:
    async def main() -> None:
        await asyncio.gather(*(handle.store_async(pattern(MIB), path) for _ in range(3)))

    asyncio.run(main())
    before = descriptor_count()
    for _ in range(20):
        asyncio.run(main())
    assert descriptors_fall_to(before)
