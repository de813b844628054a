"""Reports: what many runs say together, with its uncertainty, as tables and one page to look at.

In the order of the work: ``finding`` (run folders), ``records`` (their measured returns),
``grouping`` (worlds and algorithms), ``foreign`` (others' tables), ``references`` (what returns are
normalized by), ``lines`` (sample efficiency), ``scores``, ``aggregates`` and ``results``
(estimates), ``answers`` (sentences), ``tables`` (Markdown, CSV), ``pictures`` (PNG) and ``page``
(HTML).
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.apps.reports.page import write_report
    from torchrl_marl.apps.reports.results import Report, make_report

__getattr__, __dir__, __all__ = attach(
    __name__, {"page": ["write_report"], "results": ["Report", "make_report"]}
)
