"""A deterministic environment whose agents die and respawn repeatedly."""

import torch
from torchrl.data import Bounded, Categorical, Unbounded

from torchrl_marl import AgentSpec
from torchrl_marl.envs import MarlEnv


class Cycles(MarlEnv):
    """Agent i lives ``lives[i]`` steps, is dead for ``gap`` steps, and respawns.

    It observes its age, and earns its age plus one. Values of its dead steps are ``poison``.
    """

    respawns = True

    def __init__(self, num_envs, lives=(3, 5), gap=2, poison=0.0, continuous=False, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.lives, self.gap, self.poison = torch.tensor(lives), gap, poison
        action = Bounded(-1, 1, (1,)) if continuous else Categorical(2)
        self.register_agent(AgentSpec("cat", len(lives), Unbounded((2,)), action))

    @property
    def age(self):
        return self.clock % (self.lives + self.gap)

    @property
    def alive(self):
        return self.age < self.lives

    def _reset(self, tensordict):
        self.clock = torch.zeros(self.num_envs, 1, dtype=torch.long)
        return self._observe()

    def _step(self, tensordict):
        earned = self._or_poison(self.age + 1.0).unsqueeze(-1)
        self.clock = self.clock + 1
        return self._observe(reward=earned, terminated=~self.alive.unsqueeze(-1))

    def _observe(self, **leaves):
        age = self._or_poison(self.age / 10)
        return {
            "cat": {"observation": torch.stack([age, 1 - age], -1), "mask": self.alive, **leaves}
        }

    def _or_poison(self, value):
        return torch.where(self.alive, value, self.poison)
