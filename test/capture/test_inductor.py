"""The faster index analysis of the compiler: the same code, and no state left changed."""

import gc

import pytest
import torch
from torch._inductor import sizevars
from torch._inductor.utils import run_and_get_code, sympy_index_symbol
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from torchrl_marl.capture import inductor, trace

pytestmark = pytest.mark.compiled


def _step(x, y):
    columns = [c * (i + 1) for i, c in enumerate(x.unbind(1))]
    stacked = torch.stack([*columns, y.sum(1)], -1).t()
    return (stacked.flip(0)[..., ::2].reshape(-1, 2) + 1).cumsum(0)


def _code() -> tuple[str, torch.Tensor]:
    x, y = torch.arange(120.0).view(40, 3), torch.ones(40, 5)
    module = trace(_step, x, y).module
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        (run, _), codes = run_and_get_code(inductor.compile_module, module, [x, y])
        lines = [line for code in codes for line in code.splitlines() if "AOT ID" not in line]
        return "\n".join(lines), run(x, y)[0]


def test_quick_index_analysis_gives_the_same_code(monkeypatch):
    quick, found = _code()
    monkeypatch.setattr(inductor, "_quick", lambda name, general: general)
    slow, expected = _code()
    assert "at::vec" in quick and quick == slow
    assert torch.equal(found, expected)


OF_THIS_VERSION = pytest.mark.skipif(
    not hasattr(sizevars, "stride_at"), reason="another version of torch has other functions"
)


@OF_THIS_VERSION
@pytest.mark.parametrize("length", [4, 16])
def test_quick_index_analysis_matches_general_analysis(length):
    x, y = sympy_index_symbol("x0"), sympy_index_symbol("x1")
    indices = [x, y, 64 * x + y, 3 * x + 3 * y + 5, x * 0 + 7, FloorDiv(x, 16) + y]
    indices += [ModularIndexing(x, 1, 32) + 2 * x, x * y]
    for index in indices:
        for name, arguments in (("stride_at", ()), ("simplify_index_in_vec_range", (length,))):
            general = getattr(sizevars, name)
            expected = general(index, x, *arguments)
            found = inductor._quick(name, general)(index, x, *arguments)
            assert (found - expected).expand() == 0, (name, index)


@OF_THIS_VERSION
def test_failed_compilation_restores_gc_and_compiler(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no compiler")

    before = sizevars.stride_at
    monkeypatch.setattr(torch._inductor, "compile", fail)
    with pytest.raises(RuntimeError, match="no compiler"):
        inductor.compile_module(trace(torch.sin, torch.ones(2)).module, [torch.ones(2)])
    assert gc.isenabled() and sizevars.stride_at is before
