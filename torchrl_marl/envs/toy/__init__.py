"""Small environments with known optimal returns. They need no optional package."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.envs.toy.arena import Arena
    from torchrl_marl.envs.toy.echo import Echo
    from torchrl_marl.envs.toy.games import TOY_ENVS, MatrixGame, TwoStepGame, ZeroSum
    from torchrl_marl.envs.toy.kuhn import Kuhn
    from torchrl_marl.envs.toy.leduc import Leduc
    from torchrl_marl.envs.toy.levers import Levers, MatchingLevers
    from torchrl_marl.envs.toy.predator_prey import PredatorPrey
    from torchrl_marl.envs.toy.speaker_listener import SpeakerListener
    from torchrl_marl.envs.toy.traffic_junction import TrafficJunction
    from torchrl_marl.envs.toy.turns import Nim, Paces

__getattr__, __dir__, __all__ = attach(__name__)
