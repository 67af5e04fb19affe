"""``python -m forebay``: the command, for where scripts aren't on the path."""

import sys

from forebay._cli import main

sys.exit(main())
