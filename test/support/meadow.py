"""An environment with two kinds of agents, late births and early deaths, in any groups."""

import torch
from torchrl.data import Bounded, Categorical, MultiCategorical, OneHot, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.envs import MarlEnv
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.specs import Hybrid

# name: (agents, observation features, actions)
KINDS = {"cat": (2, 4, 2), "mouse": (3, 6, 4)}
# the agents' states: columns of their noise, their observations, or the state of the team
STATES = {
    "own": lambda noise, o: noise[..., : 9 - o],
    "seen": lambda noise, o: noise[..., :o],
    "team": lambda noise, o: noise.mean(1, keepdim=True).expand_as(noise),
}
LAYOUTS = {
    "one": {"herd": ["cat", "mouse"]},  # one heterogeneous group
    "two": {"cats": ["cat"], "mice": ["mouse"]},  # two groups, joined where they learn
    "three": {"herd": ["cat", "mouse"], "mice": ["mouse"]},  # a heterogeneous one among them
    "many": {"cats": ["cat"], "herd": ["cat", "mouse"], "mice": ["mouse"]},
}


class Meadow(MarlEnv):
    """Agents observe noise, a goal and their age; actions near the goal are rewarded.

    Agent i is born in step ``i % 3`` and dies 2 to 7 steps later, at random.
    """

    def __init__(
        self,
        num_envs,
        layout="one",
        actions="bounded",
        mask_actions=False,
        states=None,
        team_state=True,
        **kwargs,
    ):
        super().__init__(num_envs, **kwargs)
        self.layout, self.actions, self.mask_actions = LAYOUTS[layout], actions, mask_actions
        self.states, self.team_state = states, team_state
        self.rows = {}
        n = 0
        for group, kinds in self.layout.items():
            for kind in kinds:
                size, o, a = KINDS[kind]
                name = f"{kind}_of_{group}"
                self.rows[name] = (group, slice(n, n + size), o, a)
                n += size
                observation_spec, action_spec = Unbounded((o,)), action_of(actions, a)
                state_spec = state_of(states, o)
                spec = AgentSpec(
                    name,
                    size,
                    observation_spec,
                    action_spec,
                    action_mask=mask_actions,
                    state_spec=state_spec,
                )
                self.register_agent(spec, group)
        self.n = n
        self.births = torch.arange(n) % 3
        if team_state:
            self.register_state(Unbounded((7,)))

    def _reset(self, tensordict):
        shape = (self.num_envs, self.n)
        self.age = (-self.births).expand(shape).clone()
        self.span = torch.randint(2, 8, shape)
        return self._observe()

    def _step(self, tensordict):
        pull = []
        for name, (group, _, _, a) in self.rows.items():
            kinds = self.by_kind(tensordict, group)
            does = kinds[name]["action"].float()
            pull.append(does / a if self.actions == "categorical" else does.mean(-1))
        earned = 1 - (torch.cat(pull, 1) - self.goal).abs()
        self.age = self.age + 1
        dead = (self.age >= self.span).unsqueeze(-1)
        out = self._observe()
        for name, (group, rows, _, _) in self.rows.items():
            leaves = {"reward": earned[:, rows].unsqueeze(-1), "terminated": dead[:, rows]}
            self._put(out, group, name, leaves)
        return out

    def _observe(self):
        self.goal = torch.rand(self.num_envs, self.n)
        noise = torch.randn(self.num_envs, self.n, 7)
        noise[..., 0], noise[..., 1] = self.goal, self.age / 5
        born = self.age >= 0
        out = {"state": noise.mean(1)} if self.team_state else {}
        for name, (group, rows, o, a) in self.rows.items():
            leaves = {"observation": noise[:, rows, :o], "mask": born[:, rows]}
            if self.mask_actions:
                legal = torch.rand(self.num_envs, rows.stop - rows.start, a) < 0.6
                legal[..., 0] |= ~legal.any(-1)
                leaves["action_mask"] = legal
            if self.states is not None:
                states = STATES[self.states](noise, o)
                leaves["state"] = states[:, rows]
            self._put(out, group, name, leaves)
        return out

    def _put(self, out, group, name, leaves):
        kind_of_several = len(self.layout[group]) > 1
        group = out.setdefault(group, {})
        (group.setdefault(name, {}) if kind_of_several else group).update(leaves)


def state_of(states, o):
    """The spec of an agent's own state, for an agent that observes ``o`` numbers."""
    sizes = {"own": 9 - o, "seen": o, "team": 7}
    return None if states is None else Unbounded((sizes[states],))


def action_of(kind, a):
    return {
        "bounded": lambda: Bounded(-1, 1, (a,)),
        "wide": lambda: Bounded(-torch.arange(1.0, a + 1), torch.arange(2.0, a + 2)),
        "unbounded": lambda: Unbounded((a,)),
        "categorical": lambda: Categorical(a),
        "one_hot": lambda: OneHot(a),
        "multi_discrete": lambda: MultiCategorical([a + 1, a]),
        "hybrid": lambda: Hybrid([a + 1], Unbounded((a,))),  # of an exact entropy
    }[kind]()


def make_meadow(num_envs=8, layout="one", actions="bounded", **kwargs):
    """A meadow with dense groups, padded if a group is heterogeneous."""
    return with_dense_groups(
        Meadow(num_envs, layout, actions, **{"seed": 0, "max_steps": 6} | kwargs)
    )


def make_team(layout="one", actions="bounded", mask_actions=False, state=7, states=None):
    """The specs of a meadow, without an environment."""
    agents = {
        group: [
            AgentSpec(
                f"{kind}_of_{group}",
                n,
                Unbounded((o,)),
                action_of(actions, a),
                action_mask=mask_actions,
                state_spec=state_of(states, o),
            )
            for kind in kinds
            for n, o, a in [KINDS[kind]]
        ]
        for group, kinds in LAYOUTS[layout].items()
    }
    return TeamSpec(agents, None if state is None else Unbounded((state,)))
