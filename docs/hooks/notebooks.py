"""Conversion of notebooks to pages: text, code, and stored outputs."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PICTURES = {"image/png": "png", "image/gif": "gif", "image/jpeg": "jpg"}


def notebook_as_markdown(path: Path) -> tuple[str, dict[str, bytes]]:
    """Returns a notebook as Markdown, and its pictures by file name."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in cells:
        source = "".join(cell["source"]).strip("\n")
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif cell["cell_type"] == "code" and source:
            parts.append(f"```python\n{source}\n```")
            parts += [_shown(output, path.stem, pictures) for output in cell["outputs"]]
    return "\n\n".join(filter(None, parts)) + "\n", pictures


def _shown(output: dict, stem: str, pictures: dict[str, bytes]) -> str:
    """Returns an output as Markdown, and adds its picture to ``pictures``."""
    data = output.get("data", {})
    for kind, suffix in _PICTURES.items():
        if kind in data:
            name = f"{stem}_{len(pictures) + 1}.{suffix}"
            pictures[name] = base64.b64decode("".join(data[kind]))
            return f"![Output]({name})"
    text = "".join(output.get("text", data.get("text/plain", "")))
    # Overwritten text in a line, as from progress bars, is left out.
    lines = [line.rpartition("\r")[2] for line in _ESCAPES.sub("", text).rstrip().split("\n")]
    text = "\n".join(lines)
    return f"```text\n{text}\n```" if text.strip() else ""
