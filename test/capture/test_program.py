"""Compiled programs: execution "exact" rounds as torch does."""

import torch

from torchrl_marl.capture.program import compile_trace
from torchrl_marl.capture.tracing import trace


def test_exact_programs_match_eager_exactly_after_compile():
    def push(x):
        return torch.linalg.vector_norm(x, dim=-1), torch.logaddexp(torch.zeros(()), x)

    x = 5 * torch.randn(1000, 2)
    found = {}
    for execution in ("compile", "exact"):  # "compile" fills the compiler's cache
        program = compile_trace(trace(push, x), x, name="a push", execution=execution)
        found[execution] = program.flat([x])
    for a, b, expected in zip(found["compile"], found["exact"], push(x)):
        torch.testing.assert_close(a, expected)
        assert torch.equal(b, expected)
