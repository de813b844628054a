"""GPU kernels against PyTorch: on a GPU, or without one in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from torchrl_marl import functional
from torchrl_marl.functional import kernels

GAMMA, LMBDA = 0.9, 0.8
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# (batch dims, T, N): more rows than a block, fewer, and a last block that is not full
SIZES = [((3, 5), 1, 1), ((33,), 2, 3), ((), 17, 3), ((7,), 17, 5), ((2,), 100, 2)]


def draw(batch, n_steps, n_agents, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, n_steps, n_agents, 1)
    reward, value, next_value = (torch.randn(shape, generator=generator) for _ in range(3))
    done = torch.rand(shape, generator=generator) < 0.2
    terminated = done & (torch.rand(shape, generator=generator) < 0.5)
    mask = torch.rand(shape, generator=generator) < 0.6
    return [x.to(device) for x in (reward, value, next_value, done, terminated, mask)]


def check(inputs):
    *inputs, drawn = inputs
    for mask in (None, drawn, torch.ones_like(drawn)):
        found = kernels.gae(*inputs, mask, GAMMA, LMBDA)
        cpu = [None if x is None else x.cpu() for x in (*inputs, mask)]
        wanted = functional.gae(*cpu[:5], mask=cpu[5], gamma=GAMMA, lmbda=LMBDA)
        torch.testing.assert_close([x.cpu() for x in found], list(wanted), equal_nan=True)


def check_all(device):
    for seed, size in enumerate(SIZES):
        check(draw(*size, seed, device))
    # Done flags of the team, and memory with time as the first dim.
    reward, value, next_value, *flags = draw((4,), 6, 3, device=device)
    flags = [x[..., :1, :].expand_as(reward) for x in flags]
    by_time = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (reward, value, next_value)]
    check([*by_time, *flags])
    # Masked steps after the end may hold any values.
    reward, value, next_value, done, terminated, mask = draw((4,), 6, 3, device=device)
    done[:, 2:], mask[:, :3], mask[:, 3:] = True, True, False
    for x in (reward, value, next_value):
        x[:, 3:] = float("nan")
    check([reward, value, next_value, done, terminated, mask])
    empty = draw((0,), 3, 2, device=device)
    assert kernels.gae(*empty, GAMMA, LMBDA)[0].shape == (0, 3, 2, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself is tested")
def test_gae_kernel_in_triton_interpreter():
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


@ON_GPU
def test_gae_kernel_on_a_gpu():
    pytest.importorskip("triton")
    check_all("cuda")


@ON_GPU
def test_gae_uses_the_kernel_also_in_a_cuda_graph():
    pytest.importorskip("triton")
    *inputs, mask = draw((64,), 17, 3, device="cuda")
    wanted = functional.gae(*inputs, mask=mask, gamma=GAMMA, lmbda=LMBDA)
    with torch.profiler.profile() as profile:
        functional.gae(*inputs, mask=mask, gamma=GAMMA, lmbda=LMBDA)
    assert "torchrl_marl::gae" in {event.key for event in profile.key_averages()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = functional.gae(*inputs, mask=mask, gamma=GAMMA, lmbda=LMBDA)
    graph.replay()
    torch.testing.assert_close(found, wanted)


def test_cpu_has_no_gae_kernel():
    tensors = draw((2,), 3, 2)[:3]
    assert not kernels.has_gae(*tensors)


def test_gae_op_supports_fake_tensors():
    """Also without Triton: a graph may be traced on a machine without a GPU."""
    fake = torch._subclasses.FakeTensorMode()
    with fake:
        inputs = [torch.empty(4, 3, 2, 1) for _ in range(3)]
        flags = [torch.empty(4, 3, 2, 1, dtype=torch.bool) for _ in range(3)]
        advantage, target = kernels.gae(*inputs, *flags, GAMMA, LMBDA)
    assert advantage.shape == target.shape == (4, 3, 2, 1)
    assert advantage.dtype is target.dtype is torch.float32


if __name__ == "__main__":
    check_all("cpu")
    print("equal")
