"""A small environment with two kinds of agents and communication.

Shapes: E envs, K landmarks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.nn.functional import one_hot
from torchrl.data import Bounded, Categorical, Unbounded

from torchrl_marl.envs.marl_env import MarlEnv
from torchrl_marl.envs.scene import Shape, text
from torchrl_marl.envs.toy.scenes import BLUE, GRAY, GREEN, ORANGE, actions_in, names_of
from torchrl_marl.errors import ConfigError
from torchrl_marl.specs import AgentSpec

__all__ = ["SpeakerListener"]


class SpeakerListener(MarlEnv):
    """Environment in which a speaker observes the goal, and a listener must move to the goal.

    The landmarks are random points in a square of side 2, and one of them is the goal. In each step
    the speaker says one of K symbols. The listener starts in the middle, and observes the landmarks
    and the previous symbol. Speaker and listener both earn the negative squared distance between
    listener and goal.

    If the speaker names the goal, and the listener waits one step and then moves straight there,
    both earn ``heuristic_return``, -1.04 in 25 steps. Uniform random actions earn
    ``random_return``, -30.2. Without communication the best return is -11.1, which the listener
    earns at the center of the landmarks.

    Args:
        num_envs (int): number E of parallel envs.

    Keyword Args:
        n_landmarks (int): number K of landmarks and symbols.
        speed (float): largest distance that the listener moves in a step, along each axis.
        continuous_speech (bool): True if a message is K numbers in [-1, 1] instead of a symbol.
        one_group (bool): True to put both kinds into one heterogeneous group ``"team"``. It needs
            ``continuous_speech=True``, because all actions in a group must have the same type.
        max_steps, seed, device, check: as in :class:`MarlEnv`.

    Shapes:
        - ``("speaker", "observation")``: ``[E, 1, K]``, the goal's index, one-hot
        - ``("listener", "observation")``: ``[E, 1, 3 * K]``, positions of the landmarks relative to
          the listener, and the previous message
        - ``"state"``: ``[E, 2 + K]``, position of the goal relative to the listener, and the
          previous message

    Raises:
        ConfigError: an argument is unknown, or arguments are incompatible.

    Reference: Lowe et al., 2017, https://arxiv.org/abs/1706.02275 (section 5.1).

    Examples:
        >>> env = SpeakerListener(4, continuous_speech=True, one_group=True, seed=0)
        >>> env.rollout(5)["team"].unbind(-1)[1]["observation"].shape
        torch.Size([4, 5, 9])
    """

    def __init__(
        self,
        num_envs: int,
        *,
        n_landmarks: int = 3,
        speed: float = 0.25,
        continuous_speech: bool = False,
        one_group: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_envs, **kwargs)
        if one_group and not continuous_speech:
            raise ConfigError("SpeakerListener: one_group=True needs continuous_speech=True.")
        self.k, self.speed, self.one_group = n_landmarks, speed, one_group
        speech = Bounded(-1, 1, (self.k,)) if continuous_speech else Categorical(self.k)
        speaker = AgentSpec("speaker", 1, Unbounded((self.k,)), speech)
        listener = AgentSpec("listener", 1, Unbounded((3 * self.k,)), Bounded(-1, 1, (2,)))
        for spec in (speaker, listener):
            self.register_agent(spec, group="team" if one_group else None)
        self.register_state(Unbounded((2 + self.k,)))

    def _reset(self, tensordict: TensorDictBase | None) -> dict[str, Any]:
        self.landmarks = 2 * torch.rand(self.num_envs, self.k, 2, device=self.device) - 1
        goal = torch.randint(self.k, (self.num_envs,), device=self.device)
        self.goal = one_hot(goal, self.k).float()
        return self._observe(message=torch.zeros_like(self.goal))

    def _step(self, tensordict: TensorDictBase) -> dict[str, Any]:
        actions = self.by_kind(tensordict, "team") if self.one_group else tensordict
        message = actions["speaker"]["action"].squeeze(1)
        message = message if message.is_floating_point() else one_hot(message, self.k).float()
        # The listener is at the origin, so its moves shift everything else.
        self.landmarks = self.landmarks - self.speed * actions["listener"]["action"]
        return self._observe(message, reward=-self._relative_goal.square().sum(-1).view(-1, 1, 1))

    @property
    def _relative_goal(self) -> Tensor:
        """Position of the goal relative to the listener, ``[E, 2]``."""
        return (self.goal.unsqueeze(-1) * self.landmarks).sum(1)

    def _observe(self, message: Tensor, **reward: Tensor) -> dict[str, Any]:
        listener_input = torch.cat([self.landmarks.flatten(1), message], -1)
        inputs = {"speaker": self.goal, "listener": listener_input}
        output: dict[str, Any] = {
            k: {"observation": x[:, None], **reward} for k, x in inputs.items()
        }
        output = {"team": output} if self.one_group else output
        return {**output, "state": torch.cat([self._relative_goal, message], -1)}

    @property
    def heuristic_return(self) -> float:
        """Expected return if the speaker names the goal and the listener moves straight there."""
        moves = range(math.ceil(1 / self.speed) if self.max_steps is None else self.max_steps)
        return -2 / 3 * sum(max(0.0, 1 - t * self.speed) ** 3 for t in moves)

    @property
    def random_return(self) -> float:
        """Expected return of uniform random actions."""
        steps = math.inf if self.max_steps is None else self.max_steps
        return -2 / 3 * (steps + self.speed**2 * steps * (steps + 1) / 2)

    # ------------------------------------------------------------------------------- drawing

    def scene(self, index: int = 0, step: TensorDictBase | None = None) -> list[Shape]:
        """Returns a drawing with the listener at the center and the goal in green."""
        goal = int(self.goal[index].argmax())
        message = actions_in(self, step)[0]
        speaker, listener = names_of(self)
        shapes = [
            Shape(speaker, "agent", "circle", -1.6, 1.6, 0.0, BLUE, 0.14, text="S"),
            Shape(listener, "agent", "circle", 0.0, 0.0, 0.0, ORANGE, 0.1, text="L"),
            text("said", f"says {message}" if message else "", -1.6, 1.3, height=0.14),
        ]
        for i, (x, y) in enumerate(self.landmarks[index].tolist()):
            color = GREEN if i == goal else GRAY
            shapes.append(
                Shape(f"landmark_{i}", "goal", "circle", x, y, 0.0, color, 0.16, text=str(i))
            )
        return shapes
