"""Carts whose observations show the executed actions, to check delays and noise exactly."""

import torch
from torchrl.data import Bounded, Unbounded

from torchrl_marl.envs import MarlEnv
from torchrl_marl.specs import AgentSpec

N = 2


class Carts(MarlEnv):
    """Two carts; each observes the number of steps, the executed action, and its speed.

    Env i ends after ``lengths[i]`` steps. ``acts`` is the mask of each step; the observation of a
    masked agent is NaN.
    """

    def __init__(self, num_envs, lengths=None, acts=None, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.register_agent(AgentSpec("cart", N, Unbounded((3,)), Bounded(-9, 9, (1,))))
        self.register_domain_parameter("mass", 1.0, (N,))
        self.register_domain_parameter("friction", 0.5)
        self.lengths = torch.tensor(lengths or [10**6]).expand(num_envs).clone()
        self.acts = None if acts is None else torch.tensor(acts, dtype=torch.bool)

    def _reset(self, tensordict):
        self.step_number = torch.zeros(self.num_envs, dtype=torch.int64)
        self.speed = torch.zeros(self.num_envs, N, 1)
        self.executed = torch.zeros(self.num_envs, N, 1)
        return {"cart": self._output()}

    def _step(self, tensordict):
        domain = self.domain_parameters
        self.step_number = self.step_number + 1
        self.executed = tensordict["cart", "action"]
        force = self.executed - domain["friction"].view(-1, 1, 1) * self.speed
        self.speed = self.speed + 0.1 * force / domain["mass"].unsqueeze(-1)
        over = (self.step_number >= self.lengths).unsqueeze(-1)
        return {"cart": {**self._output(), "reward": -self.speed.abs()}, "truncated": over}

    def _output(self):
        steps = self.step_number.view(-1, 1, 1).expand(-1, N, 1).float()
        observation = torch.cat([steps, self.executed, self.speed], -1)
        if self.acts is None:
            return {"observation": observation}
        mask = self.acts[self.step_number.clamp(max=len(self.acts) - 1)]
        return {
            "observation": observation.masked_fill(~mask.unsqueeze(-1), torch.nan),
            "mask": mask,
        }


def rollout_with_forces(env, n_steps, forces=None):
    """A rollout with the given forces, one per step, or with 1, 2, 3, ..."""
    numbers = torch.arange(1.0, n_steps + 1) if forces is None else torch.as_tensor(forces)

    def policy(td):
        size = (*env.batch_size, N, 1)
        force = numbers[policy.step].expand(size)
        policy.step += 1
        return td.set(("cart", "action"), force)

    policy.step = 0
    return env.rollout(n_steps, policy, break_when_any_done=False)
