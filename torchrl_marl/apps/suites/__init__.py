"""Suites: many tasks, algorithms and seeds trained from one table of settings.

A suite is a YAML file. The package's suites are in this folder.
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.apps.suites.board import Result
    from torchrl_marl.apps.suites.plan import (
        Plan,
        Suite,
        SuiteRun,
        make_plan,
        read_suite,
        suite_names,
    )
    from torchrl_marl.apps.suites.running import run_suite
    from torchrl_marl.apps.suites.sweep import run_sweep

__getattr__, __dir__, __all__ = attach(__name__)
