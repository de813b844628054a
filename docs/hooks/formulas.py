"""Conversion of formulas between dollar signs to MathML, which needs no script."""

from __future__ import annotations

import html
import logging
import re

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.formulas")

# Output of the extension `arithmatex`: \( ... \) in a line and \[ ... \] as a block.
_FORMULA = re.compile(
    r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>',
    re.S,
)
# A function such as log, around which the converter leaves out spaces. None are needed before an
# index, an operator or an opening parenthesis.
_FUNCTION = r"(?<!<msub>)(?<!<msup>)<mi>[a-z]{2,}</mi>"
_BEFORE = re.compile(rf"(</m(?!o>)\w+>|&#x000(?:29|5D|7D);</mo>)(?={_FUNCTION})")
_BEHIND = re.compile(rf"({_FUNCTION})(?=<m(?!o\b|space))")
_THIN = r'\1<mspace width="0.167em"/>'


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replaces the formulas of a page."""
    return _FORMULA.sub(_drawn, content)


def _drawn(formula: re.Match[str]) -> str:
    """Returns a formula as MathML."""
    tag, text = formula[1], html.unescape(formula[2]).strip()
    text = re.sub(r"\\arg\b", r"\\operatorname{arg}", text)
    mathml = convert(text, display="block" if tag == "div" else "inline")
    mathml = _BEHIND.sub(_THIN, _BEFORE.sub(_THIN, mathml))
    unknown = re.findall(r">(\\[a-zA-Z]+)<", mathml)
    if unknown:
        log.warning("no browser can draw %s in the formula %s", ", ".join(unknown), text)
    return f'<{tag} class="formula">{mathml}</{tag}>'
