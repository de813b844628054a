"""Windows on some agents of a module stack.

Shapes: B any batch dims, n selected agents, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_marl.modules.stacks.members import StackPart
from torchrl_marl.modules.stacks.tensordict_module import StackModule

if TYPE_CHECKING:
    from torchrl_marl.modules.stacks.module_stack import ModuleStack

__all__ = ["StackMember", "StackSelection", "Window"]


class Window(StackPart):
    """A view of some agents of a stack: shares storage and gradients, owns no parameter.

    Args:
        stack (ModuleStack): the stack.
        agents (sequence of int): which.
    """

    def __init__(self, stack: ModuleStack, agents: Sequence[int]) -> None:
        super().__init__()
        self.agents = tuple(agents)
        self.__dict__["stack"] = stack  # hidden: parameters() of a window is empty
        self.event_dims = stack.event_dims


class StackMember(Window):
    """``stack[i]``: calls one agent's member; a gradient arrives in the stack.

    Examples:
        >>> from torchrl_marl.modules import ModuleStack
        >>> policy = ModuleStack([nn.Linear(4, 2), nn.Linear(4, 2)], index=[0, 1])
        >>> policy[0](torch.randn(5, 4)).shape, list(policy[0].parameters())
        (torch.Size([5, 2]), [])
    """

    single = True

    def __init__(self, stack: ModuleStack, agent: int) -> None:
        super().__init__(stack, [agent])

    def forward(self, *inputs: Any) -> Any:
        """Runs the agent."""
        bucket, k = self.stack.bucket(self.agents[0])
        return bucket.call(k, *inputs)

    def row(self) -> dict[str, Tensor]:
        """Returns name -> parameter or buffer, views on the stack's."""
        bucket, k = self.stack.bucket(self.agents[0])
        return bucket.row(k)

    def detach(self) -> nn.Module:
        """Returns an ordinary module with copies of the parameters, to save or to train apart."""
        return self.stack.copy_of(self.agents[0])


class StackSelection(Window):
    """``stack[1:3]``, ``stack[[0, 2]]``: calls some agents; a gradient arrives in the stack.

    Examples:
        >>> from torchrl_marl.modules import ModuleStack
        >>> policy = ModuleStack([nn.Linear(4, 2), nn.Linear(4, 2)], index=[0, 1, 0])
        >>> policy[1:](torch.randn(5, 2, 4)).shape
        torch.Size([5, 2, 2])
    """

    def __init__(self, stack: ModuleStack, agents: Sequence[int]) -> None:
        if not agents:
            raise IndexError(f"no agent of a stack of {len(stack)} is selected.")
        super().__init__(stack, agents)
        self.batching = stack.route(self.agents)

    def forward(self, *inputs: Any) -> Any:
        """Runs the agents."""
        if len(inputs) == 1 and isinstance(inputs[0], TensorDictBase):
            return StackModule(self, *self.stack.keys)(inputs[0])
        return self.batching(self.stack.buckets, inputs)  # type: ignore[arg-type]

    @property
    def shape(self) -> torch.Size:
        """``[n]``."""
        return torch.Size([len(self.agents)])

    def __len__(self) -> int:
        return len(self.agents)

    def __getitem__(self, agents: int | slice | Sequence[int]) -> StackMember | StackSelection:
        if isinstance(agents, int):
            return self.stack[self.agents[agents]]
        if isinstance(agents, slice):
            return self.stack[self.agents[agents]]
        return self.stack[[self.agents[agent] for agent in agents]]

    def __iter__(self) -> Iterator[StackMember]:
        return (StackMember(self.stack, agent) for agent in self.agents)

    def detach(self) -> ModuleStack:
        """Returns a stack of copies."""
        return self.stack.select(self.agents)
