"""Operations that count as synchronizations with a GPU, and those that do not."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torchrl_marl.capture import count_syncs, graph_syncs, trace
from torchrl_marl.capture.syncs import Sync, Syncs
from torchrl_marl.errors import CaptureError

X = torch.arange(12.0).view(4, 3)
MASK = X > 5
PLACES = torch.tensor([0, 1])

WAITS = {
    "item": lambda: X[0, 0].item(),
    "float": lambda: float(X[0, 0]),
    "bool": lambda: bool(MASK.any()),
    "if": lambda: 1 if MASK.any() else 0,
    "in": lambda: 0.5 in X,
    "equal": lambda: torch.equal(X, X),
    "nonzero": lambda: MASK.nonzero(),
    "where": lambda: torch.where(MASK),
    "masked_select": lambda: X.masked_select(MASK),
    "read by a mask": lambda: X[MASK],
    "write by a mask": lambda: X.clone().__setitem__(MASK, torch.ones(())),
    "index_put": lambda: X.clone().index_put_((MASK,), torch.zeros(())),
    "unique": lambda: PLACES.unique(),
    "repeat_interleave": lambda: PLACES.repeat_interleave(PLACES),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "cpu": lambda: X.cpu(),
    "inv": lambda: torch.linalg.inv(torch.eye(2)),
}
UPLOADS = {
    "tensor": lambda: torch.tensor([1.0, 2.0]),
    "a number": lambda: torch.tensor(1.0),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "from_numpy": lambda: torch.from_numpy(np.ones(2)),
    "new_tensor": lambda: X.new_tensor([1.0]),
    "list as index": lambda: X[[0, 1]],
    "write to a list": lambda: X.clone().__setitem__([0, 1], torch.ones(2, 3)),
}
NEITHER = {
    "arithmetic": lambda: X * 2 + 1.0,
    "integer index": lambda: X[PLACES, 0],
    "write a number": lambda: X.clone().__setitem__(0, 1.0),
    "write a number by a mask": lambda: X.clone().__setitem__(MASK, 1.0),
    "where": lambda: torch.where(MASK, X, 0.0),
    "full": lambda: torch.full((2,), 1.0),
    "randperm": lambda: torch.randperm(4),
    "repeat_interleave": lambda: PLACES.repeat_interleave(PLACES, output_size=1),
    "copy": lambda: torch.empty(4, 3).copy_(X),
    "dtype": lambda: X.to(torch.float64),
}


@pytest.mark.parametrize("run", WAITS.values(), ids=WAITS)
def test_operations_that_wait_are_counted(run):
    with count_syncs() as syncs:
        run()
    assert (syncs.n_waits, syncs.n_uploads) == (1, 0), str(syncs)


@pytest.mark.parametrize("run", UPLOADS.values(), ids=UPLOADS)
def test_uploads_are_counted(run):
    with count_syncs() as syncs:
        run()
    assert (syncs.n_waits, syncs.n_uploads) == (0, 1), str(syncs)


@pytest.mark.parametrize("run", NEITHER.values(), ids=NEITHER)
def test_other_operations_are_not_counted(run):
    with count_syncs() as syncs:
        run()
    assert syncs == []


def test_copies_between_devices_are_uploads():
    on_meta = torch.empty(3, device="meta")
    with count_syncs() as syncs:
        torch.ones(3).to("meta")
        on_meta.copy_(torch.ones(3))
    assert [sync.kind for sync in syncs] == ["upload", "upload"]


def test_summary_has_counts_and_source_lines():
    with count_syncs() as syncs:
        for _ in range(3):
            X[0, 0].item()
        X.tolist()
    first, second = str(syncs).splitlines()
    assert first.startswith("3 x wait, aten._local_scalar_dense.default at capture/test_syncs.py:")
    assert first.endswith("X[0, 0].item()")
    assert second.startswith("1 x wait, Tensor.tolist at ")


def test_nothing_is_counted_after_the_context():
    with count_syncs() as syncs:
        pass
    X[0, 0].item()
    assert syncs == []


def test_strict_raises_at_the_first_sync():
    with pytest.raises(CaptureError, match=r"_local_scalar_dense.*test_syncs.py:\d+"):
        with count_syncs(strict=True):
            bool(MASK.any())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_strict_uses_the_sync_debug_mode_of_cuda():
    x = torch.ones(3, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    with count_syncs(strict=True):
        x + 1
    with pytest.raises((CaptureError, RuntimeError)), count_syncs(strict=True):
        x.sum().item()
    assert torch.cuda.get_sync_debug_mode() == before


# ------------------------------------------------------------------------------------ graphs


def test_syncs_of_a_make_fx_graph():
    module = make_fx(lambda x: (x[x > 5], x.to("meta"), x[torch.tensor([0])], x + 1))(X)
    kinds = [(sync.kind, sync.operation) for sync in graph_syncs(module)]
    assert kinds == [("wait", "aten.index.Tensor"), ("upload", "aten._to_copy.default")]


def test_traced_masked_write_has_no_syncs():
    def step(x, y):
        x = x.clone()
        x[y > 5] = 0.0
        return x + torch.tensor([1.0, 2.0, 3.0])

    assert graph_syncs(trace(step, X, X).module) == []


def test_graph_without_metadata_needs_inputs():
    graph = torch.fx.Graph()
    x, places = graph.placeholder("x"), graph.placeholder("places")
    graph.output(graph.call_function(torch.ops.aten.index.Tensor, (x, [places])))
    module = torch.fx.GraphModule({}, graph)
    assert graph_syncs(module, (X, PLACES)) == []
    assert graph_syncs(module, (X, MASK)).n_waits == 1
    with pytest.raises(ValueError, match="has no metadata"):
        graph_syncs(module)


def test_string_of_syncs():
    syncs = Syncs([Sync("wait", "item", "a.py:1"), Sync("upload", "tensor", "a.py:2")] * 2)
    assert str(syncs) == "2 x wait, item at a.py:1\n2 x upload, tensor at a.py:2"
