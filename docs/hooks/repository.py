"""Pages for linked files of the repository, so that the site is self-contained.

Pages are read on GitHub, too: there ``../benchmarks/results/x.md`` leads to the file. Here every
file outside ``docs`` that a page links to, or that the menu names, is taken in under
``repository/``: Markdown and notebooks as pages, whose own links are followed, other texts as pages
that show them, pictures as they are. A link to what does not exist is left as it is, and ends the
build.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebooks import notebook_as_markdown
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDER = "repository/"
PICTURES = {".gif", ".jpg", ".mp4", ".png", ".svg"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
LANGUAGES |= {".hpp": "cpp", ".cpp": "cpp", ".h": "cpp", ".sh": "bash", ".csv": "text"}
# What no search should find before the pages that explain it.
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"

_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1[`~]*$", re.M | re.S)
_LINK = re.compile(r"(\]\(|\b(?:src|href)=\")([^)\s\"#]*)(#[^)\s\"]*)?(?=[)\"])")


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Returns a page with changed text, and unchanged code blocks."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def target_of(link: str, source: Path) -> Path | None:
    """Returns the target of a link in ``source``, if it is in the repository."""
    if not link or re.match(r"[a-z]+:|/", link):
        return None
    target = Path(os.path.normpath(source.parent / link))
    return target if target.exists() and target.is_relative_to(ROOT) else None


def is_page_of_docs(path: Path) -> bool:
    """Returns whether MkDocs includes the file by itself."""
    return path.is_relative_to(DOCS) and path.is_file() and path.suffix not in {".py", ".yaml"}


def place_of(path: Path) -> str:
    """Returns the path of a repository file among the site's sources."""
    if is_page_of_docs(path):
        return path.relative_to(DOCS).as_posix()
    if path.is_dir():
        readme = path / "README.md"
        return place_of(readme) if readme.exists() else place_of(path / "index.md")
    suffix = "" if path.suffix in {".md", *PICTURES} else ".md"
    return f"{FOLDER}{path.relative_to(ROOT).as_posix()}{suffix}"


def source_of(place: str) -> Path:
    """Returns the repository file of a path; the inverse of :func:`place_of`."""
    if not place.startswith(FOLDER):
        return DOCS / place
    path = ROOT / place.removeprefix(FOLDER)
    return path if path.exists() else path.with_suffix("")


def relinked(text: str, source: Path) -> str:
    """Returns a page with links to files replaced by links within the site."""
    folder = posixpath.dirname(place_of(source))

    def change(link: re.Match[str]) -> str:
        target = target_of(link[2], source)
        if target is None:
            return link[0]
        return link[1] + posixpath.relpath(place_of(target), folder) + (link[3] or "")

    return outside_fences(text, lambda part: _LINK.sub(change, part))


def links_of(text: str, source: Path) -> Iterator[Path]:
    """Yields the files and folders of the repository that a page links to."""
    for link in _LINK.finditer(_FENCE.sub("", text)):
        target = target_of(link[2], source)
        if target is not None:
            yield target


def shown(path: Path) -> str:
    """Returns a page with the text of a file."""
    text = path.read_text(encoding="utf-8").rstrip("\n")
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", text))])
    language = LANGUAGES.get(path.suffix, "text")
    name = path.relative_to(ROOT).as_posix()
    return f"{UNSEARCHED}# {path.name}\n\n`{name}`\n\n{fence}{language}\n{text}\n{fence}\n"


def listed(folder: Path) -> str:
    """Returns a page with the contents of a folder, without compiled libraries."""
    paths = (path for path in folder.iterdir() if path.name[0] not in "._")
    names = sorted(path.name for path in paths if path.suffix != ".so")
    rows = "".join(f"- [{name}]({name})\n" for name in names)
    return f"{UNSEARCHED}# {folder.name}\n\n{rows}"


def nav_places(nav: object) -> Iterator[str]:
    """Yields the paths in a menu."""
    if isinstance(nav, str):
        yield nav
    for entry in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []:
        yield from nav_places(entry)


def _taken(path: Path) -> tuple[str | bytes, dict[str, bytes]]:
    """Returns the page of a file, and its pictures."""
    if path.is_dir():
        return listed(path), {}
    if path.suffix in PICTURES:
        return path.read_bytes(), {}
    if path.suffix == ".ipynb":
        return notebook_as_markdown(path)
    return (path.read_text(encoding="utf-8") if path.suffix == ".md" else shown(path)), {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Sets the anchors of headings as on GitHub."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files that pages and menu link to, directly or indirectly."""
    left = [source_of(place) for place in nav_places(config.nav) if place.startswith(FOLDER)]
    for file in files.documentation_pages():
        source = source_of(file.src_uri)
        if source.exists():  # and is not written by another hook
            left += links_of(file.content_string, source)
    while left:
        path = left.pop()
        place = place_of(path)
        if files.get_file_from_path(place) is not None or not path.exists():
            continue
        if path.is_dir() and (path / "README.md").exists():
            left.append(path / "README.md")
            continue
        content, pictures = _taken(path)
        files.append(File.generated(config, place, content=content))
        for name, data in pictures.items():
            at = posixpath.join(posixpath.dirname(place), name)
            files.append(File.generated(config, at, content=data))
        if isinstance(content, str) and (path.is_dir() or path.suffix in {".md", ".ipynb"}):
            left += links_of(content, path / "index.md" if path.is_dir() else path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites links to the site, and starts lists where GitHub does."""
    source = source_of(page.file.src_uri)
    if source.is_dir():
        source = source / "index.md"
    return outside_fences(relinked(markdown, source), _lists_begin)


def _lists_begin(text: str) -> str:
    """Returns a text with an empty line between a paragraph and the list below it."""
    return re.sub(r"^(?![-*] |\s|$)(.+)\n(?=[-*] )", r"\1\n\n", text, flags=re.M)
