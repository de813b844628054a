"""Random lives of agents with births, waiting, deaths and time limits, and reference returns.

Expected values are computed per agent and step with Python numbers, from masks, done flags and
rewards.
"""

import random

import torch
from tensordict import TensorDict

FLAGS = ("done", "terminated", "truncated")


def _flags(ended):
    flags = {end: [reason == end for reason in ended] for end in FLAGS[1:]}
    return {"done": [reason is not None for reason in ended]} | flags


class Lives:
    """Simulates envs whose agents are born, wait and end at random.

    Args:
        n_envs, n_agents: numbers of envs and agents.
        seed: seed of all random draws.
        waits: whether agents wait between their turns.
        cuts: whether single agents may be truncated.
        births: whether agents may be born late.
        respawns: whether agents may respawn after their end.
    """

    def __init__(
        self, n_envs, n_agents, seed=0, waits=True, cuts=True, births=True, respawns=False
    ):
        self.random = random.Random(seed)
        self.n_envs, self.n_agents = n_envs, n_agents
        self.waits, self.cuts, self.births, self.respawns = waits, cuts, births, respawns
        self.envs = [self.new_env() for _ in range(n_envs)]

    def new_env(self):
        birth_times = self.random.choices([0, 1, 2, 4], k=self.n_agents)
        if not self.births:
            birth_times = [0] * self.n_agents
        birth_times[self.random.randrange(self.n_agents)] = 0
        env = {"time": 0, "late": birth_times, "ended": [None] * self.n_agents}
        return env | {"acts": self.draw_acting(env)}

    def draw_acting(self, env):
        found = []
        for birth_time, ended in zip(env["late"], env["ended"]):
            turn = env["time"] == birth_time or not self.waits or self.random.random() < 0.6
            found.append(ended is None and env["time"] >= birth_time and turn)
        return found

    def step(self, env):
        """Returns the flags of an environment before and after a step."""
        draw, n = self.random.random, self.n_agents
        born = [env["time"] >= birth_time for birth_time in env["late"]]
        step_flags = {"mask": env["acts"]} | _flags(env["ended"])
        gone = [i for i in range(n) if env["ended"][i] is not None]
        for i in range(n):
            if env["ended"][i] is None and born[i]:
                if draw() < 0.12:
                    env["ended"][i] = "terminated"
                elif self.cuts and draw() < 0.08:
                    env["ended"][i] = "truncated"
        env["time"] += 1
        root = None
        if None not in env["ended"] and not self.respawns:
            root = "truncated" if "truncated" in env["ended"] else "terminated"
        elif draw() < 0.05:
            root = "terminated"
        elif draw() < 0.1:
            root = "truncated"
        back = [i for i in gone if self.respawns and root is None and draw() < 0.3]
        for i in back:
            env["ended"][i] = None
        ended = [root if reason is None else reason for reason in env["ended"]]
        acts = [a and reason is None for a, reason in zip(step_flags["mask"], env["ended"])]
        if root is None:
            acts = env["acts"] = self.draw_acting(env)
            for i in back:
                acts[i] = True
        elif root == "terminated":
            acts = [False] * n
        next_flags, flags = {"mask": acts} | _flags(ended), _flags([root])
        if root is not None:
            env.update(self.new_env())
        return step_flags, next_flags, {key: reason for key, [reason] in flags.items()}

    def batch(self, group, n_steps, features=2):
        """The next steps of all envs, ``[E, T]``, with random rewards and observations."""
        played = [[self.step(env) for _ in range(n_steps)] for env in self.envs]

        def stack(part, leaf):
            return torch.tensor([[step[part][leaf] for step in env] for env in played])

        generator = torch.Generator().manual_seed(self.random.randrange(10**9))
        shape = (self.n_envs, n_steps, self.n_agents)
        observations = torch.randn(2, *shape, features, generator=generator)
        step_data = {"observation": observations[0], "mask": stack(0, "mask")}
        step_data["action"] = torch.randint(2, shape, generator=generator)
        next_data = {"observation": observations[1], "mask": stack(1, "mask")}
        next_data["reward"] = torch.randn(*shape, 1, generator=generator)
        for flag in FLAGS:
            step_data[flag], next_data[flag] = (stack(part, flag).unsqueeze(-1) for part in (0, 1))
        root = {flag: stack(2, flag).unsqueeze(-1) for flag in FLAGS}
        begin = {flag: torch.zeros_like(values) for flag, values in root.items()}
        source = {group.name: step_data, "next": {group.name: next_data, **root}, **begin}
        return TensorDict(source, [self.n_envs, n_steps])


