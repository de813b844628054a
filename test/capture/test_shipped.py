"""Graphs that are shipped with the package: used by the default recipe, after verification."""

import csv
import os
import subprocess
import sys

import pytest
import torch
from torch import fx

import torchrl_marl
from torchrl_marl.capture import shipped, stored
from torchrl_marl.training import background_compile

# For the processors and the torch release of the shipped graphs; CI has both.
here = pytest.mark.skipif(
    shipped.folder(1) is None or not torch.__version__.startswith("2.13.0"),
    reason="graphs of another processor or of another torch",
)


@here
def test_default_recipe_needs_no_compiler(tmp_path):
    """If this fails, the graphs belong to an earlier recipe or package: run .ci/graphs.py."""
    cache = tmp_path / "cache"
    script = (
        "import sys, torchrl_marl\n"
        "from torchrl_marl.training import background_compile\n"
        "background_compile._start_process = lambda folder: sys.exit('a second process')\n"
        "settings = {'execution': 'compile', 'evaluation': {'episodes': 0}}\n"
        "run = torchrl_marl.train(total_frames=9600, **settings)\n"
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    # Two cores, on which a second process would compile the update. No C++ compiler is found.
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "OMP_NUM_THREADS": "2",
    }
    command = [sys.executable, "-c", script]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split()[-1] == "False"
    assert not list(cache.glob("torchrl_marl/graphs/*"))


@here
@pytest.mark.compiled
def test_shipped_graphs_match_locally_compiled_graphs_exactly(tmp_path, monkeypatch):
    def trained(name):
        return torchrl_marl.train(
            folder=str(tmp_path / name),
            execution="compile",
            total_frames=19_200,
            evaluation={"episodes": 20},
            logging={"progress": False},
        )

    monkeypatch.setattr(stored, "_cache_folder", lambda: tmp_path / "cache")
    brought = trained("brought")
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(stored, "_find_shipped", lambda *_: None)
    monkeypatch.setattr(background_compile, "_is_shipped", lambda config: True)
    own = trained("own")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    ours, theirs = brought.policy.state_dict(), own.policy.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items())
    rows = [metrics_of(tmp_path / name) for name in ("brought", "own")]
    assert rows[0] == rows[1] and len(rows[0]) == 2


def metrics_of(folder):
    """Metrics of each iteration, without times."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    times = {"seconds", "frames_per_second"}
    return [{k: x for k, x in row.items() if k not in times} for row in rows]


def test_shipped_graphs_are_not_used_on_other_machines(monkeypatch):
    known = {"x86-64-v4": "AVX512", "x86-64-v3": "AVX2"}
    for kind, vectors in known.items():
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda x=vectors: x)
        needed = set(shipped.KINDS[kind][1].split())
        monkeypatch.setattr(shipped, "_flags", lambda x=needed: x)
        monkeypatch.setattr(shipped.sys, "platform", "linux")
        assert shipped.folder(1) == shipped.FOLDER / kind
        assert shipped.folder(2) is None
        monkeypatch.setattr(shipped.sys, "platform", "darwin")
        assert shipped.folder(1) is None
        monkeypatch.setattr(shipped.sys, "platform", "linux")
        for missing in needed:
            monkeypatch.setattr(shipped, "_flags", lambda x=needed - {missing}: x)
            assert shipped.folder(1) is None
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert shipped.folder(1) is None


def test_shipped_graphs_contain_no_local_paths():
    libraries = list(shipped.FOLDER.glob("*/*/graph.so"))
    assert len(libraries) == 4
    for library in libraries:
        found = library.read_bytes()
        assert b"cpp_prefix.h" not in found or b"torch/include/torch" in found
        assert b"site-packages" not in found and b"/tmp" not in found


class Compiled(Exception):
    """Raised in place of a compilation."""


@pytest.fixture
def graph(monkeypatch, tmp_path):
    """A graph of two inputs that writes to the second one."""

    class Module(torch.nn.Module):
        def forward(self, x, total):
            return (x * 2 + torch.rand_like(x), total.add_(1))

    def compiled(*_):
        raise Compiled

    monkeypatch.setattr(stored, "_cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(stored, "_compile_graph", compiled)
    monkeypatch.setattr(shipped, "folder", lambda threads: tmp_path)
    return fx.symbolic_trace(Module())


def right(inputs):
    x, total = inputs
    return [x * 2 + torch.rand_like(x), total.add_(1)]


def wrong_result(inputs):
    x, total = inputs
    return [x * 2.01 + torch.rand_like(x), total.add_(1)]


def wrong_write(inputs):
    x, total = inputs
    return [x * 2 + torch.rand_like(x), total + 1]


def wrong_draw(inputs):
    torch.rand(1)
    return right(inputs)


@pytest.mark.parametrize("run", [right, wrong_result, wrong_write, wrong_draw])
def test_shipped_graph_with_wrong_results_is_not_used(monkeypatch, graph, run):
    monkeypatch.setattr(stored, "_read_graph", lambda folder: (run, 3))
    x, total = torch.ones(2), torch.zeros(2)
    before = torch.get_rng_state()
    if run is right:
        found, n_kernels = stored.compile_stored(graph, [x, total], {})
        assert n_kernels == 3 and total.tolist() == [0, 0]
        assert found(x, total)[1] is total and total.tolist() == [1, 1]
    else:
        monkeypatch.setattr(stored, "_load_graph", lambda folder: None)
        with pytest.raises(Compiled):
            stored.compile_stored(graph, [x, total], {})
        assert torch.equal(before, torch.get_rng_state())


def test_damaged_shipped_graph_is_not_deleted(graph, tmp_path):
    x, total = torch.ones(2), torch.zeros(2)
    module, constants = stored._constants_as_inputs(graph)
    key = stored._graph_key(module, [x, total], constants, {}, shipped.machine())
    damaged = tmp_path / key / "description.json"
    damaged.parent.mkdir()
    damaged.write_text('{"kernels": 3, "sha256": "0"}')
    with pytest.raises(Compiled):
        stored.compile_stored(graph, [x, total], {})
    assert damaged.is_file()


def test_copies_keep_the_strides_of_inputs():
    whole = torch.arange(12.0).view(3, 4)
    for x in (whole[:, 1:3], whole[:1].expand(5, 4), whole.t(), whole[2, ::2]):
        copy = shipped._copy(x)
        assert copy.stride() == x.stride() and torch.equal(copy, x)
        assert copy.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
