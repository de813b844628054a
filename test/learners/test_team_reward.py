"""The team reward with late spawns, turns and deaths, against values by hand and plain sums.

It is the mean over agents that are spawned and alive in the step, for every algorithm.
"""

import copy
from dataclasses import replace

import pytest
import torch
from lives import EpisodeLists, Lives
from samples import POISON, assert_same, poisoned, states
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.learners import OnPolicyConfig
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.learners.members import learner_of_members
from torchrl_marl.learners.off_policy_config import (
    AnyTeamMixerConfig,
    OffPolicyConfig,
    ParallelQConfig,
    ReplayConfig,
    TeamMixerConfig,
    ValueConfig,
)
from torchrl_marl.modules.config import (
    AnyMixerConfig,
    NetworkConfig,
    QNetworkConfig,
    RecurrentNetworkConfig,
)

pytestmark = pytest.mark.filterwarnings("ignore:group .*act in turns")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
SMALL = {"actor": QNetworkConfig(num_cells=[8])}
STORED = {**SMALL, "learning_starts": 10**6, "replay": ReplayConfig(capacity=10_000)}


TWO = Categorical(2)


def groups_of(sizes, action=TWO):
    kinds = [AgentSpec(name, n, Unbounded((2,)), action) for name, n in sizes.items()]
    return TeamSpec(kinds).groups


def make(groups, config):
    return ALGORITHMS.learner(config.algorithm)(groups, config)


def script(mask, reward, over=None, terminates=False):
    """Steps of one env; the last one ends the episode, by truncation unless it terminates."""
    steps, n = len(reward), len(reward[0])
    mask = torch.tensor(mask + [mask[-1]]).view(1, steps + 1, n).bool()
    over = torch.tensor(over or [[0] * n] * (steps + 1)).view(1, steps + 1, n, 1).bool()
    last = (torch.arange(steps) == steps - 1).view(1, steps, 1)
    root = {"done": last, "terminated": last & terminates, "truncated": last & (not terminates)}
    own = {key: flag.unsqueeze(-2).expand(1, steps, n, 1).clone() for key, flag in root.items()}
    own["terminated"] |= over[:, 1:]
    own["done"] |= over[:, 1:]
    own["truncated"] &= ~own["terminated"]
    now = {"observation": torch.zeros(1, steps, n, 2), "mask": mask[:, :-1], "done": over[:, :-1]}
    now["action"] = torch.zeros(1, steps, n, dtype=torch.long)
    then = {"observation": torch.zeros(1, steps, n, 2), "mask": mask[:, 1:]}
    then["reward"] = torch.tensor(reward, dtype=torch.float32).view(1, steps, n, 1)
    return TensorDict({"car": now, "next": {"car": then | own, **root}}, [1, steps])


def stored_rewards(algorithm, batch, n_step, gamma=0.5):
    """Returns the n-step reward of each row of a replay buffer, ``[T, N]``."""
    groups = groups_of({"car": batch["car", "mask"].shape[-1]})
    learner = make(groups, ValueConfig(algorithm, gamma=gamma, **STORED))
    learner.learn(batch)
    data = learner.replay.look(torch.arange(batch.numel()), n_step, gamma)
    [loss] = learner.losses.values()
    return loss.rewards(data, data["car", "mask"].float()).squeeze(-1)


# Agent 0 earns 2 a step, agent 1 spawns after step 0 and earns 1.
LATE = script([[1, 0], [1, 1], [1, 1], [1, 1]], [[2, 0], [2, 1], [2, 1], [2, 1]])
# Agent 1 acts in every second step, and both are rewarded in all steps.
WAITS = script([[1, 1], [1, 0], [1, 1], [1, 0]], [[2, 1]] * 4)
# Agent 0 earns 1 a step, agent 1 dies in step 0, agent 2 spawns after five steps.
DIES = script(
    [[1, 1, 0]] + [[1, 0, 0]] * 4 + [[1, 0, 1]],
    [[1, 1, 0]] + [[1, 0, 0]] * 4 + [[1, 0, 1]],
    [[0, 0, 0]] + [[0, 1, 0]] * 6,
)


