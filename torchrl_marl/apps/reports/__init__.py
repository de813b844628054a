"""Reports: what many runs say together, with its uncertainty, as tables and one page to look at.

In the order of the work: ``curves`` (run folders and what tells them apart), ``grouping`` (runs by
environment and algorithm), ``aggregates`` (scores, references, estimates), ``results`` (a whole
report, also with tables of others), ``answers`` (sentences), ``tables`` (Markdown, CSV),
``pictures`` (PNG) and ``page`` (HTML).
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.apps.reports.page import write_report
    from torchrl_marl.apps.reports.results import Report, make_report

__getattr__, __dir__, __all__ = attach(__name__)
