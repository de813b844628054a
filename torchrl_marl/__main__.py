"""``python -m torchrl_marl`` is ``torchrl-marl``."""

import os
import sys

# Python looks there first: whatever lies in a folder would take the place of a package.
if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from torchrl_marl.apps.cli.main import main  # noqa: E402

raise SystemExit(main())
