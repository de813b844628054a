"""An environment with image observations: two guards who each see a light."""

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical

from torchrl_marl import AgentSpec
from torchrl_marl.envs import MarlEnv


class Spotlights(MarlEnv):
    """Every agent sees a light in one quarter of its image; naming the quarter earns 1."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        bytes_ = Bounded(0, 255, (6, 6, 1), dtype=torch.uint8)
        self.register_agent(AgentSpec("guard", 2, bytes_, Categorical(4)), group="guards")

    def _reset(self, tensordict):
        return self._observe()

    def _step(self, tensordict):
        right = tensordict["guards", "action"] == self.quarter
        out = self._observe()
        out["guards", "reward"] = right.float().unsqueeze(-1)
        out["terminated"] = torch.ones(self.num_envs, 1, dtype=torch.bool)
        return out

    def _observe(self):
        shape = (self.num_envs, 2)
        self.quarter = torch.randint(4, shape)
        place = torch.randint(2, (2, *shape)) + 3 * torch.stack(
            [self.quarter // 2, self.quarter % 2]
        )
        picture = torch.randint(100, (*shape, 6, 6, 1), dtype=torch.uint8)
        env, agent = torch.arange(self.num_envs).unsqueeze(-1), torch.arange(2)
        picture[env, agent, place[0], place[1], 0] = 255
        return TensorDict({"guards": TensorDict({"observation": picture}, shape)}, [self.num_envs])