class TestByHand:
    def test_unspawned_agents_do_not_count_in_n_step_rewards(self):
        assert stored_rewards("vdn", LATE, 1)[:3, 0].tolist() == [2.0, 1.5, 1.5]
        # 2 + 1.5 / 2 + 1.5 / 4 + 1.5 / 8
        assert stored_rewards("vdn", LATE, 4)[0].tolist() == [3.3125, 3.3125]
        assert stored_rewards("qmix", LATE, 4)[0, 0] == 3.3125

    @pytest.mark.parametrize("kind", ["sum", "monotonic"])
    def test_unspawned_agents_do_not_count_in_rewards_of_rollouts(self, kind):
        config = ParallelQConfig(mixer=AnyTeamMixerConfig(kind=kind), lmbda=1.0, gamma=0.5, **SMALL)
        learner = make(groups_of({"car": 2}), config)
        data = learner.block.gather(LATE.clone())
        [loss] = learner.losses.values()
        assert loss.rewards(data, data["car", "mask"].float())[0, :, 0, 0].tolist() == [
            2.0,
            1.5,
            1.5,
            1.5,
        ]

    def test_waiting_agents_count_in_team_reward(self):
        assert stored_rewards("vdn", WAITS, 1)[:, 0].tolist() == [1.5] * 4
        assert stored_rewards("vdn", WAITS, 3)[0, 0] == 1.5 * 1.75

    @pytest.mark.parametrize("n_step", [1, 2, 3])
    def test_rewards_of_the_team_do_not_count_after_an_agent_dies_alone(self, n_step):
        """The team earns 1 a step; agent 1 dies in step 0, so its return is 1."""
        batch = DIES[:, :5].clone()
        batch["next", "reward"] = torch.ones(1, 5, 1)
        del batch["next", "car", "reward"]
        groups = {"car": replace(groups_of({"car": 3})["car"], reward_key="reward")}
        settings = {**STORED, "bootstrap": "agent", "n_step": n_step, "gamma": 1.0}
        learner = make(groups, ValueConfig("iql", **settings))
        learner.learn(batch)
        [loss] = learner.losses.values()
        for parameter in loss.target_qvalue_network.parameters():
            parameter.data.zero_()
        data = learner.replay.look(torch.arange(5), n_step, 1.0)
        target, learned = loss.target(data, data["car", "mask"].float())
        assert learned[0].tolist() == [True, True, False] and target[0, 1] == 1.0
        assert target[1:, 0, 0].tolist() == [min(n_step, 5.0 - t) for t in range(1, 5)]

    def test_dead_agents_are_credited_with_later_team_rewards(self):
        assert stored_rewards("iql", DIES, 5, gamma=1.0)[0, :2].tolist() == [5.0, 5.0]
        config = OnPolicyConfig("ippo", gamma=1.0, lmbda=1.0, actor=NetworkConfig([8]))
        learner = make(groups_of({"car": 3}), config)
        for parameter in learner.critics.parameters():
            parameter.data.zero_()
        batch = DIES[:, :5].clone()
        data = learner.block.gather(batch)
        learner.add_advantage(data)
        assert data["car", "value_target"][0, 0, :2, 0].tolist() == [5.0, 5.0]


# --------------------------------------------------------------------------------- plain sums

LAYOUTS = {"one": {"car": 3}, "joined": {"car": 3, "bus": 2}}
ENVS, STEPS, PARTS = 4, 30, (7, 1, 12, 10)
GAMMA = 0.9
SEEDS = range(3)


def lives(layout, seed, n_envs=ENVS, action=TWO, **kwargs):
    """A batch of groups in the same envs, its steps in plain lists, and the groups."""
    groups = groups_of(LAYOUTS[layout], action)
    world = Lives(n_envs, sum(LAYOUTS[layout].values()), seed, **kwargs)
    whole = world.batch(groups["car"], STEPS)
    teams, batch, first = [], whole.clone(), 0
    for name, n in LAYOUTS[layout].items():
        teams.append(list(range(first, first + n)))
        for path in ((), ("next",)):
            own = {key: x[:, :, first : first + n] for key, x in whole[(*path, "car")].items()}
            batch[(*path, name)] = TensorDict(own, [n_envs, STEPS, n])
        if action is not TWO:
            batch[name, "action"] = torch.rand(n_envs, STEPS, n, 2)
        first += n
    return batch, EpisodeLists(whole, "car", teams), groups


