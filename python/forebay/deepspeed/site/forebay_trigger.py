"""Waits, from the start of Python on, for DeepSpeed's first module, then installs Forebay's hook.

The text of this module is what the ``.pth`` file runs at every start of Python, and what the
``sitecustomize`` of ``python -m forebay.deepspeed`` runs. So it stands alone: it imports nothing
but ``sys`` until DeepSpeed is imported, and whatever is wrong with Forebay then (it may have been
uninstalled) is a warning, never an error.
"""

import sys


class ForebayTrigger:
    """A finder that finds nothing, but sees when DeepSpeed is being imported."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN206, ARG003
        """See a module's name go by."""
        if name.startswith("deepspeed.") and cls in sys.meta_path:
            sys.meta_path.remove(cls)
            cls.install()  # type: ignore[no-untyped-call]

    @staticmethod
    def install():  # type: ignore[no-untyped-def] # noqa: ANN205
        """Install Forebay's hook, or warn that DeepSpeed runs without."""
        try:
            from forebay.deepspeed import install

            install()
        except Exception as error:
            import warnings

            warnings.warn(
                "DeepSpeed runs on its own engine: Forebay's hook is switched on, but it failed "
                f"({type(error).__name__}: {error}); switch it off with `forebay deepspeed "
                "disable`, or remove forebay_deepspeed.pth from site-packages",
                RuntimeWarning,
                stacklevel=2,
            )


if not any(getattr(finder, "__name__", "") == "ForebayTrigger" for finder in sys.meta_path):
    sys.meta_path.insert(0, ForebayTrigger)
