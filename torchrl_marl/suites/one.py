"""One run of a suite, in a process of its own: ``python -m torchrl_marl.suites.one``.

The first line of its input says which; when the input ends, the suite is gone, and the run stops
after its iteration as by SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_marl.errors import UserError

__all__ = ["train_one"]


def train_one(settings: Mapping[str, Any], folder: Path, trust: bool = False) -> None:
    """Trains a run, or goes on with one that was begun.

    Args:
        settings (mapping): the run's.
        folder (Path): where it is kept.
        trust (bool): go on with one of somebody else's.

    Raises:
        UserError: what is asked for cannot be done; the message names the fix.
    """
    from torchrl_marl.runs import resume, train

    quiet = {"logging.progress": False}
    if (folder / "config.yaml").is_file():
        resume(folder, trust=trust, **quiet)
    else:
        train({**settings, "folder": str(folder)}, **quiet)


def _main() -> int:
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    from torchrl_marl.console import silence_others, tell_error

    silence_others()
    try:
        train_one(request["settings"], Path(request["folder"]), request["trust"])
    except UserError as error:
        tell_error(error)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # the suite reads the last line and goes on with the other runs
        traceback.print_exc()
        return 1
    return 0


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):  # not by sys.stdin, whose lock Python's end wants
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_main())
