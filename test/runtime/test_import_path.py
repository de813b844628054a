"""Files of the current folder never replace installed packages, also in child processes."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from runs import small_config

import torchrl_marl
from torchrl_marl.errors import TrustError
from torchrl_marl.runtime.import_path import (
    check_not_in_current_folder,
    child_path,
    current_folder,
    remove_current_folder,
)
from torchrl_marl.runtime.trust import trusting
from torchrl_marl.training import background_compile, iterate

pytestmark = pytest.mark.processes

TRAPS = ("random", "yaml", "json", "pkgutil", "runpy", "typing", "numpy", "matplotlib", "msgpack")
SMALL = [
    "env.num_envs=2",
    "env.max_steps=5",
    "frames_per_batch=20",
    "total_frames=40",
    "learner.minibatch_size=10",
    "evaluation.episodes=1",
    "logging.progress=false",
]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A stranger's folder as the current one. Every module imported from it leaves a mark."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name in TRAPS:
        trap(folder / f"{name}.py", tmp_path / "mark")
    monkeypatch.chdir(folder)
    yield folder
    assert not marks(tmp_path)


def trap(path, mark):
    path.write_text(f"open({str(mark)!r}, 'a').write({path.stem + ' '!r})\nraise SystemExit(3)\n")


def marks(tmp_path):
    mark = tmp_path / "mark"
    return mark.read_text() if mark.exists() else ""


def started(*words, path="", **variables):
    """Run Python in the current folder."""
    package = str(Path(torchrl_marl.__file__).parents[1])
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, [package, path])), **variables}
    line = [sys.executable, *map(str, words)]
    environment = {**os.environ, **variables}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)


def console(*words, **options):
    """Run ``torchrl-marl`` as the installed script does, which sets no ``-P``."""
    own = "import sys; del sys.path[0]; from torchrl_marl.apps.cli.main import main; "
    return started("-c", f"{own}raise SystemExit(main())", *words, **options)


def test_runs_of_a_suite_import_nothing_from_current_folder(theirs, tmp_path):
    words = ["tasks=matrix_game", "algorithms=mappo", "seeds=1", "frames=256"]
    done = console("suite", "toy", *words, "--jobs", 1, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "finished" in (tmp_path / "out" / "results.csv").read_text()


def test_background_compile_imports_nothing_from_current_folder(theirs, tmp_path):
    config = small_config(folder=str(tmp_path / "run"), total_frames=80, execution="eager")
    for _ in iterate(config):
        pass
    process = background_compile._start_process(tmp_path / "run")
    assert process.wait(120) == 0
    process.stdin.close()


def test_env_workers_import_nothing_from_current_folder(theirs, tmp_path):
    pytest.importorskip("mpe2")
    world = ["env.library=pettingzoo", "env.name=mpe2/simple_spread_v3", "env.workers=2"]
    words = ["train", "toy_arena_mappo", *world, *SMALL, f"folder={tmp_path / 'run'}"]
    done = console(*words)
    assert done.returncode == 0, done.stderr


RAY = """
from torchrl_marl.collectors.ray_connection import connect

def paths():
    import sys
    return sys.path

