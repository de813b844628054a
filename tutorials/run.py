"""Runs tutorials and stores them with what they print and draw.

    python tutorials/run.py              # all
    python tutorials/run.py 01_first_run 04_one_program

Do this whenever the tests say that what is stored is not what is printed. They run in a temporary
folder, from this checkout's package, and need what `pip install '.[test]'` installs.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path
from unittest import mock

import nbclient
import nbformat
from jupyter_client import AsyncKernelManager

FOLDER = Path(__file__).resolve().parent
# So that notebooks show the same wherever they run: figures in the page, and one process compiles.
SAME = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}

FRAMES = re.compile(r"\b(total_frames|frames)=(\d[\d_]*)")


def execute(
    path: Path,
    folder: str | Path,
    *,
    shorter: bool = False,
    kernel: AsyncKernelManager | None = None,
) -> nbformat.NotebookNode:
    """The notebook as it runs now.

    Args:
        path (Path): the notebook.
        folder (str or Path): in which it runs.

    Keyword Args:
        shorter (bool): with a third of the frames of long trainings.
        kernel (AsyncKernelManager, optional): what runs it, which may have run others; it is
            emptied before. Otherwise a kernel of its own.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells if shorter else []:
        cell.source = FRAMES.sub(_third, cell.source)
    client = nbclient.NotebookClient(
        notebook,
        km=kernel,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    paths = os.pathsep.join(filter(None, [str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    if kernel is not None:
        notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    with mock.patch.dict(os.environ, {"PYTHONPATH": paths, **SAME}):
        client.execute()
    if kernel is not None:
        client.kc.stop_channels()
        del notebook.cells[0]
    return notebook


def _third(found: re.Match[str]) -> str:
    frames = int(found[2])
    return f"{found[1]}={frames // 3 if frames > 10_000 else frames}"


def main() -> None:
    """Runs those that are named, or all."""
    parser = argparse.ArgumentParser(description="Runs tutorials and stores their outputs.")
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    for name in parser.parse_args().names or names:
        path = FOLDER / f"{name}.ipynb"
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, folder)
        nbformat.write(notebook, path)
        print(path.name)


if __name__ == "__main__":
    main()
