"""Cats and dogs in one group."""

import torch
from tensordict import LazyStackedTensorDict, TensorDict
from torchrl.data import Bounded, Composite, Unbounded

from torchrl_marl.envs import MarlEnv
from torchrl_marl.specs import AgentSpec

CAT = AgentSpec("cat", 2, Unbounded((3,)), Bounded(-1, 1, (2,)))
DOG = AgentSpec("dog", 1, Unbounded((1,)), Bounded(-2, 2, (1,)))


class Pets(MarlEnv):
    """Cats and dogs in one group; step data except observation and reward are scripted."""

    def __init__(self, num_envs=2, script=(), form="by_kind", specs=(CAT, DOG), **kwargs):
        super().__init__(num_envs, **kwargs)
        self.script, self.form, self.pets = list(script), form, specs
        for spec in specs:
            self.register_agent(spec, group="pets")
        self.seen = None

    def _give(self, **extra):
        team = {}
        for spec in self.pets:
            observation_spec = spec.observation_spec
            leaves = (
                observation_spec
                if isinstance(observation_spec, Composite)
                else {"": observation_spec}
            )
            observations = {key: self._count(leaf, spec.n_agents) for key, leaf in leaves.items()}
            team[spec.name] = {"observation": observations.get("", observations)}
        team |= extra
        if self.form == "lazy":
            return {"pets": self._lazy(team)}
        if self.form == "dense":
            kinds = [team.pop(spec.name) for spec in self.pets]
            return {"pets": {k: torch.cat([x[k] for x in kinds], 1) for k in kinds[0]} | team}
        return {"pets": team}

    def _count(self, spec, n_agents):
        count = self.count.view(-1, *[1] * (spec.ndim + 1)).to(spec.dtype)
        return count.expand(self.num_envs, n_agents, *spec.shape).clone()

    def _lazy(self, team):
        rows, start = [], 0
        shared = {key: x for key, x in team.items() if not isinstance(x, dict)}
        for spec in self.pets:
            for i in range(spec.n_agents):
                member = {key: x[:, i] for key, x in team[spec.name].items()}
                member |= {key: x[:, start + i] for key, x in shared.items()}
                rows.append(TensorDict(member, [self.num_envs]))
            start += spec.n_agents
        return LazyStackedTensorDict(*rows, stack_dim=1)

    def _reset(self, tensordict):
        self.count = torch.zeros(self.num_envs, dtype=torch.int64)
        return self._give()

    def _step(self, tensordict):
        self.seen = [tensordict]
        self.count = self.count + 1
        by_kind = self.by_kind(tensordict, "pets")
        earned = [by_kind[spec.name]["action"].float() for spec in self.pets]
        earned = [x.reshape(*x.shape[:2], -1).sum(-1, keepdim=True) for x in earned]
        out = self._give(reward=torch.cat(earned, 1))
        t = int(self.count.max()) - 1
        for key, value in (self.script[t] if t < len(self.script) else {}).items():
            *path, leaf = ("pets", key) if isinstance(key, str) else ("pets", *key)
            holder = out
            for part in path:
                holder = holder[part]
            value = torch.as_tensor(value)
            holder[leaf] = value.expand(self.num_envs, *value.shape).clone()
        return out


def step(env, td=None, action=None):
    td = env.rand_action(env.reset() if td is None else td)
    if action is not None:
        for i, member in enumerate(td["pets"].unbind(1)):
            member["action"] = action[i] if isinstance(action, list) else action
    return env.step(td)
