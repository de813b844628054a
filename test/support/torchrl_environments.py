"""Stand-ins for games that cannot be installed here, below TorchRL's wrappers of them.

The code of the wrappers runs unchanged, except type checks and Melting Pot's reader of DeepMind
specs. Only the simulators are fake, so other behavior of the real games is not tested.
"""

from types import SimpleNamespace

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, MeltingpotWrapper, SMACv2Wrapper, UnityMLAgentsWrapper


class StarCraft:
    """Three units; unit 0 dies in step 2; won in step 6, or truncated in step ``limit``."""

    n_agents, n_actions, n_enemies = 3, 4, 2

    def __init__(self, limit):
        self.limit, self.steps, self.sent = limit, 0, []

    def reset(self):
        self.steps = 0
        return self.get_obs(), self.get_state()

    def step(self, actions):
        for legal, action in zip(self.get_avail_actions(), actions):
            assert legal[int(action)], "Agent 0 cannot perform action 1"
        self.sent.append([int(action) for action in actions])
        self.steps += 1
        timed_out, won = self.steps >= self.limit, self.steps >= 6
        info = {"battle_won": won, "dead_allies": int(self.steps >= 2), "dead_enemies": 0}
        if timed_out and not won:
            info["episode_limit"] = True
        return 0.5 * self.steps, timed_out or won, info

    def get_obs(self):
        return np.full((3, 5), self.steps / 10)

    def get_state(self):
        return np.full(7, self.steps / 10)

    def get_avail_actions(self):
        dead = [1, 0, 0, 0]
        return [dead if i == 0 and self.steps >= 2 else [0, 1, 1, self.steps % 2] for i in range(3)]

    def get_obs_size(self):
        return 5

    def get_state_size(self):
        return 7

    def close(self):
        pass


class Smac(SMACv2Wrapper):
    def _check_kwargs(self, kwargs):
        pass


class Substrate:
    """Two players and episodes of three steps."""

    def reset(self):
        self.steps = 0
        return self.timestep()

    def step(self, actions):
        self.steps += 1
        return self.timestep()

    def timestep(self):
        observation = {
            "RGB": np.full((4, 4, 3), self.steps, np.uint8),
            "READY_TO_SHOOT": np.ones(1),
        }
        observation["WORLD.RGB"] = np.zeros((6, 6, 3), np.uint8)
        reward = [np.float64(self.steps), np.float64(-self.steps)]
        return SimpleNamespace(
            observation=[observation] * 2, reward=reward, last=lambda: self.steps >= 3
        )

    def close(self):
        pass


class MeltingPot(MeltingpotWrapper):
    def _check_kwargs(self, kwargs):
        pass

    def _make_specs(self, env):
        self.agent_names = ["player_0", "player_1"]
        self.agent_names_to_indices_map = {"player_0": 0, "player_1": 1}
        self._make_group_map()
        picture = Unbounded((4, 4, 3), dtype=torch.uint8)
        player_spec = Composite(RGB=picture, READY_TO_SHOOT=Unbounded((1,), dtype=torch.float64))
        specs = {
            "observation": Composite(observation=player_spec),
            "action": Composite(action=Categorical(5)),
            "reward": Composite(reward=Unbounded((1,), dtype=torch.float64)),
        }
        specs = {key: torch.stack([spec, spec.clone()], 0) for key, spec in specs.items()}
        picture_spec = Unbounded((6, 6, 3), dtype=torch.uint8)
        self.done_spec = Composite(done=Categorical(2, shape=(1,), dtype=torch.bool))
        self.action_spec = Composite(agents=specs["action"])
        self.observation_spec = Composite(agents=specs["observation"], RGB=picture_spec)
        self.reward_spec = Composite(agents=specs["reward"])


class Engine:
    """Two agents; agent 0 ends in step 2, agent 1 in step 4, truncated if ``late``."""

    def __init__(self, late, branches=(3,), continuous=0):
        spec = SimpleNamespace(discrete_branches=branches, continuous_size=continuous)
        sight = [SimpleNamespace(name="", shape=(2,))]
        behavior = SimpleNamespace(action_spec=spec, observation_specs=sight)
        self.behavior_specs, self.late, self.sent = {"Walk": behavior}, late, []
        self.branches = branches

    def reset(self):
        self.steps, self.actions = 0, {}

    def set_action_for_agent(self, behavior, agent, action):
        self.actions[agent] = action

    def step(self):
        self.steps += 1
        self.sent.append(self.actions)
        self.actions = {}

    def get_steps(self, behavior):
        return self.of([i for i in (0, 1) if self.steps < (2, 4)[i]]), self.of(
            [i for i in (0, 1) if self.steps == (2, 4)[i]]
        )

    def of(self, agents):
        n = len(agents)
        no = [np.zeros((n, b), bool) for b in self.branches]
        if len(self.branches) == 1 and n:
            no[0][:, 2] = True  # the third choice is never legal
        return SimpleNamespace(
            agent_id=agents,
            group_id=[0] * n,
            obs=[np.full((n, 2), self.steps, np.float32)],
            reward=np.ones(n, np.float32),
            group_reward=np.full(n, 0.5, np.float32),
            interrupted=[self.late] * n,
            action_mask=no or None,
        )

    def close(self):
        pass


class ActionTuple:
    def add_discrete(self, action):
        self.value = action

    add_continuous = add_discrete


class Unity(UnityMLAgentsWrapper):
    lib = SimpleNamespace(base_env=SimpleNamespace(ActionTuple=ActionTuple))

    def _check_kwargs(self, kwargs):
        pass


class Crew(EnvBase):
    """Done flags of agents only: agent i ends in step i + 2, truncated if ``late``."""

    def __init__(self, late=False, batch_size=(3,)):
        super().__init__(batch_size=torch.Size(batch_size))
        self.late, n = late, (*batch_size, 2)
        self.group_map = {"crew": ["ann", "bob"]}
        self.observation_spec = self.of(observation=Unbounded((*n, 1)))
        self.action_spec = self.of(action=Unbounded((*n, 1)))
        self.reward_spec = self.of(reward=Unbounded((*n, 1)))
        flag = Categorical(2, shape=(*n, 1), dtype=torch.bool)
        flags = {key: flag.clone() for key in ("done", "terminated", "truncated")}
        self.done_spec = self.of(**flags)
        self.steps = torch.zeros(*batch_size, 1, 1)
        self.sent = []

    def of(self, **specs):
        crew = Composite(specs, shape=(*self.batch_size, 2))
        return Composite(crew=crew, shape=self.batch_size)

    def _set_seed(self, seed):
        pass

    def _reset(self, tensordict=None, **kwargs):
        restarted = None if tensordict is None else tensordict.get(("crew", "_reset"), None)
        all_envs = torch.ones_like(self.steps, dtype=torch.bool)
        restarted = all_envs if restarted is None else restarted.all(-2, keepdim=True)
        self.steps = torch.where(restarted, 0, self.steps)
        return self.give()

    def _step(self, tensordict):
        self.sent.append(tensordict["crew", "action"].clone())
        self.steps = self.steps + 1
        out = self.give()
        out["crew", "reward"] = torch.ones(*self.batch_size, 2, 1)
        return out

    def give(self):
        over = self.steps >= torch.tensor([[2.0], [3.0]])
        crew = {
            "observation": self.steps.expand(*self.batch_size, 2, 1).clone(),
            "done": over,
            "terminated": over & (not self.late),
            "truncated": over & self.late,
        }
        td = TensorDict({"crew": crew}, self.batch_size)
        td["crew"].batch_size = (*self.batch_size, 2)
        return td
