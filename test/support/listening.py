"""Listening sockets of a process and its descendants, from ``/proc``."""

import contextlib
import os
import socket
import struct
from pathlib import Path

LISTENS = "0A"


def listening(pid):
    """Address and port -> command of the process, for all listening sockets."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS:
                inodes[inode] = _address(*local.split(":"))
    found = {}
    for process in descendants(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            command = (process / "cmdline").read_bytes().split(b"\0")[0].decode()
            for entry in (process / "fd").iterdir():
                inode = os.readlink(entry).removeprefix("socket:[").removesuffix("]")
                if inode in inodes:
                    found[inodes[inode]] = Path(command).name
    return found


def descendants(pid):
    """Folders in ``/proc`` of a process and its descendants."""
    children = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, pending = [], [pid]
    while pending:
        found.append(pending.pop())
        pending += children.get(found[-1], [])
    return [Path("/proc") / str(one) for one in found]


def _address(host, port):
    """``0100007F`` and ``1F90`` -> ``127.0.0.1`` and 8080; IPv4 in IPv6 as IPv4."""
    raw = b"".join(struct.pack("=I", int(host[i : i + 8], 16)) for i in range(0, len(host), 8))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw).removeprefix("::ffff:"), int(port, 16)
