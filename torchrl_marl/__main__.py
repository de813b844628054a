"""``python -m torchrl_marl`` is ``torchrl-marl``."""

from torchrl_marl.cli import main

raise SystemExit(main())
