"""Suites: one table of settings, many tasks, algorithms and seeds; trained as one, with a forecast.

A suite is a YAML file: those of the package lie here, one's own anywhere.
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.suites.plan import Plan, make_plan
    from torchrl_marl.suites.results import Result
    from torchrl_marl.suites.running import run_suite
    from torchrl_marl.suites.table import Suite, SuiteRun, read_suite, suite_names

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "plan": ["Plan", "make_plan"],
        "results": ["Result"],
        "running": ["run_suite"],
        "table": ["Suite", "SuiteRun", "read_suite", "suite_names"],
    },
)
