"""Module stacks: the modules of many agents as one module.

``module_stack`` has the stack and its builders. ``members`` finds the distinct modules. It also has
the views of single agents, and the module that reads and writes TensorDicts. ``storage`` holds the
parameters. ``batching`` groups agents into calls. ``matmul`` runs perceptrons.
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.modules.stacks.members import StackMember, StackModule, StackSelection
    from torchrl_marl.modules.stacks.module_stack import ModuleStack, cat, expand, stack

__getattr__, __dir__, __all__ = attach(__name__)
