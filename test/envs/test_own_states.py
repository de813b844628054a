"""Agent states, from the declaration to a batch."""

import pytest
import torch
from graph_batches import assert_equal, batch_of, collector_of
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import SerialEnv, TransformedEnv, check_env_specs

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.envs import MarlEnv, PadAgents, check_marl_env
from torchrl_marl.envs.transforms import with_dense_groups
from torchrl_marl.errors import ConfigError, SimulatorStateError, SpecError

PUSH = Bounded(-1, 1, (1,))
KINDS = [("rover", Unbounded((2,))), ("drone", None)]


class Walk(MarlEnv):
    """Two rovers and a drone walk; each observes its position, its critic also the others'.

    State of a rover: its position and the other rover's. State of the drone: all positions.
    """

    def __init__(self, num_envs=4, seed=0, max_steps=5, sizes=(2, 3), one_group=True, **given):
        super().__init__(num_envs, seed=seed, max_steps=max_steps)
        self.given, self.one_group = given, one_group
        for name, n, size in (("rover", 2, sizes[0]), ("drone", 1, sizes[1])):
            state = None if size is None else Unbounded((size,))
            spec = AgentSpec(name, n, Unbounded((1,)), PUSH, state_spec=state)
            self.register_agent(spec, "team" if one_group else None)

    def _reset(self, tensordict):
        self.place = torch.rand(self.num_envs, 3, 1) - 0.5
        return self.seen()

    def _step(self, tensordict):
        groups = ["team"] if self.one_group else ["rover", "drone"]
        pushes = [tensordict[group, "action"] for group in groups]
        self.place = self.place + 0.5 * torch.cat(pushes, 1)
        return self.seen(reward=self.place, terminated=self.place.abs() > 1)

    def seen(self, **leaves):
        leaves = {"observation": self.place, **leaves}
        first, second, _ = self.place.unbind(1)
        rovers = torch.stack([torch.cat([first, second], -1), torch.cat([second, first], -1)], 1)
        states = {"rover": rovers, "drone": self.place.transpose(1, 2)} | self.given
        if self.one_group:
            return {"team": leaves | {name: {"state": x} for name, x in states.items()}}
        rows = {"rover": slice(2), "drone": slice(2, 3)}
        own = {name: {key: x[:, at] for key, x in leaves.items()} for name, at in rows.items()}
        return {name: own[name] | {"state": x} for name, x in states.items()}


@pytest.mark.parametrize("one_group", [True, False])
def test_agent_states_match_their_specs(one_group):
    """Stacked lazily in one group, since their sizes differ; before each step and after it."""
    env = Walk(one_group=one_group)
    check_env_specs(env)
    check_marl_env(Walk(one_group=one_group))
    sizes = {
        name: [group.of_states.observation_dims for group in team.groups.values()]
        for name, team in {"read": TeamSpec.from_env(env), "declared": env.team}.items()
    }
    assert sizes["read"] == sizes["declared"] == ([(2, 2, 3)] if one_group else [(2, 2), (3,)])
    td = env.rollout(7, break_when_any_done=False)
    for part in (td, td["next"]):
        kinds = {name: x for group in env.group_map for name, x in env.by_kind(part, group).items()}
        place = torch.cat([kinds[name]["observation"] for name in ("rover", "drone")], -2)
        assert torch.equal(kinds["rover"]["state"][..., 0], place[..., :2, 0])
        assert torch.equal(kinds["rover"]["state"][..., 1], place[..., :2, 0].flip(-1))
        assert torch.equal(kinds["drone"]["state"][..., 0, :], place[..., 0])
    assert "state" not in td.keys() and env.team.state_spec is None


def test_states_are_padded_as_observations_are():
    env = TransformedEnv(Walk(), PadAgents())
    check_env_specs(env)
    td, group = env.rollout(3), TeamSpec.from_env(env).groups["team"]
    assert td["team", "state"].shape == (4, 3, 3, 3)
    assert (td["team", "state"][..., :2, 2] == 0).all()
    assert group.agent_state_key == ("team", "state")
    assert group.of_states.observation_dims == (2, 2, 3)
    assert group.of_states.observation_padding.tolist() == [[True, True, False]] * 2 + [[True] * 3]


