"""What is installed: everything that lies in the package, recipes and the mark of types too."""

import subprocess
import sys
from pathlib import Path

import pytest

import torchrl_marl

PACKAGE = Path(torchrl_marl.__file__).parent
SETUP = PACKAGE.parent / "setup.py"


def files_of(folder):
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_all_files_are_installed(tmp_path):
    pytest.importorskip("setuptools")
    if not SETUP.is_file():
        pytest.skip("this is no checkout")
    command = [sys.executable, SETUP.name, "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=SETUP.parent, check=True, capture_output=True)
    installed = files_of(tmp_path / "torchrl_marl")
    assert "py.typed" in installed
    assert sum(name.endswith(".yaml") for name in installed) > 20
    assert installed == files_of(PACKAGE)
