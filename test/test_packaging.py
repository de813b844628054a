"""Packaging: distributions are complete, work without the repository, and cite the version."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import torchrl_marl

pytestmark = pytest.mark.wheel

PACKAGE = Path(torchrl_marl.__file__).parent
ROOT = PACKAGE.parent
SETUP = ROOT / "setup.py"
README = ROOT / "README.md"


@pytest.fixture(autouse=True)
def checkout():
    if not SETUP.is_file():
        pytest.skip("this is no checkout")


def files_of(folder):
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def run(*command, cwd, **env):
    """Runs a command without PYTHONPATH, which points into the checkout."""
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**known, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def extras_in_pages():
    """The extras in install commands of README and docs."""
    pages = [README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    lists = [re.findall(r"pip install (?:-e )?'\.\[([\w, ]+)\]'", text) for text in texts]
    return {extra.strip() for names in sum(lists, []) for extra in names.split(",")}


def pictures():
    """The site's pictures, by their paths in the repository."""
    return {f"docs/pictures/{name}" for name in files_of(ROOT / "docs" / "pictures")}


def linked_from_the_readme():
    """Returns the paths of the files that the README links to or shows."""
    links = re.findall(r'(?:\]\(|src=")(?!http)([^)"#]+)', README.read_text(encoding="utf-8"))
    return set(links)


def check_the_description(metadata):
    """The description has no relative links, and the supported Python versions are listed."""
    head, _, text = metadata.partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert "Requires-Python: >=3.11" in head
    for version in ("3.11", "3.12", "3.13"):
        assert f"Classifier: Programming Language :: Python :: {version}" in head
    assert text.startswith("# torchrl_marl") and "## Install and train" in text
    assert re.findall(r'(?:\]\(|src=")(?!http)', text) == []


def test_links_of_a_published_readme_lead_to_the_repository(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **kwargs: None)
    described = runpy.run_path(str(SETUP))["description"]
    address = "https://example.org/owner/name"
    text = described(address)
    files = f"{address}/blob/v{torchrl_marl.__version__}/"
    assert f'<img src="{files}docs/pictures/navigation.gif?raw=true" width="360"' in text
    assert f"[compiled graphs]({files}docs/one_program.md)" in text
    assert "[TorchRL](https://github.com/pytorch/rl)" in text
    assert re.findall(r'(?:\]\(|src=")(?!http)', text) == []
    assert "are compiled graphs." in described("").replace("\n", " ")


def test_wheel_of_the_source_distribution_works_standalone(tmp_path):
    """Builds an sdist, a wheel from it, and trains with the wheel in an empty folder."""
    pytest.importorskip("setuptools", minversion="77")
    packed, wheels, empty = (tmp_path / name for name in ("packed", "wheels", "empty"))
    empty.mkdir()
    info = ["egg_info", "--egg-base", str(tmp_path)]
    run(sys.executable, "setup.py", "-q", *info, "sdist", "--dist-dir", str(packed), cwd=ROOT)
    (sources,) = packed.iterdir()
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "setup.py", "CITATION.cff", "torchrl_marl/py.typed"} <= names
    assert pictures() <= names and linked_from_the_readme() <= names
    folders = {part for name in names for part in Path(name).parent.parts}
    assert not folders & {"test", "__pycache__", ".git", ".ci", "runs", "site"}

    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    build = ["wheel", *alone, "--no-build-isolation", "--wheel-dir", str(wheels), str(sources)]
    run(*pip, *build, cwd=empty)
    (wheel,) = wheels.iterdir()
    prefix = "torchrl_marl/"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.endswith("/")}
        (described,) = (name for name in packed if name.endswith(".dist-info/METADATA"))
        lines = archive.read(described).decode().splitlines()
    assert {name.removeprefix(prefix) for name in packed if prefix in name} == files_of(PACKAGE)
    assert not {name.partition("/")[0] for name in packed} & {"test", "docs", "benchmarks"}

    assert {"torchrl_marl/py.typed", "torchrl_marl/configs/toy_arena_mappo.yaml"} <= packed
    assert [name for name in packed if name.endswith(".dist-info/licenses/LICENSE")]
    check_the_description("\n".join(lines))
    extras = {line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra: ")}
    assert {"vmas", "plot", "test", "docs"} <= extras_in_pages() <= extras

    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"), cwd=empty)
    python = tmp_path / "venv" / "bin" / "python"
    run(*pip, "--python", str(python), "install", *alone, str(wheel), cwd=empty)
    # Dependencies come from this environment; the package comes from the wheel in any case.
    where = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=empty)
    borrowed = "import sys; sys.path.append({!r})".format(sysconfig.get_path("purelib"))
    (Path(where.strip()) / "borrowed.pth").write_text(borrowed + "\n")
    command = tmp_path / "venv" / "bin" / "torchrl-marl"
    run(command, "train", "toy_arena_mappo", "total_frames=640", "evaluation.episodes=0", cwd=empty)
    asked = "import torchrl_marl as m; print(m.__file__)"
    assert str(tmp_path) in run(python, "-c", asked, cwd=empty)


def test_citation_changelog_and_docs_state_the_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert (cited["cff-version"], cited["type"]) == ("1.2.0", "software")
    version = torchrl_marl.__version__
    assert cited["version"] == version
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.M)
    minor = version.rpartition(".")[0]
    assert f"This is version {minor}." in (ROOT / "docs" / "supported.md").read_text("utf-8")
    assert cited["license"] in (ROOT / "LICENSE").read_text(encoding="utf-8").splitlines()[0]
    assert [list(author) for author in cited["authors"]] == [["name"]]


def test_dockerfile_runs_commands_of_the_readme():
    """Each stage installs the extras and runs the last command of a README block."""
    stages = re.split(r"^FROM ", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)[1:]
    by_name = {stage.splitlines()[0].rpartition(" AS ")[2]: stage for stage in stages}
    assert list(by_name)[-1] == "train"  # the default target
    text = README.read_text(encoding="utf-8")
    for name in ("train", "test"):
        (block,) = re.findall(rf"<!-- {name} -->\n```bash\n(.*?)\n```\n", text, re.S)
        words = shlex.split(block.splitlines()[-1])
        (extras,) = (re.search(r"\[.*\]", word)[0] for word in words if word.startswith(".["))
        last = words[len(words) - words[::-1].index("&&") :]
        stage = by_name[name]
        assert f"{extras}" in stage
        (run_there,) = re.findall(r"^CMD (\[.*\])$", stage, re.M)
        assert yaml.safe_load(run_there)[: len(last)] == last
