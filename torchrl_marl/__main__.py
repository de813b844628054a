"""Entry point of ``python -m torchrl_marl``, the same as ``torchrl-marl``."""

import os
import sys

# Python searches the current folder first: its files would shadow installed packages.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from torchrl_marl.apps.cli.main import main  # noqa: E402

raise SystemExit(main())
