"""The documentation site: its menu, its build, and the checks of its links and reference."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import torchrl_marl
from torchrl_marl.recipes import explain

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "hooks"))


def in_menu(entry):
    """The pages of a part of the menu."""
    if isinstance(entry, str):
        return {entry}
    return set().union(*map(in_menu, entry.values() if isinstance(entry, dict) else entry))


def test_every_page_is_in_the_menu():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    missing = pages - in_menu(nav)
    assert not missing, "add them to `nav` in mkdocs.yml"
    own = {page for page in in_menu(nav) if not page.startswith(("repository/", "api/"))}
    assert own == pages


def written(folder):
    """Modification times of the files of a folder."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    folder = tmp_path / "site"
    before = written(DOCS)
    command = [sys.executable, "-B", "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert written(DOCS) == before  # nothing is written beside the sources
    check_the_reference(folder / "api")
    check_what_lies_beside_docs(folder)
    check_what_is_found(folder)


def check_the_reference(folder):
    """Every public name is on its reference page."""
    from reference import GROUPS, public_names

    for place, (_, packages) in GROUPS.items():
        page = (folder / f"{place}.html").read_text(encoding="utf-8")
        for package in packages:
            prefix = "torchrl_marl" if package == "torchrl_marl" else f"torchrl_marl.{package}"
            for name in public_names(package):
                assert f'id="{prefix}.{name}"' in page


FOUND = {
    "hyperparameter": "tuning.html#hyperparameter-search-tune",
    "tune": "tuning.html#hyperparameter-search-tune",
    "grid": "tuning.html#a-grid-sweep",
    "sweep": "tuning.html#a-grid-sweep",
    "tensorboard": "runs.html#loggers-tensorboard-wandb-mlflow",
    "loggers": "runs.html#loggers-tensorboard-wandb-mlflow",
    "jupyter": "runs.html#in-jupyter-notebooks",
    "curriculum": "runs.html#a-curriculum",
    "callback": "callbacks.html",
    "against": "evaluation.html#against-an-opponent",
    "compare": "evaluation.html#compare-which-one-is-better",
}
"""What people search for, and the section that answers it."""


def check_what_is_found(site):
    """Common search words stand in the heading of the section that answers them."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {doc["location"]: doc["title"] for doc in index["docs"]}
    for word, place in FOUND.items():
        words = re.split(index["config"]["separator"], titles[place].lower())
        assert any(one.strip("`:,?").startswith(word) for one in words), (word, titles[place])


def test_search_words_are_in_the_menu():
    """The menu entries of these pages contain the words; needs no build."""
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    (how_to,) = (part["How to"] for part in nav if "How to" in part)
    named = {page: name for one in how_to if isinstance(one, dict) for name, page in one.items()}
    for word, page in (
        ("tune", "tuning.md"),
        ("sweep", "tuning.md"),
        ("logger", "runs.md"),
        ("callback", "callbacks.md"),
        ("compare", "evaluation.md"),
        ("--against", "evaluation.md"),
        ("start from", "start_from.md"),
        ("curriculum", "start_from.md"),
        ("shaping", "rewards.md"),
    ):
        assert word in named[page].lower()


def test_settings_have_anchors_and_sections_are_in_the_contents():
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    ids = re.findall(r'^\| <a id="([^"]+)"></a>`', text, re.M)
    assert len(ids) == len(set(ids)) == len(re.findall(r"^\| (?!setting|---).*`", text, re.M))
    assert {setting.key for setting in explain()} <= set(ids)
    assert {"learner.lr", "learner.minibatch_size-qmix", "learner.actor.num_cells"} <= set(ids)
    listed, sections = (re.findall(form, text, re.M) for form in (r"^- \[(.*?)\]\(#", "^## (.*)$"))
    assert listed == sections and "`logging`" in sections


def test_formulas_use_a_math_font():
    """Fonts of each system and DejaVu's come before the generic family `math`."""
    css = (DOCS / "theme" / "site.css").read_text(encoding="utf-8")
    (fonts,) = re.findall(r"^math \{\s+font-family:(.*?);", css, re.M | re.S)
    order = [font.strip().strip('"') for font in fonts.split(",")]
    assert order[:2] == ["STIX Two Math", "Cambria Math"]
    assert order.index("DejaVu Math TeX Gyre") < order.index("math") < order.index("serif")


def test_cpu_build_of_torch_is_installed_first():
    for page in (ROOT / "README.md", DOCS / "index.md"):
        text = page.read_text(encoding="utf-8")
        cpu = text.index("pip install torch --index-url https://download.pytorch.org/whl/cpu")
        assert cpu < text.index("pip install '.[vmas,plot]'")


def check_what_lies_beside_docs(site):
    """Linked files outside docs are part of the site: texts, notebooks, folders."""
    recipe = site / "repository" / "torchrl_marl" / "configs" / "vmas_balance_mappo.yaml.html"
    assert "vmas_balance_mappo.yaml" in recipe.read_text(encoding="utf-8")
    tutorial = (site / "repository/tutorials/01_first_run.ipynb.html").read_text(encoding="utf-8")
    assert 'src="01_first_run_1.png"' in tutorial
    results = (site / "results.html").read_text(encoding="utf-8")
    assert 'href="repository/benchmarks/index.html"' in results


def test_links_to_repository_files_are_rewritten():
    repository = pytest.importorskip("repository", reason="mkdocs is not installed")
    text = (
        "[a](../README.md#run) [b](runs.md) [c](https://x.org/y.md)\n```\n[d](../README.md)\n```\n"
    )
    assert repository.relinked(text, DOCS / "results.md") == text.replace(
        "(../README.md#run)", "(repository/README.md#run)"
    )
    assert repository.relinked("[a](../no_such.md)", DOCS / "results.md") == "[a](../no_such.md)"
    assert repository.relinked("[a](../docs/runs.md)", ROOT / "benchmarks" / "README.md") == (
        "[a](../../runs.md)"
    )


def test_dead_links_and_external_resources_are_reported():
    checked = pytest.importorskip("checked", reason="mkdocs is not installed")
    one = '<h2 id="top">A</h2><a href="two.html#here">x</a><a href="#top">y</a><a href="gone.html">'
    two = '<h2 id="there">B</h2><script src="https://cdn.org/x.js"></script><img src="p.png">'
    site = {"one.html": checked.found_in(one), "two.html": checked.found_in(two)}
    assert list(checked.faults(site, {"one.html", "two.html"})) == [
        "one.html links to gone.html, which does not exist",
        "one.html links to two.html#here, a page without that heading",
        "two.html loads https://cdn.org/x.js, expected a file of the site",
        "two.html links to p.png, which does not exist",
    ]


def test_docstrings_become_markdown():
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    from docstrings import as_markdown

    text = """A sum.

    .. math:: a + b

    .. math::
        a \\\\
        b

    See :func:`~a.b.gae`, :class:`Loss` and :meth:`look`, with :math:`x_t`."""
    assert (
        as_markdown(text, {"a.b.gae": "a.b.gae", "Loss": "o.Loss"})
        == """A sum.

    $$a + b$$

    $$a \\\\ b$$

    See [`gae`][a.b.gae], [`Loss`][o.Loss] and `look`, with $x_t$."""
    )


def test_formulas_become_mathml(caplog):
    formulas = pytest.importorskip("formulas", reason="mkdocs is not installed")
    page = r'<p>So <span class="arithmatex">\(x_t &lt; 1\)</span>.</p>'
    drawn = formulas.on_page_content(page, None, None, None)
    assert "<msub><mi>x</mi><mi>t</mi></msub>" in drawn and "arithmatex" not in drawn
    assert not caplog.records
    formulas.on_page_content(r'<div class="arithmatex">\[\nothing x\]</div>', None, None, None)
    assert r"\nothing" in caplog.text


def test_functions_in_formulas_are_spaced():
    formulas = pytest.importorskip("formulas", reason="mkdocs is not installed")

    def drawn(formula):
        page = f'<span class="arithmatex">\\({formula}\\)</span>'
        mathml = formulas.on_page_content(page, None, None, None)
        return re.sub(r"<mspace[^>]*>", "_", mathml)

    assert "<mi>a</mi>_<mi>log</mi>_<mi>b</mi>" in drawn(r"a \log b")
    assert "&#x00029;</mo>_<mi>log</mi>_<msub>" in drawn(r"f(a) \log b_i")
    assert "<mo>=</mo><mi>log</mi><mo" in drawn(r"a = \log(b)").replace("&#x0003D;", "=")
    assert "_" not in drawn(r"\log_2(a)") + drawn("a b")


def test_every_public_name_has_a_docstring_and_a_page():
    reference = pytest.importorskip("reference", reason="mkdocs is not installed")
    assert reference.faults() == []


def imported(text):
    """Modules and names that a page or notebook imports from this package."""
    pattern = r"^[ >\".]*from (torchrl_marl(?:\.\w+)*) import (\([^)]*\)|[^\\\n#]+)"
    for module, names in re.findall(pattern, text, re.M):
        for name in re.findall(r"\w+", names.replace("\\n", " ")):
            yield module, name


def test_names_imported_in_pages_are_in_the_reference():
    reference = pytest.importorskip("reference", reason="mkdocs is not installed")
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *ROOT.glob("tutorials/*.ipynb")]
    names = {one for page in pages for one in imported(page.read_text(encoding="utf-8"))}
    assert {name for _, name in names} >= {"TeamSpec", "register_algorithm", "Shape", "pad_group"}
    places = reference.places()
    missing = {
        f"{module}.{name}"
        for module, name in names
        if reference.origin(module.removeprefix("torchrl_marl."), name) not in places
    }
    assert not missing, "add them to CHOSEN in docs/hooks/reference.py"
    top = {reference.origin("torchrl_marl", name) for name in torchrl_marl.__all__}
    assert top <= set(places)


