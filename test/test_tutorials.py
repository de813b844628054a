"""Every tutorial runs from its first to its last cell, and its stored outputs are current."""

import importlib.util
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
run_sync = pytest.importorskip("jupyter_core.utils").run_sync
pytest.importorskip("vmas")
pytest.importorskip("matplotlib")
pytest.importorskip("mpe2")
pytest.importorskip("jaxmarl")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.tutorials

FOLDER = Path(__file__).parents[1] / "tutorials"
TUTORIALS = sorted(FOLDER.glob("*.ipynb"))
_spec = importlib.util.spec_from_file_location("run", FOLDER / "run.py")
run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)
SECTIONS = ("## What you will learn", "## Conclusion", "## Further reading")
# Outputs must not show paths of the machine that ran them.
MACHINE = re.compile(r"/(?:tmp|home|root|Users|work)/|site-packages|[A-Z]:\\\\")


def outputs_of(notebook):
    for cell in notebook.cells:
        yield from cell.get("outputs", [])


def texts_of(output):
    yield output.get("text", "")
    for kind, value in output.get("data", {}).items():
        if kind.startswith("text/"):
            yield value


def test_expected_tutorials_exist():
    assert [path.stem for path in TUTORIALS] == [
        "00_hosted",
        "01_first_run",
        "02_specs_and_groups",
        "03_stacks_and_sharing",
        "04_one_program",
        "05_your_environment",
        "06_replay_and_mixed",
        "07_talk_and_remember",
        "08_players_and_populations",
        "09_beyond_one_machine",
    ]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_stored_tutorial_is_complete_and_without_errors(path):
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
    for cell in notebook.cells:
        if cell.cell_type == "code" and "plt.show()" in cell.source:
            assert any("image/png" in output.get("data", {}) for output in cell.outputs), (
                cell.source
            )
    assert path.stat().st_size < 1_500_000


def shown_of(notebook):
    """Output types and text of each cell, without numbers."""
    shown = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kinds = [sorted(output.get("data", {})) for output in cell.outputs]
            # The kernel may send a line in one piece or in several.
            text = "".join(text for output in cell.outputs for text in texts_of(output))
            shown.append(([kind for kind in kinds if kind], words(text)))
    return shown


def words(text):
    """A text without numbers, line breaks and columns, which may differ between machines."""
    text = re.sub(r"device: (cpu|cuda)", "device", text)
    # These hints depend on the shortened number of frames and on random results.
    text = re.sub(r"torchrl_marl: (total_frames is|the most likely actions earn) .*", "", text)
    text = re.sub(r"findfont: .*\n|Matplotlib is building the font cache.*\n", "", text)
    text = re.sub(r"0x[0-9a-f]+", "#", text)
    text = re.sub(r"[-+]?(?:\d[\d_,]*\.?\d*(?:e[-+]?\d+)?|\.\d+|\bnan\b|\binf\b)", "#", text)
    return re.sub(r"[-=\s]+|(?<=#)[,. ]+(?=#)", " ", text).strip()


def test_words_ignores_numbers_only():
    assert words("return  -1.5e-3\n   2,048 frames") == words("return 7\n 12 frames")
    assert words("tensor([1., -2.])") == words("tensor([0.5000, 3.])")
    assert words("trained 3 agents") != words("trained 3 groups")
    assert words("findfont: Font family 'A' not found.\ntrained") == words("trained")


@pytest.fixture(scope="module")
def kernel():
    """A kernel that imports torch once for all tutorials; each starts with empty variables."""
    manager = run.AsyncKernelManager(kernel_name="python3")
    yield manager
    if manager.has_kernel:
        run_sync(manager.shutdown_kernel)(now=True)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_output_equals_stored_output(path, tmp_path, kernel):
    """Long trainings are shortened, except if a tutorial asserts their results.

    Numbers in the outputs are not compared."""
    text = path.read_text(encoding="utf-8")
    asserts = "assert returns[" in text.replace("\\", "")
    # A tutorial that changes loggers needs a separate kernel.
    shared = None if "import logging" in text else kernel
    notebook = run.execute(path, tmp_path, shorter=not asserts, kernel=shared)
    for output in outputs_of(notebook):
        assert output.output_type != "error"
    stored, now = shown_of(nbformat.read(path, as_version=4)), shown_of(notebook)
    for number, (before, after) in enumerate(zip(stored, now, strict=True), 1):
        assert after == before, (
            f"cell [{number}] shows something else than is stored; look at it, and store it by: "
            f"python tutorials/run.py {path.stem}"
        )