def everywhere(plain, found):
    """``found(e, t, i)`` of all steps and agents, ``[E, T, N]``."""
    envs, steps, agents = (range(n) for n in (plain.n_envs, plain.n_steps, plain.n_agents))
    return torch.tensor([[[found(e, t, i) for i in agents] for t in steps] for e in envs])


def as_rows(steps):
    """``[E, T, N]`` in the order of stored rows, ``[T * E, N]``."""
    return steps.transpose(0, 1).flatten(0, 1)


def best_values(loss, data):
    """Returns the networks' values of the next observations, ``[E, T, N]``, of all agents."""
    group, following = loss.group, data["next"].select(loss.group.observation_key).clone()
    following[group.mask_key] = torch.ones(*data.shape, group.n_agents, dtype=torch.bool)
    with torch.no_grad(), loss.network("qvalue_network") as network:
        values = network(following.select(*network.in_keys))[loss.tensor_keys.action_value]
    return values.amax(-1)


def mixed_values(loss, data, values, follows):
    """The mixture of the values of agents in the next step, ``[E, T, N]``."""
    following = data["next"].select(loss.group.observation_key).clone()
    seen = follows.unsqueeze(-1)
    observation = torch.where(seen, following[loss.group.observation_key], 0.0)
    following[loss.group.observation_key] = observation
    following[loss.group.mask_key] = follows
    with torch.no_grad():
        return loss.mixture(following, torch.where(seen, values.unsqueeze(-1), 0.0)).squeeze(-1)


def worth_of_next(loss, data, plain, bootstrap):
    """Returns each agent's next value of each step, ``[E][T][N]``; 0 at a termination."""
    values = best_values(loss, data)
    if loss.mixed:
        values = mixed_values(
            loss, data, values, everywhere(plain, plain.next_step_is_readable)
        ).tolist()
        over = plain.ends["terminated"][0]
        return everywhere(plain, lambda e, t, i: 0.0 if over[e][t] else values[e][t][i]).tolist()
    values = values.tolist()
    found = everywhere(plain, lambda e, t, i: plain.next_value(e, t, i, values[e][t], bootstrap))
    return found.tolist()


def store(learner, batch):
    """Stores several batches, with the learner's state saved and loaded between them."""
    for part in batch.split(list(PARTS), 1):
        learner.learn(part)
        learner.load_state_dict(copy.deepcopy(learner.state_dict()))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n_step", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "algorithm, bootstrap, over",
    [
        ("iql", "team", "group"),
        ("iql", "agent", "group"),
        ("vdn", "team", "group"),
        ("qmix", "team", "group"),
        ("vdn", "team", "team"),
    ],
)
def test_targets_of_replayed_steps_match_plain_sums(
    algorithm, bootstrap, over, layout, n_step, seed
):
    batch, plain, groups = lives(layout, seed, waits=bootstrap == "team")
    if over == "team":  # one team of all agents
        plain.teams = [list(range(plain.n_agents))]
    torch.manual_seed(seed)
    mixer = TeamMixerConfig(init_scale=1.0, over=over)
    settings = {**STORED, "bootstrap": bootstrap, "gamma": GAMMA, "mixer": mixer}
    learner = make(groups, ValueConfig(algorithm, **settings))
    store(learner, batch)
    [loss] = learner.losses.values()
    data = learner.replay.look(torch.arange(ENVS * STEPS), n_step, GAMMA)
    found, learned = loss.target(data, data[loss.group.mask_key].float())
    gathered = make(groups, learner.config).block.gather(batch)
    then = worth_of_next(loss, gathered, plain, bootstrap)

    def target(e, t, i):
        last = plain.window(e, t, n_step)[-1]
        earned = plain.sum_of(e, t, i, n_step, GAMMA, mixed=loss.mixed, bootstrap=bootstrap)
        return earned + GAMMA ** (last - t + 1) * then[e][last][i]

    def known(e, t, i):
        if loss.mixed:
            return any(plain.acts[e][t][j] for j in plain.team(i))
        last = plain.window(e, t, n_step)[-1]
        over = plain.ends["terminated"][1][e][last][i]
        return plain.acts[e][t][i] and (
            bootstrap == "team" or over or plain.next_step_is_readable(e, last, i)
        )

    assert torch.equal(learned, as_rows(everywhere(plain, known)))
    expected = torch.where(learned, as_rows(everywhere(plain, target)), 0.0)
    torch.testing.assert_close(found.squeeze(-1), expected, **TOLERANCE)


