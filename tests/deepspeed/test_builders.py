"""DeepSpeed's operator builders load Forebay's modules, whenever and however it is switched on."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from runs import FOREBAY, SECONDS_MAX, run

pytestmark = pytest.mark.timeout(4 * SECONDS_MAX)

INSTALL = "import forebay.deepspeed\nforebay.deepspeed.install()\n"
IMPORT = "import deepspeed, deepspeed.ops.aio, deepspeed.ops.gds\n"

ORDERS = {
    "before": INSTALL + IMPORT,
    "after": IMPORT + "from deepspeed.ops.op_builder import GDSBuilder\n" + INSTALL,
    "twice": INSTALL + INSTALL + IMPORT + INSTALL,
}


def python(code: str, *options: str, **more: str) -> str:
    return run(*options, "-c", textwrap.dedent(code), **more)


@pytest.mark.parametrize("order", ORDERS)
def test_the_builders_load_forebays_modules_and_compile_nothing(tmp_path: Path, order: str) -> None:
    python(
        ORDERS[order]
        + textwrap.dedent(
            """
            import forebay, torch
            from deepspeed.accelerator import get_accelerator
            from deepspeed.ops import op_builder
            from deepspeed.runtime.swap_tensor import partitioned_param_swapper
            from deepspeed.io import fast_file_writer

            interfaces = {
                "AsyncIOBuilder": ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"],
                "PinMemoryBuilder": ["pin_handle"],
                "GDSBuilder": ["gds_handle"],
                "UtilsBuilder": ["cast_to_byte_tensor"],
            }
            for name, members in interfaces.items():
                for builder in (
                    getattr(op_builder, name)(),
                    get_accelerator().create_op_builder(name),
                    get_accelerator().get_op_builder(name)(),
                ):
                    module = builder.load()
                    assert module is builder.load(verbose=False)
                    assert module.__name__.startswith("forebay.deepspeed."), module
                    for member in members:
                        assert callable(getattr(module, member)), member
                    assert builder.is_compatible() is True
            assert op_builder.AsyncIOBuilder().load().aio_handle is forebay.aio_handle
            assert op_builder.GDSBuilder().load().gds_handle is forebay.gds_handle
            assert deepspeed.ops.aio.AsyncIOBuilder().load().aio_handle is forebay.aio_handle
            assert deepspeed.ops.gds.GDSBuilder().load().gds_handle is forebay.gds_handle
            for module, name in (
                (partitioned_param_swapper, "GDSBuilder"),
                (fast_file_writer, "UtilsBuilder"),
            ):
                assert getattr(module, name) is getattr(op_builder, name)
            assert get_accelerator().create_op_builder("CPUAdamBuilder").NAME == "cpu_adam"
            if "GDSBuilder" in globals():
                assert GDSBuilder is op_builder.GDSBuilder
            """
        ),
        TORCH_EXTENSIONS_DIR=str(tmp_path),
    )
    assert list(tmp_path.iterdir()) == []


def test_a_gds_handle_is_refused_by_name_and_leaves_no_trace() -> None:
    output = python(
        INSTALL
        + textwrap.dedent(
            """
            import forebay, os
            from deepspeed.ops.op_builder import GDSBuilder
            before = dict(os.environ), os.listdir()
            for make in (GDSBuilder().load().gds_handle, forebay.gds_handle):
                try:
                    make(1 << 20, 8, False, True, intra_op_parallelism=2)
                except forebay.ForebayError as error:
                    assert isinstance(error, NotImplementedError)
                    print(error)
                else:
                    raise AssertionError("a handle was made")
            assert (dict(os.environ), os.listdir()) == before
            GDSBuilder().is_compatible(verbose=True)
            print("missing:", "; ".join(forebay.gds.missing()))
            """
        )
    )
    assert "gds_handle was asked for" in output
    (missing,) = [line for line in output.splitlines() if line.startswith("missing: ")]
    assert f"gds: {missing.removeprefix('missing: ')}" in output


def test_deepspeeds_file_writer_works_on_forebay(tmp_path: Path) -> None:
    for buffer_bytes, double in ((1 << 20, True), (4096, True), (1024, False)):
        python(
            INSTALL
            + textwrap.dedent(
                f"""
                import torch
                from deepspeed.io import FastFileWriter, FastFileWriterConfig
                from deepspeed.ops.op_builder import AsyncIOBuilder
                handle = AsyncIOBuilder().load().aio_handle(intra_op_parallelism=2)
                example = torch.zeros(1, dtype=torch.uint8)
                buffer = handle.new_cpu_locked_tensor({buffer_bytes}, example)
                config = FastFileWriterConfig(handle, buffer, double_buffer={double})
                state = {{"a": torch.randn(100_003), "b": torch.arange(7), "c": torch.zeros(0)}}
                for legacy in (False, True):
                    path = {str(tmp_path)!r} + f"/{buffer_bytes}-{{legacy}}"
                    writer = FastFileWriter(path, config)
                    torch.save(state, writer, _use_new_zipfile_serialization=not legacy)
                    writer.close()
                    found = torch.load(path)
                    assert all(torch.equal(found[name], state[name]) for name in state)
                writer = FastFileWriter(path + "-list", config)
                pairs = [(one.untyped_storage(), one.dtype) for one in state.values()]
                writer.save_torch_storage_object_list(pairs, True)
                writer.close()
                expected = b"".join(
                    one.numel().to_bytes(8, "little") + one.numpy().tobytes()
                    for one in state.values()
                )
                assert open(path + "-list", "rb").read() == expected
                """
            ),
            *(("-O",) if double else ()),
        )


def test_bytes_of_tensors_share_their_memory() -> None:
    python(
        INSTALL
        + textwrap.dedent(
            """
            import torch
            from deepspeed.ops.op_builder import UtilsBuilder
            cast = UtilsBuilder().load().cast_to_byte_tensor
            for tensor in (
                torch.arange(10, dtype=torch.int16), torch.tensor(-1, dtype=torch.int8),
                torch.tensor([True]), torch.zeros(3, 5, dtype=torch.complex64), torch.zeros(0),
                torch.tensor(2.5, dtype=torch.bfloat16), torch.nn.Parameter(torch.ones(3)),
            ):
                seen = cast(tensor)
                assert seen.dtype == torch.uint8 and seen.shape == (tensor.nbytes,)
                assert tensor.nbytes == 0 or seen.data_ptr() == tensor.data_ptr()
                assert torch.equal(cast([tensor, tensor])[1], seen)
            try:
                cast(torch.zeros(4, 4)[:, 1])
            except ValueError as error:
                assert "contiguous" in str(error)
            else:
                raise AssertionError("bytes of a column")
            """
        )
    )


def test_deepspeeds_native_pinning_works_on_forebay() -> None:
    python(
        INSTALL
        + textwrap.dedent(
            """
            import gc, torch
            from deepspeed.accelerator import get_accelerator
            from deepspeed.ops.op_builder import AsyncIOBuilder
            from deepspeed.utils.pin_memory import get_native_pinned_memory
            accelerator, handle = get_accelerator(), AsyncIOBuilder().load().aio_handle()
            data = torch.randn(33, 77)
            pinned = accelerator.pin_memory(data)
            assert torch.equal(pinned, data) and pinned.data_ptr() != data.data_ptr()
            gc.collect()
            pins = get_native_pinned_memory()
            assert pins.is_pinned(pinned) and handle.is_pinned(pinned)
            view = pinned[3:5]
            assert pins.unpin(pinned) is True and pins.unpin(pinned) is False
            assert not handle.is_pinned(view) and torch.equal(view, data[3:5])
            kept = accelerator.pin_memory(data)[1:]
            gc.collect()
            assert handle.is_pinned(kept) and torch.equal(kept, data[1:])
            """
        ),
        DS_PIN_MEMORY_BACKEND="native",
    )


def test_the_functions_have_deepspeeds_arguments(tmp_path: Path) -> None:
    path = tmp_path / "file"
    output = python(
        INSTALL
        + textwrap.dedent(
            f"""
            import torch, pathlib
            from deepspeed.ops.op_builder import AsyncIOBuilder
            op, path = AsyncIOBuilder().load(), pathlib.Path({str(path)!r})
            data = torch.randn(1003)
            assert op.aio_write(data, path, 1 << 20, 8, False, "true", True) == 0
            back = torch.zeros(1003)
            assert op.aio_read(back, str(path), 4096, 8, False, False, "false") == 0
            assert torch.equal(back, data) and path.stat().st_size == 4012
            for wrong, error in ((torch.zeros(1002), Exception), (torch.zeros(1004), EOFError)):
                try:
                    op.aio_read(wrong, str(path), 4096, 8, False, False, False)
                except error as found:
                    assert "4012" in str(found)
                else:
                    raise AssertionError("a file of another size was read")
            copy = torch.zeros(17, 59)
            assert op.deepspeed_memcpy(copy, data) == 0 and torch.equal(copy.view(-1), data)
            column = torch.zeros(1003, 2)
            op.deepspeed_memcpy(column[:, 1], data)
            assert torch.equal(column[:, 1], data) and not column[:, 0].any()
            for wrong in (data[1:], data.double()):
                try:
                    op.deepspeed_memcpy(copy, wrong)
                except ValueError as found:
                    assert "same type" in str(found)
                else:
                    raise AssertionError("unlike tensors were copied")
            """
        )
    )
    assert output == ""


def test_installing_too_late_under_optimization_is_refused() -> None:
    python(
        """
        import deepspeed, forebay.deepspeed
        try:
            forebay.deepspeed.install()
        except forebay.ForebayError as error:
            if "before" not in str(error):
                raise SystemExit("the message is: " + str(error))
        else:
            raise SystemExit("it was accepted")
        """,
        "-O",
    )


def test_deepspeeds_report_is_content() -> None:
    report = run(*FOREBAY, "-m", "deepspeed.env_report")
    lines = [line for line in report.splitlines() if line.startswith("async_io ")]
    assert lines
    assert all("OKAY" in line for line in lines)
