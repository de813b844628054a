"""Checksums that show whether a checkpoint is what was written.

The zip file that ``torch.save`` writes holds a checksum of each of its entries, which
``torch.load`` does not read, and none of the rest. A seal is a checksum of the whole file, as the
zip file's comment: it lies behind all that ``torch.load`` looks at.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
from pathlib import Path
from typing import IO

__all__ = ["damage", "seal", "swollen"]

_WORD = b"sha256:"
_LENGTH = len(_WORD) + 64
_CHUNK = 1 << 20


def seal(file: IO[bytes]) -> None:
    """Appends a checksum of the whole content.

    Args:
        file (file): a zip file without a comment, open for reading and writing.
    """
    # A zip file ends with the length of its comment.
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", _LENGTH))
    length = file.tell()
    file.write(_WORD + _checksum(file, length))


def damage(path: Path) -> str | None:
    """Returns what is wrong with a file, or None where it is undamaged.

    Files of version 0.1 have no seal; of those, the checksums of the entries are read.

    Args:
        path (Path): a zip file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        length = max(0, file.seek(0, os.SEEK_END) - _LENGTH)
        file.seek(length)
        end = file.read()
        if end.startswith(_WORD):
            whole = end[len(_WORD) :] == _checksum(file, length)
            return None if whole else "its checksum is another one"
        return _damage_of_entries(file)


def _damage_of_entries(file: IO[bytes]) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.comment:
                return "its checksum is broken"
            larger = swollen(archive, file.seek(0, os.SEEK_END))
            if larger is not None:
                return larger
            broken = archive.testzip()
    except Exception as error:  # zipfile and zlib may raise anything at damaged fields
        return f"it is no whole zip file ({type(error).__name__})"
    return None if broken is None else f"the checksum of its entry {broken!r} is another one"


def swollen(archive: zipfile.ZipFile, size: int) -> str | None:
    """Returns why a zip file would hold more than it has bytes, or None where it does not.

    Args:
        archive (ZipFile): of which the list of entries is looked at.
        size (int): bytes of the file.
    """
    entries = archive.infolist()
    if any(one.compress_type != zipfile.ZIP_STORED for one in entries):
        return "its entries are compressed, expected stored ones"
    total = sum(one.file_size for one in entries)
    more = total > size
    return f"its entries have {total:,} bytes, expected at most its own {size:,}" if more else None


def _checksum(file: IO[bytes], length: int) -> bytes:
    """Returns the SHA-256 of the first bytes as text; leaves the file's position behind them."""
    file.seek(0)
    found = hashlib.sha256()
    while length > 0:
        chunk = file.read(min(_CHUNK, length))
        if not chunk:
            break
        found.update(chunk)
        length -= len(chunk)
    return found.hexdigest().encode()