@pytest.mark.parametrize("n_step", [1, 4])
@pytest.mark.parametrize(
    "algorithm, bootstrap",
    [
        ("maddpg", "team"),
        ("masac", "team"),
        ("facmac", "team"),
        ("iddpg", "team"),
        ("iddpg", "agent"),
    ],
)
def test_rewards_of_actor_critics_match_plain_sums(algorithm, bootstrap, n_step):
    action = Bounded(-1, 1, (2,))
    batch, plain, groups = lives("joined", 5, waits=bootstrap == "team", action=action)
    settings = STORED | {"actor": RecurrentNetworkConfig([8]), "bootstrap": bootstrap}
    if algorithm == "facmac":
        settings |= {"mixer": AnyMixerConfig("monotonic")}
    learner = make(groups, OffPolicyConfig(algorithm.replace("facmac", "maddpg"), **settings))
    store(learner, batch)
    [loss] = learner.losses.values()
    data = learner.replay.look(torch.arange(ENVS * STEPS), n_step, GAMMA)
    reward, _, _, learned = loss.outcome(data, data[loss.group.mask_key].float())

    def earned(e, t, i):
        return plain.sum_of(e, t, i, n_step, GAMMA, mixed=loss.mixed, bootstrap=bootstrap)

    expected = torch.where(learned, as_rows(everywhere(plain, earned)), 0.0)
    found = torch.where(learned, reward.squeeze(-1), 0.0)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    if bootstrap == "team":  # next masks of single steps have the same agents
        data = learner.replay.look(torch.arange(ENVS * STEPS), 1, GAMMA)
        follows = as_rows(everywhere(plain, plain.next_step_is_readable))
        assert torch.equal(data[("next", *loss.group.mask_key)], follows)


@pytest.mark.parametrize("algorithm", ["iql", "vdn"])
def test_members_of_a_population_store_rewards_of_single_learners(algorithm):
    members = 2
    batch, plain, groups = lives("joined", 3, n_envs=members * ENVS)
    many = learner_of_members(groups, ValueConfig(algorithm, **STORED), n_members=members)
    store(many, batch)
    [loss] = many.losses.values()
    key = next(key for key in many.replay.keys if key[-1] == "reward")
    data = many.replay._read_minibatch(torch.arange(members * ENVS * STEPS), 4, GAMMA)

    def earned(e, t, i):
        return plain.sum_of(e, t, i, 4, GAMMA, mixed=loss.mixed)

    expected = as_rows(everywhere(plain, earned))
    torch.testing.assert_close(data[key].squeeze(-1), expected, **TOLERANCE)
    alone = make(groups, ValueConfig(algorithm, **STORED))
    store(alone, batch[ENVS:])
    state = many.replay.state_of(1, alone.replay.keys)["leaves"]
    for leaf, value in alone.replay.state_dict()["leaves"].items():
        assert torch.equal(state[leaf], value), leaf


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lmbda", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "kind, bootstrap", [("none", "team"), ("none", "agent"), ("sum", "team"), ("monotonic", "team")]
)
def test_lambda_returns_match_plain_sums(kind, bootstrap, layout, lmbda, seed):
    batch, plain, groups = lives(layout, seed, waits=bootstrap == "team")
    torch.manual_seed(seed)
    mixer = AnyTeamMixerConfig(kind=kind, init_scale=1.0)
    settings = {**SMALL, "bootstrap": bootstrap, "gamma": GAMMA, "lmbda": lmbda, "mixer": mixer}
    learner = make(groups, ParallelQConfig(**settings))
    [loss] = learner.losses.values()
    gathered = make(groups, learner.config).block.gather(batch)
    then = worth_of_next(loss, gathered, plain, bootstrap)
    own = bootstrap == "agent"

    def returned(e, t, i, behind):
        reward = plain.reward_of(e, t, i, mixed=loss.mixed, bootstrap=bootstrap)
        over = plain.ends["done"][own][e][t]
        if (over[i] if own else over) or t + 1 == behind:
            return reward + GAMMA * then[e][t][i]
        later = returned(e, t + 1, i, behind)
        return reward + GAMMA * ((1 - lmbda) * then[e][t][i] + lmbda * later)

    behind = [next(end for end in (7, 8, 20, 30) if t < end) for t in range(STEPS)]
    expected = everywhere(plain, lambda e, t, i: returned(e, t, i, behind[t]))
    found = []
    for part in batch.split(list(PARTS), 1):
        data = learner.block.gather(part)
        learner.add_targets(data)
        found.append(data.select(loss.group.name))
    found = torch.cat(found, 1)[loss.group.name]
    learned = found["loss_mask"]
    expected = torch.where(learned, expected, 0.0)
    torch.testing.assert_close(found["value_target"].squeeze(-1), expected, **TOLERANCE)


