"""Every tutorial runs from its first cell to its last, and is kept as it ran."""

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
    for cell in notebook.cells:
        if cell.cell_type == "code" and "plt.show()" in cell.source:
            assert any("image/png" in output.get("data", {}) for output in cell.outputs), (
                cell.source
            )
    assert path.stat().st_size < 1_500_000


def shown_of(notebook):
    """What each cell shows, without its numbers: kinds of pictures, and words."""
    shown = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            kinds = [sorted(output.get("data", {})) for output in cell.outputs]
            # A line may come in one piece or in several, as the kernel happens to send it.
            text = "".join(text for output in cell.outputs for text in texts_of(output))
            shown.append(([kind for kind in kinds if kind], words(text)))
    return shown


def words(text):
    """A text without numbers, lines and columns, which a machine or another draw may change."""
    text = re.sub(r"device: (cpu|cuda)", "device", text)
    # A third is no whole batches; and whether two means differ by chance is a matter of numbers.
    text = re.sub(r"torchrl_marl: (total_frames is|the most likely actions earn) .*", "", text)
    text = re.sub(r"findfont: .*\n|Matplotlib is building the font cache.*\n", "", text)
    text = re.sub(r"0x[0-9a-f]+", "#", text)
    text = re.sub(r"[-+]?(?:\d[\d_,]*\.?\d*(?:e[-+]?\d+)?|\.\d+|\bnan\b|\binf\b)", "#", text)
    return re.sub(r"[-=\s]+|(?<=#)[,. ]+(?=#)", " ", text).strip()


def test_numbers_do_not_count_and_words_do():
    assert words("return  -1.5e-3\n   2,048 frames") == words("return 7\n 12 frames")
    assert words("tensor([1., -2.])") == words("tensor([0.5000, 3.])")
    assert words("trained 3 agents") != words("trained 3 groups")
    assert words("findfont: Font family 'A' not found.\ntrained") == words("trained")


@pytest.fixture(scope="module")
def kernel():
    """What imports torch once for all tutorials, each of which begins with an empty one."""
    manager = run.AsyncKernelManager(kernel_name="python3")
    yield manager
    if manager.has_kernel:
        run_sync(manager.shutdown_kernel)(now=True)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_prints_what_is_stored(path, tmp_path, kernel):
    """Long trainings are shorter here, but where what they reach is asserted: it is numbers,
    which do not count."""
    text = path.read_text(encoding="utf-8")
    asserts = "assert returns[" in text.replace("\\", "")
    # What changes loggers for good has a kernel of its own.
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
