"""Module stacks: the modules of many agents as one module.

``building`` makes them, ``module_stack`` is what one gets, ``door`` reads and writes TensorDicts.
Below: ``storage`` holds the parameters, ``routing`` brings agents to members, ``execution``
chooses how a structure runs, ``matmul`` and ``gradient`` run perceptrons.
"""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.modules.stacks.building import cat, expand, stack
    from torchrl_marl.modules.stacks.door import StackModule
    from torchrl_marl.modules.stacks.module_stack import ModuleStack, StackMember, StackSelection

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "building": ["cat", "expand", "stack"],
        "door": ["StackModule"],
        "module_stack": ["ModuleStack", "StackMember", "StackSelection"],
    },
)