@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize(
    "algorithm, bootstrap",
    [(name, "team") for name in ("iql", "vdn", "qmix", "pqn", "pqn sum")]
    + [("iql", "agent"), ("pqn", "agent")],
)
def test_values_of_unspawned_and_dead_agents_have_no_effect(algorithm, bootstrap, value):
    """Also where the episode is truncated before agents spawn."""
    batch, plain, groups = lives("joined", 2, waits=bootstrap == "team")
    bad, first = batch.clone(), 0
    alive, follows = torch.tensor(plain.alive), everywhere(plain, plain.next_step_is_readable)
    for name, n in LAYOUTS["joined"].items():
        own, first = slice(first, first + n), first + n
        bad = poisoned(bad, (name, "observation"), batch[name, "mask"], value)
        bad = poisoned(bad, (name, "action"), batch[name, "mask"], 1)
        bad = poisoned(bad, ("next", name, "observation"), follows[..., own], value)
        bad = poisoned(bad, ("next", name, "reward"), alive[..., own], value)
    found = []
    for given in (batch, bad):
        torch.manual_seed(0)
        if algorithm.startswith("pqn"):
            kind = AnyTeamMixerConfig(kind="sum" if "sum" in algorithm else "none")
            config = ParallelQConfig(bootstrap=bootstrap, minibatch_size=40, mixer=kind, **SMALL)
        else:
            settings = {**STORED, "learning_starts": 0, "minibatch_size": 32, "n_step": 3}
            config = ValueConfig(algorithm, bootstrap=bootstrap, **settings)
        learner = make(groups, config)
        for part in given.split(list(PARTS) if algorithm in ("iql", "vdn", "qmix") else 10, 1):
            learner.learn(part)
        found.append(states([learner]))
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


# ------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("algorithm", ["iql", "vdn"])
def test_checkpoint_with_rewards_of_each_agent_loads(algorithm, many):
    """Older versions stored them; the reward of a step is the mean over agents that acted."""
    members = 2 if many else 1
    batch, plain, groups = lives("joined", 4, n_envs=members * ENVS)
    config = ValueConfig(algorithm, **STORED)

    def fresh():
        if many:
            return learner_of_members(groups, config, n_members=members)
        return make(groups, config)

    learner, other = fresh(), fresh()
    learner.learn(batch)
    state = copy.deepcopy(learner.state_dict())
    extra, [name] = state["_extra_state"], learner.losses
    leaves = extra["replay"]["leaves"]
    own = torch.randn(STEPS, members * ENVS, plain.n_agents, 1)
    leaves.pop(("next", name, "team", "reward"), None)
    leaves["next", name, "reward"] = own
    del extra["born"]
    other.load_state_dict(state)
    rows, acts = own.squeeze(-1).transpose(0, 1).tolist(), plain.acts

    def earned(e, t, i):
        some = any(acts[e][t][j] for j in plain.team(i))
        return plain.mean(e, i, rows[e][t], acts[e][t] if some else [True] * plain.n_agents)

    key = next(key for key in other.replay.keys if key[-1] == "reward")
    found = other.replay.ring.leaf(key).squeeze(-1)[:STEPS].transpose(0, 1)
    expected = torch.tensor(rows) if algorithm == "iql" else everywhere(plain, earned)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    other.learn(batch)
