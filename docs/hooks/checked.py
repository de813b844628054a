"""Checks of the built site: links, anchors, and no resources from other sites.

MkDocs checks only its own links. These checks read the final pages, including links in HTML, in
the reference, and in the theme.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig

log = logging.getLogger("mkdocs.hooks.checked")

_SCRIPT = re.compile(r"(<script\b[^>]*>).*?</script>", re.S)
_TAG = re.compile(r"<([a-z][a-z0-9-]*)\s([^<>]*)>")
_ATTRIBUTE = re.compile(r"(?<![\w-])(id|name|href|src|rel)=\"([^\"]*)\"")
_ELSEWHERE = re.compile(r"(?:[a-z]+:)?//")


def found_in(html: str) -> tuple[set[str], set[str], set[str]]:
    """Returns the anchors, links and loaded resources of a page."""
    anchors, links, loads = set(), set(), set()
    for tag, inner in _TAG.findall(_SCRIPT.sub(r"\1", html)):
        values = {name: unescape(value) for name, value in _ATTRIBUTE.findall(inner)}
        anchors |= {values[name] for name in ("id", "name") if name in values}
        is_loaded = tag != "a" and values.get("rel") not in {"canonical", "prev", "next"}
        for name in ("href", "src"):
            if name in values:
                (loads if is_loaded else links).add(values[name])
    return anchors, links, loads


def faults(site: dict[str, tuple[set[str], set[str], set[str]]], files: set[str]) -> Iterator[str]:
    """Yields a message for each dead link or anchor, and each resource from another site."""
    for name, (_, links, loads) in sorted(site.items()):
        for load in sorted(loads):
            if _ELSEWHERE.match(load):
                yield f"{name} loads {load}, expected a file of the site"
        for link in sorted(links | loads):
            if re.match(r"[a-z]+:|//", link):
                continue
            path, _, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(path)))
            target = target if path else name
            if target not in files:
                yield f"{name} links to {link}, which does not exist"
            elif anchor and target in site and unquote(anchor) not in site[target][0]:
                yield f"{name} links to {link}, a page without that heading"


def on_post_build(config: MkDocsConfig) -> None:
    """Checks every page."""
    folder = Path(config.site_dir)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    pages = sorted(name for name in files if name.endswith(".html") and name != "404.html")
    site = {name: found_in((folder / name).read_text(encoding="utf-8")) for name in pages}
    for fault in faults(site, files):
        log.warning("%s", fault)
