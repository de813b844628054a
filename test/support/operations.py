"""Counting tensor operations."""

from torch.utils._python_dispatch import TorchDispatchMode


class CountOperations(TorchDispatchMode):
    """Counts the tensor operations that run inside the context."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))
