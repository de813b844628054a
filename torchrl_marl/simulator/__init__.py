"""Access to other libraries' simulators: state, step as a pure function, new initial states."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.simulator.captured import CapturedSimulator
    from torchrl_marl.simulator.state import SimulatorState
    from torchrl_marl.simulator.step_graphs import StepGraphs

__getattr__, __dir__, __all__ = attach(__name__)
