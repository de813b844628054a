"""Module stacks: the modules of many agents as one module.

``building`` makes them, ``module_stack`` is the module, ``windows`` are views of some agents,
``tensordict_module`` reads and writes TensorDicts. Below: ``members`` finds distinct modules,
``storage`` holds their parameters, ``batching`` groups agents into calls, ``execution`` chooses how
a structure runs, ``matmul`` and ``gradient`` run perceptrons.
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.modules.stacks.members import StackMember, StackModule, StackSelection
    from torchrl_marl.modules.stacks.module_stack import ModuleStack, cat, expand, stack

__getattr__, __dir__, __all__ = attach(__name__)
