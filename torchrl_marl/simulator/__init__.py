"""Access to other libraries' simulators: their state, steps as pure functions, and resets."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.simulator.captured import CapturedSimulator
    from torchrl_marl.simulator.state import SimulatorState
    from torchrl_marl.simulator.step_graphs import StepGraphs

__getattr__, __dir__, __all__ = attach(__name__)