def test_name_is_shown_once_and_linked_by_all_its_paths():
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    from docstrings import known_names
    from reference import GROUPS, overview, public_names

    shown = [name for _, packages in GROUPS.values() for p in packages for name in public_names(p)]
    assert shown.count("TeamSpec") == shown.count("MatchPolicy") == 1
    known = known_names()
    loss = "torchrl_marl.objectives.off_policy.OffPolicyLoss"
    assert known["OffPolicyLoss"] == known[loss] == loss
    defined, place = (f"torchrl_marl.collectors{at}.MatchPolicy" for at in (".matches", ""))
    assert known[defined] == known[place] == place
    first = overview().split("\n## ")[1]
    assert [first.count(f"[`{name}`]") for name in ("train", "training.train")] == [1, 1]


def test_missing_docstring_of_public_name_is_reported(monkeypatch, tmp_path):
    reference = pytest.importorskip("reference", reason="mkdocs is not installed")
    package = tmp_path / "torchrl_marl" / "new"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from torchrl_marl.new.parts import A, b, C\n")
    (package / "parts.py").write_text(
        'class A:\n    """A."""\n    def run(self): ...\n\ndef b(): ...\n\nC = 1\n"""C."""\n'
    )
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    lacking = [name for each in "AbC" for name in reference.undocumented("new", each)]
    assert lacking == ["torchrl_marl.new.A.run", "torchrl_marl.new.b"]