def test_states_of_one_size_are_a_dense_leaf():
    env = Walk(sizes=(3, 3), rover=torch.zeros(4, 2, 3))
    assert env.reset()["team", "state"].shape == (4, 3, 3)
    batched = SerialEnv(2, lambda: Walk(one_group=False))
    check_env_specs(batched)
    groups = TeamSpec.from_env(batched).groups
    assert groups["drone"].agent_state_spec.shape == (1, 3)
    assert groups == Walk(one_group=False).team.groups


def test_partial_reset_keeps_the_states_of_running_envs():
    env = Walk(one_group=False)
    before = env.rollout(3)[:, -1]["next"].exclude("reward")
    again = torch.tensor([[True], [False], [True], [False]])
    after = env.reset(before.clone().set("_reset", again))
    same = (after["drone", "state"] == before["drone", "state"]).flatten(1)
    assert same.all(1).tolist() == [False, True, False, True]
    assert torch.equal(after["drone", "state"][:, 0, 0], after["rover", "observation"][:, 0, 0])


def test_snapshot_restores_agent_states():
    env = Walk()
    env.rollout(2)
    saved = env.snapshot()
    rollouts = []
    for _ in range(2):
        env.restore(saved)
        torch.manual_seed(0)
        drone = env.rollout(3)["next", "team"][..., 2]
        rollouts.append(torch.cat([drone["observation"], drone["state"]], -1))
    assert torch.equal(*rollouts)


@pytest.mark.parametrize("value", [{}, None, 3])
def test_invalid_snapshot_is_refused(value):
    with pytest.raises(SimulatorStateError, match=r"Walk.restore: found .* without 'world', exp"):
        Walk().restore(value)


def test_graphs_give_the_states_of_eager_steps():
    by_graph, eager = (collector_of(with_dense_groups(Walk(6)), how) for how in ("trace", "eager"))
    batch = batch_of(by_graph)
    assert by_graph.execution == "trace"
    assert ("next", "team", "state") in batch.keys(True)
    assert_equal(batch, batch_of(eager))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rover": torch.zeros(4, 2, 3)}, r"'state'\) has shape \[4, 2, 3\], expected \[4, 2, 2\]"),
        ({"drone": torch.zeros(4, 1, 3).double()}, "is torch.float64, expected torch.float32"),
        ({"drone": None}, r"\('team', 'drone', 'state'\) is nothing, expected shape"),
    ],
)
def test_state_that_contradicts_its_spec_raises(given, message):
    with pytest.raises(SpecError, match=message):
        Walk(**given).reset()


def test_undeclared_or_missing_state_raises():
    with pytest.raises(SpecError, match=r"\('rover', 'state'\), which was not declared"):
        Walk(sizes=(None, None), one_group=False).reset()
    with pytest.raises(SpecError, match=r"returned no \('rover', 'state'\)"):
        env = Walk(one_group=False)
        env.seen = lambda: {name: {"observation": torch.zeros(4, 1, 1)} for name in env.group_map}
        env.reset()


def test_state_specs_of_some_kinds_only_are_refused():
    with pytest.raises(ConfigError, match="'rover' has a state_spec, 'drone' has no state_spec"):
        Walk(sizes=(2, None))
    kinds = [AgentSpec(name, 1, Unbounded((1,)), PUSH, state_spec=own) for name, own in KINDS]
    with pytest.raises(ValueError, match="all kinds of a group have a state_spec, or none"):
        TeamSpec({"all": kinds})


@pytest.mark.parametrize(
    "spec", [Composite(x=Unbounded((2,))), Categorical(4), Unbounded(()), torch.zeros(3)]
)
def test_agent_state_spec_must_be_a_float_tensor(spec):
    with pytest.raises(ValueError, match="agent 'rover': state_spec is .*, expected one of floats"):
        AgentSpec("rover", 1, Unbounded((1,)), PUSH, state_spec=spec)
