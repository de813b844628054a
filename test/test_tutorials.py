"""Every tutorial runs from its first cell to its last, and is kept as it ran."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("vmas")
pytest.importorskip("matplotlib")
pytest.importorskip("mpe2")
pytest.importorskip("jaxmarl")

FOLDER = Path(__file__).parents[1] / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.ipynb"))
SECTIONS = ("## What you will learn", "## Conclusion", "## Further reading")
# Where and by whom a tutorial was run is nobody's business.
MACHINE = re.compile(r"/(?:tmp|home|root|Users|work)/|site-packages|[A-Z]:\\\\")


def outputs_of(notebook):
    for cell in notebook.cells:
        yield from cell.get("outputs", [])


def texts_of(output):
    yield output.get("text", "")
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            yield value


def test_there_are_tutorials():
    assert [path.stem for path in TUTORIALS] == [
        "01_first_run",
        "02_specs_and_groups",
        "03_stacks_and_sharing",
        "04_one_program",
        "05_your_world",
    ]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_is_kept_as_it_ran(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for section in SECTIONS:
        assert section in text, section
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in outputs_of(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        for shown in texts_of(output):
            assert not MACHINE.search(shown), shown
    assert path.stat().st_size < 1_500_000


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(path, tmp_path, monkeypatch):
    # The kernel finds the package that is tested, also where it is not installed.
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    for output in outputs_of(notebook):
        assert output.output_type != "error"
