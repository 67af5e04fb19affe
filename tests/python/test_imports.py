"""What importing Forebay brings in, and what it leaves for later."""

from __future__ import annotations

import pytest

import forebay
from conftest import run_python


def test_names_that_are_there_import_no_framework() -> None:
    run_python(
        """
        import sys
        from forebay import *
        import forebay
        assert aio_handle is forebay.aio_handle
        deepspeed.install()
        forebay.deepspeed.install()
        assert "FastFileWriter" in dir(forebay)
        assert not {"numpy", "torch", "deepspeed"} & set(sys.modules), sorted(sys.modules)
        """
    )


def test_integrations_are_there_when_they_are_asked_for() -> None:
    run_python(
        """
        import sys
        import forebay
        assert {"numpy", "torch", "transformers"} <= set(dir(forebay))
        assert "numpy" not in sys.modules
        assert callable(forebay.numpy.load_file)
        assert "torch" not in sys.modules
        assert callable(forebay.torch.load_file)
        assert "transformers" not in sys.modules
        """
    )


def test_a_name_that_isnt_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FastWriter'"):
        _ = forebay.FastWriter  # type: ignore[attr-defined]


def test_a_subinterpreter_is_told_that_it_cannot_import_it() -> None:
    done = run_python(
        """
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        run = getattr(interpreters, "exec", None) or interpreters.run_string
        code = '''if True:
            try:
                import forebay
            except ImportError as error:
                assert "subinterpreters" in str(error), error
            else:
                raise AssertionError("it was imported")
        '''
        # Left to the end of the process, which is to come.
        other = interpreters.create()
        assert run(other, code) is None
        """,
    )
    assert done.stderr == ""