class EpisodeLists:
    """Flags and rewards of each agent and step, as plain lists.

    Args:
        batch: ``[E, T]``, starting with an episode.
        name: name of the group.
        teams: the agents of each team; by default one team of all.
        learns: mask of learning agents, ``[E][N]``; by default all.
    """

    def __init__(self, batch, name, teams=None, learns=None):
        self.n_envs, self.n_steps = batch.shape
        step, next_step = batch[name], batch["next", name]
        self.acts, self.seen = step["mask"].tolist(), next_step["mask"].tolist()
        self.n_agents = len(self.acts[0][0])
        self.done = step["done"].squeeze(-1).tolist()
        self.reward = next_step["reward"].squeeze(-1).double().tolist()
        self.ends = {
            key: (
                batch["next", key].squeeze(-1).tolist(),
                next_step[key].squeeze(-1).tolist(),
            )
            for key in FLAGS
        }
        self.teams = [list(range(self.n_agents))] if teams is None else teams
        self.learns = [[True] * self.n_agents] * self.n_envs if learns is None else learns
        self.alive = [self._alive(e) for e in range(self.n_envs)]

    def _alive(self, e):
        born, found = set(), []
        for t in range(self.n_steps):
            born |= {i for i in range(self.n_agents) if self.acts[e][t][i]}
            found.append([i in born and not self.done[e][t][i] for i in range(self.n_agents)])
            if self.ends["done"][0][e][t]:
                born = set()
        return found

    def team(self, i):
        return next(team for team in self.teams if i in team)

    def mean(self, e, i, rows, counts):
        """The mean of rows over the counting and learning agents of a team; 0 if there are none."""
        counted = [j for j in self.team(i) if counts[j] and self.learns[e][j]]
        return sum(rows[j] for j in counted) / len(counted) if counted else 0.0

    def reward_of(self, e, t, i, mixed=False, bootstrap="team"):
        """Returns the reward of an agent in a step."""
        if self.alive[e][t][i] and not mixed:
            return self.reward[e][t][i]
        if bootstrap == "agent":
            return 0.0
        return self.mean(e, i, self.reward[e][t], self.alive[e][t])

    def cut_off(self, e, t, i):
        """Whether an agent is truncated in a step and not terminated."""
        _, truncated = self.ends["truncated"]
        _, terminated = self.ends["terminated"]
        return self.alive[e][t][i] and truncated[e][t][i] and not terminated[e][t][i]

    def next_step_is_readable(self, e, t, i):
        """Whether an agent has a valid next observation after a step."""
        return self.seen[e][t][i] or self.cut_off(e, t, i)

    def window(self, e, t, n):
        """The steps of a look-ahead of up to n steps."""
        last = t
        while last - t + 1 < n and last + 1 < self.n_steps:
            if self.ends["done"][0][e][last]:
                break
            if any(self.cut_off(e, last, i) for i in range(self.n_agents)):
                break
            last += 1
        return range(t, last + 1)

    def sum_of(self, e, t, i, n, gamma, **kwargs):
        """The discounted sum of up to n steps."""
        steps = self.window(e, t, n)
        return sum(gamma ** (s - t) * self.reward_of(e, s, i, **kwargs) for s in steps)

    def next_value(self, e, t, i, values, bootstrap="team"):
        """Returns the bootstrap value of an agent, from agents with a valid next observation."""
        readable = [self.next_step_is_readable(e, t, j) for j in range(self.n_agents)]
        terminated = self.ends["terminated"][bootstrap == "agent"][e][t]
        terminated = terminated[i] if bootstrap == "agent" else terminated
        if terminated:
            return 0.0
        return values[i] if readable[i] else self.mean(e, i, values, readable)

    def each(self):
        return ((e, t) for e in range(self.n_envs) for t in range(self.n_steps))
