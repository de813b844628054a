"""Reports over many runs: scores with confidence intervals, as tables and one HTML page.

The modules, in the order in which they work: ``curves`` (reads run folders and names their
differences), ``grouping`` (runs by task and algorithm), ``aggregates`` (scores, references,
estimates), ``marl_eval`` (raw results as JSON), ``results`` (a whole report, also from tables of
other libraries), ``answers`` (sentences), ``tables`` (Markdown, CSV), ``pictures`` (PNG) and
``page`` (HTML).
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.apps.reports.page import write_report
    from torchrl_marl.apps.reports.results import Report, make_report

__getattr__, __dir__, __all__ = attach(__name__)
