"""Writes all pictures: ``python docs/drawings``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from drawings import FOLDER, pictures  # noqa: E402

for name, picture in pictures().items():
    (FOLDER / name).write_text(picture, encoding="utf-8")
    print(FOLDER / name)
