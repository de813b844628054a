"""Prints a text when a process dies, unless the parent process has announced its own end before.

Runs as a separate process, started by this file's path: Ray ends processes from C++, often
before one of their threads can print. Arguments: the ID of the process and the text. A byte at the
standard input announces the end of the parent. The exit status is 1 if the text was printed.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys

_GRACE_SECONDS = 0.2
"""Seconds in which the death of the process may follow that of the parent."""


def main(pid: int, text: str) -> int:
    """Waits until the process or its parent ends, and returns the exit status."""
    with contextlib.suppress(ProcessLookupError):  # the process has died already
        process = os.pidfd_open(pid)
        ready, _, _ = select.select([process, sys.stdin], [], [])
        if sys.stdin in ready and (
            os.read(0, 1) or not select.select([process], [], [], _GRACE_SECONDS)[0]
        ):
            return 0
    print(text, file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
