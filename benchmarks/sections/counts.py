"""Counting what a piece of work asks of a device: kernels, waits, copies."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def count(run: Callable[[], Any], device: str) -> dict[str, str]:
    """Column -> text: kernels and waits of one call.

    On a GPU both are those that its profiler saw. On a CPU, kernels are operations that torch
    dispatches, views left out, and those of the compiled programs; a wait is a value read off a
    tensor, a mask turned into indices, or a number made a tensor: each makes a GPU's host wait.
    """
    run()
    found = _profiled(run) if device == "cuda" else _dispatched(run)
    return {name: f"{number:,}" for name, number in found.items()}


def _dispatched(run: Callable[[], Any]) -> dict[str, int]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.split("::")[-1]
            if _waits(name, args):
                counts["waits"] += 1
            if not func.is_view and name not in ("detach", "_local_scalar_dense", "lift_fresh"):
                counts["kernels"] += 1
            return func(*args, **(kwargs or {}))

    def _waits(name: str, args: tuple[Any, ...]) -> bool:
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "equal"):
            return True
        if name != "index":
            return False
        return any(i is not None and i.dtype == torch.bool for i in args[1])

    with _programs() as programs, Counting():
        run()
    compiled = sum(program.n_kernels for program in programs)
    return {"kernels": counts["kernels"] + compiled, "waits": counts["waits"]}


@contextlib.contextmanager
def _programs() -> Iterator[list[Any]]:
    """The compiled programs that run, once for each time."""
    from torchrl_marl.capture.program import Program

    ran: list[Any] = []
    flat = Program.flat

    def noted(self: Program, leaves: Any) -> Any:
        ran.append(self)
        return flat(self, leaves)

    with mock.patch.object(Program, "flat", noted):
        yield ran


def _profiled(run: Callable[[], Any]) -> dict[str, int]:
    """What the profiler sees of a call, less what it sees of itself."""
    events, overhead = _events(run), _events(lambda: None)
    return {name: events[name] - overhead[name] for name in ("kernels", "waits")}


def _events(run: Callable[[], Any]) -> dict[str, int]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
    events = profiler.events()
    on_device = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in on_device if not name.startswith(("Memcpy", "Memset"))]
    return {"kernels": len(kernels), "waits": sum(e.name in WAITS for e in events)}
