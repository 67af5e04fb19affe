"""What Python runs at its start when ``python -m forebay.deepspeed`` has put it on the path.

It starts to wait for DeepSpeed, takes its folder off ``sys.path`` again, and gives way to the
``sitecustomize`` that would have run without it, if there is one. The variable ``PYTHONPATH``
stays as it is, for the processes that this one starts.
"""

import os
import sys


def _give_way() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    trigger = os.path.join(here, "forebay_trigger.py")
    with open(trigger, encoding="utf-8") as file:
        exec(compile(file.read(), trigger, "exec"), {"__name__": "forebay_trigger"})  # noqa: S102
    own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found] # noqa: F401
    except ImportError as error:
        sys.modules["sitecustomize"] = own
        if error.name != "sitecustomize":
            raise


_give_way()
