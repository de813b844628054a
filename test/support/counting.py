"""A small environment with scripted flags."""

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Unbounded
from torchrl.envs.utils import step_mdp

from torchrl_marl.envs import MarlEnv
from torchrl_marl.specs import AgentSpec


class Counting(MarlEnv):
    """Two groups; all step data except observation and reward are scripted."""

    def __init__(self, num_envs=2, script=(), **kwargs):
        super().__init__(num_envs, **kwargs)
        self.script = list(script)
        self.register_agent(AgentSpec("cat", 2, Unbounded((3,)), Bounded(-1, 1, (2,))), "cats")
        self.register_agent(AgentSpec("dog", 1, Unbounded((1,)), Categorical(3)))
        self.seen = None

    def _observe(self):
        count = self.count.view(-1, 1, 1).float()
        return TensorDict(
            {
                "cats": {"observation": count.repeat(1, 2, 3)},
                "dog": {"observation": count.clone()},
            }
        )

    def _reset(self, tensordict):
        self.count = torch.zeros(self.num_envs, dtype=torch.int64)
        return self._observe()

    def _step(self, tensordict):
        self.seen = [tensordict]
        self.count = self.count + 1
        out = self._observe()
        out["cats", "reward"] = tensordict["cats", "action"].sum(-1, keepdim=True)
        out["dog", "reward"] = torch.ones(self.num_envs, 1, 1)
        t = int(self.count.max()) - 1
        for key, value in (self.script[t] if t < len(self.script) else {}).items():
            value = torch.as_tensor(value)
            out[key] = value.expand(self.num_envs, *value.shape).clone()
        return out


def play(env, n, action=None):
    td = env.reset()
    for _ in range(n):
        td = env.rand_action(td) if action is None else td.update(action)
        td = env.step(td)
        yield td
        td = step_mdp(td)


def counting_with(changes, remove=()):
    class Wrong(Counting):
        def _step(self, tensordict):
            out = super()._step(tensordict)
            for key in remove:
                del out[key]
            for key, value in changes.items():
                out[key] = value
            return out

    return Wrong()
