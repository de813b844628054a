"""``python -m torchrl_marl`` is ``torchrl-marl``, with worlds of the current folder."""

import os
import sys

# Python looks there first: whatever lies in a folder would take the place of an installed package.
if sys.path[:1] == [os.getcwd()]:
    sys.path.append(sys.path.pop(0))

from torchrl_marl.cli import main  # noqa: E402

raise SystemExit(main())
