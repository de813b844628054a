"""Scripted PettingZoo environments; without torch, so that workers start quickly."""

import random

import gymnasium.spaces as spaces
import numpy as np
from pettingzoo import AECEnv, ParallelEnv

BOX, PAIR = spaces.Box(-100, 100, (2,), np.float64), spaces.Discrete(2)


class Script(ParallelEnv):
    """Executes ``steps[t]`` in step t: agents, observations, rewards and ends after the step.

    An agent observes its number and the time. Episodes longer than the script repeat the last
    step.
    """

    metadata = {"name": "script"}
    render_mode = None

    def __init__(self, agents, steps, first=None, observation=None, action=None, infos=None):
        self.possible_agents = agents.split()
        self.first = self.possible_agents if first is None else first.split()
        self.script, self.got = steps, []
        self.seen_by, self.done_by, self.told = observation or {}, action or {}, infos or [{}]
        self.episodes = 0

    def observation_space(self, agent):
        return self.seen_by.get(agent, BOX)

    def action_space(self, agent):
        return self.done_by.get(agent, PAIR)

    def _observe_agents(self, agents):
        observations = {}
        for agent in agents:
            shape = self.observation_space(agent).shape
            observations[agent] = np.full(shape, self.possible_agents.index(agent), np.float64)
            observations[agent][-1] = self.t
        return observations

    def _make_infos(self, agents):
        return {a: dict(self.told[min(self.t, len(self.told) - 1)]) for a in agents}

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, list(self.first)
        self.episodes += 1
        return self._observe_agents(self.agents), self._make_infos(self.agents)

    def step(self, actions):
        self.got.append(dict(actions))
        step = self.script[min(self.t, len(self.script) - 1)]
        self.t += 1
        before, entry_of = self.agents, step.get
        self.agents = entry_of("agents", " ".join(before)).split()
        recipients = {*before, *self.agents}
        observations = self._observe_agents(entry_of("sees", " ".join(recipients)).split())
        observations |= {a: np.full(2, x) for a, x in entry_of("shows", {}).items()}
        return (
            observations,
            entry_of("earns", {}),
            {a: a in entry_of("dies", "").split() for a in recipients},
            {a: a in entry_of("cut", "").split() for a in recipients},
            self._make_infos(recipients),
        )


class Gambler(Script):
    """Observations and rewards are drawn from the global generators."""

    def step(self, actions):
        observations, _, *rest = super().step(actions)
        observations = {a: np.array([np.random.rand(), random.random()]) for a in observations}
        return observations, {a: np.random.rand() for a in observations}, *rest


class Drawn(Script):
    """Draws its observation when it is built."""

    def __init__(self, *args):
        super().__init__(*args)
        self.drawn = np.array([np.random.rand(), random.random()])

    def _observe_agents(self, agents):
        return dict.fromkeys(agents, self.drawn)


class Faulty(Script):
    """Raises in step 4 of its first episode, once per instance."""

    def step(self, actions):
        if self.t == 3 and self.episodes == 1:
            raise ValueError("out of petrol")
        return super().step(actions)


class OwnSource(Script):
    """Draws from its own generator, which every reset seeds again."""

    def reset(self, seed=None, options=None):
        self.source = random.Random(seed)  # seeded by the system if there is no seed
        self.seeds = [*getattr(self, "seeds", ()), seed]
        return super().reset(seed, options)

    def _observe_agents(self, agents):
        return {a: np.array([self.source.random(), self.t]) for a in agents}


class Breaking(Script):
    """Raises in step 4 of every episode, or at the second reset."""

    def __init__(self, where, error=ValueError):
        super().__init__("bob_0", [{}])
        self.where, self.error = where, error

    def reset(self, seed=None, options=None):
        if self.where == "begin" and self.episodes == 1:
            raise self.error("no second life")
        return super().reset(seed, options)

    def step(self, actions):
        if self.where == "step" and self.t == 3:
            raise self.error("the wheel is off")
        return super().step(actions)


class Turns(AECEnv):
    """Two or more players move in turn; ``plan[move]`` has the rewards and ends of a move.

    By default a move gives the mover 1 and all others -10. A player observes its number and the
    number of moves.
    """

    metadata = {"name": "turns"}

    def __init__(self, n=2, plan=(), n_moves=6, blind=False):
        self.possible_agents = [f"p_{i}" for i in range(n)]
        self.plan, self.n_moves, self.blind = dict(plan), n_moves, blind
        self.calls = []

    def observation_space(self, agent):
        return BOX

    def action_space(self, agent):
        return PAIR

    def reset(self, seed=None, options=None):
        self.agents, self.move = list(self.possible_agents), 0
        self.rewards, self._cumulative_rewards = (dict.fromkeys(self.agents, 0) for _ in range(2))
        self.terminations, self.truncations = (dict.fromkeys(self.agents, False) for _ in range(2))
        self.infos = {a: {} for a in self.agents}
        self.agent_selection = self.agents[0]

    def observe(self, agent):
        if self.blind and agent != self.agent_selection:
            raise ValueError("not its turn")
        return np.array([self.possible_agents.index(agent), self.move], np.float32)

    def step(self, action):
        mover = self.agent_selection
        self.calls.append((mover, action))
        if self.terminations[mover] or self.truncations[mover]:
            return self._was_dead_step(action)
        self.move += 1
        entries = self.plan.get(self.move, {})
        earns = entries.get("earns", {a: 1 if a == mover else -10 for a in self.agents})
        self.rewards = {a: earns.get(a, 0) for a in self.agents}
        for a in entries.get("dies", "").split():
            self.terminations[a] = True
        for a in entries.get("cut", "").split():
            self.truncations[a] = True
        if self.move == self.n_moves:
            self.terminations = dict.fromkeys(self.agents, True)
        self._cumulative_rewards[mover] = 0
        self._accumulate_rewards()
        order = self.agents[self.agents.index(mover) + 1 :] + self.agents
        living = [a for a in order if not (self.terminations[a] or self.truncations[a])]
        self.agent_selection = living[0] if living else mover
        self._deads_step_first()


class MaskedTurns(Turns):
    """Puts its action mask in the infos of the mover only, from move ``since`` on."""

    def __init__(self, since=0, legal=(0, 1), **kwargs):
        super().__init__(**kwargs)
        self.since, self.legal = since, legal

    def reset(self, seed=None, options=None):
        super().reset(seed)
        self._mask()

    def step(self, action):
        super().step(action)
        self._mask()

    def _mask(self):
        self.infos = {a: {} for a in self.agents}
        if self.agents and self.move >= self.since:
            self.infos[self.agent_selection] = {"action_mask": np.array(self.legal, np.int8)}