connection = connect(None)
print("searched:", connection.ray.get(connection.ray.remote(paths).remote()))
connection.close()
"""


def test_ray_workers_do_not_search_current_folder(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    for name in ("theirs", "own"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "theirs")
    (tmp_path / "own" / "script.py").write_text(RAY)
    done = started(tmp_path / "own" / "script.py")
    line = next(line for line in done.stdout.splitlines() if line.startswith("searched:"))
    assert repr(str(tmp_path / "own")) in line  # the folder of the script is searched
    assert repr(str(tmp_path / "theirs")) not in line


def test_library_processes_import_nothing_from_current_folder(theirs, tmp_path):
    """``multiprocessing`` starts a resource tracker, and Inductor starts compile workers."""
    for name in ("ctypes", "multiprocessing", "torch"):
        trap(theirs / f"{name}.py", tmp_path / "mark")
    words = ["train", "toy_arena_mappo", *SMALL, "execution=compile", f"folder={tmp_path / 'run'}"]
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = console(*words, **own)
    assert done.returncode == 0, done.stderr


def test_python_m_imports_nothing_from_current_folder(theirs):
    for name in (
        "pkgutil",
        "runpy",
        "typing",
    ):  # Python imports them before our code
        (theirs / f"{name}.py").unlink()
    for more in ([], ["-P"]):
        done = started(*more, "-m", "torchrl_marl", "list", "recipes")
        assert done.returncode == 0, done.stderr
        done = started(*more, "-m", "torchrl_marl", "train", "toy_arena_mappo", "wrong=1")
        assert done.returncode == 2


def test_empty_entry_of_pythonpath_is_ignored(theirs):
    text = "import sys; from torchrl_marl.apps.cli.main import main; main(); print(sys.path)"
    (theirs.parent / "own").mkdir()
    script = theirs.parent / "own" / "script.py"
    script.write_text(f"import sys\nsys.argv[1:] = ['list', 'suites']\n{text}")
    for name in TRAPS:  # imported before the first line of this program
        (theirs / f"{name}.py").unlink()
    package = str(Path(torchrl_marl.__file__).parents[1])
    done = started(script, PYTHONPATH=f"{package}:")
    assert done.returncode == 0, done.stderr
    assert str(theirs) not in done.stdout and str(script.parent) in done.stdout
    done = started(script, PYTHONPATH=f"{package}:{theirs}")
    assert str(theirs) in done.stdout  # the user named it


# ---------------------------------------------------------------------------- names of libraries


def test_library_is_not_imported_from_current_folder(theirs, tmp_path):
    library, name = "isaaclab", "Isaac-Cart-Double-Pendulum-Direct-v0"
    package = "isaaclab_tasks"
    trap(theirs / f"{package}.py", tmp_path / "mark")
    words = ["train", "toy_arena_mappo", f"env.library={library}", f"env.name={name}", *SMALL]
    for way in (console, lambda *words: started("-m", "torchrl_marl", *words)):
        for trap_of in ("pkgutil", "runpy", "typing"):
            (theirs / f"{trap_of}.py").unlink(missing_ok=True)
        done = way(*words)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1 and "install" in done.stderr
    # A script in this folder would import the file, so it raises.
    for name_of in TRAPS:
        (theirs / f"{name_of}.py").unlink(missing_ok=True)
    (theirs / "script.py").write_text(
        textwrap.dedent(f"""
        from torchrl_marl.envs import make_env
        try:
            make_env("{library}/{name}", num_envs=2)
        except Exception as error:
            print(type(error).__name__, error)
        """)
    )
    done = started("script.py")
    assert f"TrustError '{theirs / package}.py' would be imported as the package" in done.stdout


def test_installed_packages_are_accepted_as_libraries(tmp_path, monkeypatch):
    """Also where the current folder is a checkout that is installed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "isaac_of_mine.py").write_text("")
    check_not_in_current_folder("isaac_of_mine")  # it is not on the path
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(TrustError, match="isaac_of_mine.*rename it"):
        check_not_in_current_folder("isaac_of_mine")
    with trusting():
        check_not_in_current_folder("isaac_of_mine")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_not_in_current_folder("isaac_of_mine")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", [*sys.path[1:], str(tmp_path)])  # as a .pth file has it
    check_not_in_current_folder("isaac_of_mine")
    assert child_path() == sys.path


def test_current_folder_is_last_in_path_of_child_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rest = ["/usr/lib/python", "/usr/lib/site-packages"]
    for front in (["", *rest], [str(tmp_path), *rest], [rest[0], "", rest[1]]):
        monkeypatch.setattr(sys, "path", front)
        assert child_path() == [*rest, str(tmp_path)]
    monkeypatch.setattr(sys, "path", rest)
    assert child_path() == rest
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *rest])
    assert child_path() == sys.path
    monkeypatch.setenv("PYTHONPATH", ":/other")
    monkeypatch.setattr(sys, "path", ["/bin", str(tmp_path), "/other", *rest])
    remove_current_folder()
    assert sys.path == ["/bin", "/other", *rest]


# ----------------------------------------------------------------------------- user environments


MEADOW = """
from mpe2.simple_speaker_listener_v4 import parallel_env as environment

def parallel_env(**settings):
    import meadow_of_grass  # a neighbour, later
    return environment(**settings)
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", ["own", "pettingzoo"])
def test_user_environments_are_found_in_current_folder(tmp_path, monkeypatch, world, workers):
    pytest.importorskip("mpe2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fields").mkdir()
    (tmp_path / "fields" / "meadow_v1.py").write_text(MEADOW)
    (tmp_path / "my_meadow.py").write_text(MEADOW)
    (tmp_path / "meadow_of_grass.py").touch()
    named = {
        "own": ["env.library=my_meadow:parallel_env", "env.name=x"],
        "pettingzoo": ["env.library=pettingzoo", "env.name=fields/meadow_v1"],
    }
    words = ["toy_arena_mappo", *named[world], f"env.workers={workers}", *SMALL]
    for i, way in enumerate((console, lambda *words: started("-m", "torchrl_marl", *words))):
        done = way("train", *words, f"folder=run{i}")
        assert done.returncode == 0, done.stderr
        done = way("evaluate", f"run{i}", "--episodes", "2")
        assert done.returncode == 0, done.stderr


def test_current_folder_leaves_path_unless_a_module_came_from_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with current_folder("colorsys"):
        assert sys.path[-1] == str(tmp_path)
        __import__("colorsys")
    assert sys.path == before
    (tmp_path / "own_meadow.py").touch()
    with current_folder("own_meadow", first=True):
        assert sys.path[0] == str(tmp_path)
        __import__("own_meadow")
    assert sys.path == [*before, str(tmp_path)]
    sys.path.remove(str(tmp_path))
    del sys.modules["own_meadow"]
