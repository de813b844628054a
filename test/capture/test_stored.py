"""Compiled graphs on disk: loading, keys, and recompilation of damaged ones."""

import inspect
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch

from torchrl_marl.capture import capture, inductor, stored, trace
from torchrl_marl.errors import WriteError

FOLDER = stored._cache_folder


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(inductor, "_LARGE", 0)
    monkeypatch.setattr(stored, "_cache_folder", lambda: tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    """Compiled libraries by code and input shapes, to compile each only once."""
    return {}, tmp_path_factory.mktemp("libraries")


@pytest.fixture
def compiled(monkeypatch, libraries):
    """Names of graphs that were compiled instead of loaded."""
    found, compile, (known, place) = [], stored._compile_graph, libraries

    def compile_once(module, inputs, options, folder):
        found.append(folder.name)
        made_of = module.code, tuple(x.shape for x in inputs)
        if made_of not in known:
            compile(module, inputs, options, folder)
            known[made_of] = shutil.copytree(folder, place / folder.name)
        else:
            shutil.copytree(known[made_of], folder)

    monkeypatch.setattr(stored, "_compile_graph", compile_once)
    return found


def update(x, total):
    total.add_(x.sum(0))
    return x * torch.tensor([1.0, 2.0]), total, torch.rand(2) + x[0]


def inputs():
    return torch.arange(6.0).view(3, 2), torch.ones(2)


def run_of(function=update):
    return capture(function, *inputs(), name="a test")


def test_graph_is_compiled_once_and_matches_eager(compiled):
    first, second = run_of(), run_of()
    assert len(compiled) == 1 and first.n_kernels == second.n_kernels > 0
    for run in (first, second):
        x, total = torch.randn(3, 2), torch.zeros(2)
        torch.manual_seed(3)
        found = run(x, total)
        after = torch.zeros(2)
        torch.manual_seed(3)
        again = update(x, after)
        assert all(map(torch.equal, found, again))
        assert torch.equal(total, after) and found[1].data_ptr() == total.data_ptr()


def test_key_depends_on_graph_constants_inputs_options_and_threads():
    def key(*made_of):
        return stored._graph_key(*made_of, stored._describe_machine())

    x, two, three = torch.ones(4, 4), torch.tensor(2.0), torch.tensor(3.0)
    module, other = trace(lambda x: x + 1, x).module, trace(lambda x: x + 2, x).module
    keys = [
        key(module, [x], [], {}),
        key(other, [x], [], {}),
        key(module, [x.t()], [], {}),
        key(module, [x.double()], [], {}),
        key(module, [x, two], [two], {}),
        key(module, [x, three], [three], {}),
        key(module, [x], [], {"fallback_random": True}),
    ]
    assert key(module, [x + 1], [], {}) == keys[0]
    torch.set_num_threads(2)
    keys.append(key(module, [x], [], {}))
    assert len(set(keys)) == len(keys)


@pytest.mark.compiled
def test_graphs_with_different_constants_are_compiled_separately(compiled):
    added = [run_of(lambda x, y, c=c: x + torch.tensor([1.0, c])) for c in (2.0, 3.0)]
    assert [run(*inputs())[0, 1].item() for run in added] == [3.0, 4.0]
    assert len(compiled) == 2


@pytest.mark.compiled
def test_damaged_graph_is_recompiled(folder, compiled):
    run_of()
    (whole,) = folder.iterdir()
    for file in ("graph.so", "description.json"):
        copy = folder / file
        shutil.copytree(whole, copy)
        assert stored._load_graph(copy) is not None
        data = bytearray((copy / file).read_bytes())
        data[len(data) // 2] ^= 1
        (copy / file).unlink()  # a loaded library is not modified
        (copy / file).write_bytes(data)
        assert stored._load_graph(copy) is None and not copy.exists()
    (whole / "graph.so").unlink()
    assert torch.equal(run_of()(*inputs())[0], update(*inputs())[0])
    assert len(compiled) == 2


def test_unwritable_folder_raises(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(stored, "_cache_folder", lambda: tmp_path / "file" / "graphs")
    monkeypatch.setattr(torch._inductor, "aot_compile", lambda *_, **__: str(tmp_path / "file"))
    with pytest.raises(WriteError, match="TORCHINDUCTOR_CACHE_DIR to a writable folder"):
        run_of()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="folders have no user here")
def test_graphs_in_a_folder_of_another_user_are_not_loaded(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that monkeypatch restores it
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("LOGNAME", "somebody")  # torch names its folder after the user
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = FOLDER()
    (default,) = tmp_path.iterdir()
    assert own == default / "torchrl_marl" / "graphs"

    user, ended = os.getuid(), []
    monkeypatch.setattr(stored.atexit, "register", lambda *given, **_: ended.append(given))
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.warns(UserWarning, match=f"loaded from {str(default)!r} nor kept, since .* user"):
        found = FOLDER()
    private = found.parents[1]
    assert private.parent == tmp_path and private != default
    assert private.stat().st_mode & 0o777 == 0o700
    assert FOLDER() == found  # warns once; torch and other processes use it, too
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(private)
    assert ended == [(shutil.rmtree, str(private))]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "chosen"))
    assert FOLDER() == tmp_path / "chosen" / "torchrl_marl" / "graphs"


@pytest.mark.compiled
def test_loading_a_graph_does_not_import_the_compiler(folder, compiled):
    run_of()
    assert len(compiled) == 1 and "torch._inductor.compile_fx" in sys.modules
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from torchrl_marl.capture import capture, inductor, stored\n"
        "torch.set_num_threads(1)\n"
        "inductor._LARGE = 0\n"
        "stored._cache_folder = lambda: Path(sys.argv[1])\n"
        f"{inspect.getsource(update)}{inspect.getsource(inputs)}{inspect.getsource(run_of)}"
        "assert torch.equal(run_of()(*inputs())[0], update(*inputs())[0])\n"
        "print('torch._inductor.compile_fx' in sys.modules, "
        "len(list(stored._cache_folder().iterdir())))"
    )
    command = [sys.executable, "-c", script, str(folder)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert ended.stdout.split() == ["False", "1"]
