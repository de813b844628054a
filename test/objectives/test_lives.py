"""GAE and V-trace against plain sums, with late births, waiting, deaths and truncation."""

import math
from dataclasses import replace

import pytest
import torch
from echo import Echo
from lives import EpisodeLists, Lives
from samples import POISON, assert_same, poisoned
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.learners.block import Block
from torchrl_marl.modules import NetworkConfig, make_actor
from torchrl_marl.objectives import TeamGAE, TeamVTrace
from torchrl_marl.objectives.flags import alive_mask_of, bootstrap_mask_of
from torchrl_marl.specs.joining import unfold

GAMMA, LMBDA = 0.9, 0.8
ENVS, PARTS = 4, (7, 1, 12, 10)
LAYOUTS = {"one": {"car": 3}, "joined": {"car": 3, "bus": 2}}
BEHIND = [end for end, n in zip((7, 8, 20, 30), PARTS) for _ in range(n)]


class Played:
    """Batches in the block's layout, and the same rollout in plain lists."""

    def __init__(self, layout, seed, learns=False, respawns=False):
        sizes = LAYOUTS[layout]
        kinds = [AgentSpec(name, n, Unbounded((1,)), Categorical(2)) for name, n in sizes.items()]
        groups = TeamSpec(kinds).groups
        groups = self.groups = {n: replace(g, respawns=respawns) for n, g in groups.items()}
        self.respawns = respawns
        n_agents, steps = sum(sizes.values()), sum(PARTS)
        lives = Lives(ENVS, n_agents, seed, respawns=respawns)
        self.whole = lives.batch(groups["car"], steps, features=1)
        generator = torch.Generator().manual_seed(seed)
        rows = torch.rand(ENVS, n_agents, generator=generator) < (0.6 if learns else 1.0)
        teams, batch, first = [], self.whole.clone(), 0
        for name, n in sizes.items():
            own, teams = slice(first, first + n), [*teams, list(range(first, first + n))]
            for path in ((), ("next",)):
                leaves = {key: x[:, :, own] for key, x in self.whole[(*path, "car")].items()}
                batch[(*path, name)] = TensorDict(leaves, [ENVS, steps, n])
            if learns:
                batch[name, "learns"] = rows[:, None, own].expand(-1, steps, -1).clone()
            first += n
        self.plain = EpisodeLists(self.whole, "car", teams, rows.tolist())
        block, self.batch = Block(groups, acted=("action",)), batch
        self.parts = [block.gather(part) for part in batch.split(list(PARTS), 1)]
        [self.group] = block.joined.values()

    def critic(self):
        keys = [self.group.observation_key, self.group.mask_key]
        return TensorDictModule(Echo(), keys, [self.group.key("state_value")])

    def estimated(self, estimator):
        """Advantages, targets and loss masks of all parts, ``[E, T, N]``."""
        found = []
        for data in self.parts:
            estimator(data)
            learned = data.get(self.group.key("loss_mask"), data[self.group.mask_key])
            leaves = (data[self.group.key(leaf)] for leaf in ("advantage", "value_target"))
            found.append([*(x.squeeze(-1) for x in leaves), learned])
        return [torch.cat(rows, 1) for rows in zip(*found)]

    def everywhere(self, found):
        n = self.plain.n_agents
        envs, steps = range(ENVS), range(self.plain.n_steps)
        return torch.tensor([[[found(e, t, i) for i in range(n)] for t in steps] for e in envs])


class Reference:
    """Values, rewards and done flags for ``bootstrap="team"``, in plain numbers."""

    def __init__(self, played):
        self.plain, self.respawns = (plain := played.plain), played.respawns
        whole = played.whole
        self.now = whole["car", "observation"].squeeze(-1).double().tolist()
        self.then = whole["next", "car", "observation"].squeeze(-1).double().tolist()
        self.done, self.terminated = (plain.ends[key][0] for key in ("done", "terminated"))

    def _shared(self, e, i, seen, alive, rows):
        rows = [x if some else 0.0 for x, some in zip(rows, seen)]
        if alive[i]:
            return rows[i]
        learns = self.plain.learns[e]
        some = any(seen[j] and learns[j] for j in self.plain.team(i))
        return self.plain.mean(e, i, rows, seen if some else alive)

    def value(self, e, t, i):
        plain = self.plain
        if self.respawns and not any(plain.alive[e][t][j] for j in plain.team(i)):
            return 0.0 if self.done[e][t] else GAMMA * self.next_value(e, t, i)
        return self._shared(e, i, plain.acts[e][t], plain.alive[e][t], self.now[e][t])

    def next_value(self, e, t, i):
        plain = self.plain
        seen = [plain.next_step_is_readable(e, t, j) for j in range(plain.n_agents)]
        over = plain.ends["done"][1][e][t]
        alive = [s or (a and not o) for s, a, o in zip(seen, plain.alive[e][t], over)]
        if self.respawns and not any(alive[j] for j in plain.team(i)):
            return GAMMA * self.next_value(e, t + 1, i) if self.goes_on(e, t) else 0.0
        return self._shared(e, i, seen, alive, self.then[e][t])

    def delta(self, e, t, i):
        then = 0.0 if self.terminated[e][t] else self.next_value(e, t, i)
        return self.plain.reward_of(e, t, i) + GAMMA * then - self.value(e, t, i)

    def goes_on(self, e, t):
        return not self.done[e][t] and t + 1 < BEHIND[t]

    def advantage(self, e, t, i):
        later = self.advantage(e, t + 1, i) if self.goes_on(e, t) else 0.0
        return self.delta(e, t, i) + GAMMA * LMBDA * later


@pytest.mark.parametrize(("learns", "respawns"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_team_gae_equals_plain_sums(layout, seed, learns, respawns):
    played = Played(layout, seed, learns, respawns)
    settings = {"value_network": played.critic(), "group": played.group}
    advantage, target, learned = played.estimated(TeamGAE(gamma=GAMMA, lmbda=LMBDA, **settings))
    own, plain = Reference(played), played.plain
    expected = played.everywhere(own.advantage)
    wanted = played.everywhere(lambda e, t, i: plain.acts[e][t][i] and plain.learns[e][i])
    assert torch.equal(learned, wanted)
    values = played.everywhere(own.value)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(advantage[learned], expected[learned], **close)
    torch.testing.assert_close(target[learned], (expected + values)[learned], **close)


@pytest.mark.parametrize("respawns", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_agent_gae_equals_plain_sums(layout, seed, respawns):
    """The reward of a turn is the sum up to the agent's next turn or end."""
    played = Played(layout, seed, respawns=respawns)
    settings = {"value_network": played.critic(), "group": played.group, "bootstrap": "agent"}
    advantage, _, learned = played.estimated(TeamGAE(gamma=GAMMA, lmbda=LMBDA, **settings))
    plain, own = played.plain, Reference(played)
    done, terminated = (plain.ends[key][1] for key in ("done", "terminated"))

    def of_turn(e, t, i):
        """The advantage of a turn; None if its outcome is not in the batch."""
        earned, s = 0.0, t
        while True:
            earned += plain.reward[e][s][i]
            if done[e][s][i]:
                then, later = (0.0 if terminated[e][s][i] else own.then[e][s][i]), 0.0
                break
            if s + 1 == BEHIND[t]:
                if not plain.next_step_is_readable(e, s, i):
                    return None
                then, later = own.then[e][s][i], 0.0
                break
            if plain.acts[e][s + 1][i]:
                then, later = own.then[e][s][i], of_turn(e, s + 1, i) or 0.0
                break
            s += 1
        return earned + GAMMA * then - own.now[e][t][i] + GAMMA * LMBDA * later

    def turn(e, t, i):
        return of_turn(e, t, i) if plain.acts[e][t][i] else None

    known = played.everywhere(lambda e, t, i: turn(e, t, i) is not None)
    assert torch.equal(learned, known)
    expected = played.everywhere(lambda e, t, i: turn(e, t, i) or 0.0)
    torch.testing.assert_close(advantage[known], expected[known], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("respawns", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ratio", ["agent", "joint"])
@pytest.mark.parametrize("seed", range(2))
def test_vtrace_equals_plain_sums(layout, seed, ratio, respawns):
    played = Played(layout, seed, respawns=respawns)
    torch.manual_seed(seed)
    actor = make_actor(played.group, NetworkConfig([8]))
    drifts = []
    for data in played.parts:
        with torch.no_grad():
            log_prob = actor.get_dist(data).log_prob(data[played.group.action_key])
        drifts.append(0.5 * torch.randn_like(log_prob))
        data[played.group.key("action_log_prob")] = log_prob - drifts[-1]
    drift = torch.cat(drifts, 1).tolist()
    settings = {"value_network": played.critic(), "group": played.group, "ratio": ratio}
    estimator = TeamVTrace(
        actor_network=actor, gamma=GAMMA, lmbda=LMBDA, rho_clip=1.2, c_clip=1.1, **settings
    )
    advantage, target, learned = played.estimated(estimator)
    plain, own = played.plain, Reference(played)

    def weight(e, t, i, most):
        team = [i] if ratio == "agent" else plain.team(i)
        total = sum(drift[e][t][j] for j in team if plain.acts[e][t][j])
        return min(most, math.exp(total))

    def correction(e, t, i):
        later = correction(e, t + 1, i) if own.goes_on(e, t) else 0.0
        decay = GAMMA * LMBDA * weight(e, t, i, 1.1)
        return weight(e, t, i, 1.2) * own.delta(e, t, i) + decay * later

    def expected(e, t, i):
        later = correction(e, t + 1, i) if own.goes_on(e, t) else 0.0
        return own.delta(e, t, i) + GAMMA * LMBDA * later

    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(advantage[learned], played.everywhere(expected)[learned], **close)
    wanted = played.everywhere(lambda e, t, i: correction(e, t, i) + own.value(e, t, i))
    torch.testing.assert_close(target[learned], wanted[learned], **close)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_alive_and_bootstrap_flags_continue_across_batches(layout):
    """Agents that acted in the last batch count as born; others only once they act."""
    played = Played(layout, 2)
    plain, group = played.plain, played.group
    alive = torch.cat([alive_mask_of(group, data) for data in played.parts], 1)
    assert torch.equal(alive, torch.tensor(plain.alive))
    follows = torch.cat([bootstrap_mask_of(group, data) for data in played.parts], 1)
    assert torch.equal(follows, played.everywhere(plain.next_step_is_readable))


def test_population_members_have_separate_flags():
    played = Played("joined", 3)
    block = Block(played.groups, acted=("action",), n_members=2)
    [group], found = block.joined.values(), []
    for part in played.batch.split(list(PARTS), 1):
        data = block.gather(part)
        found.append(unfold(alive_mask_of(group, data), 2, 2))
        follows = unfold(bootstrap_mask_of(group, data), 2, 2)
    assert torch.equal(torch.cat(found, 1), torch.tensor(played.plain.alive))
    assert torch.equal(
        follows, played.everywhere(played.plain.next_step_is_readable)[:, -PARTS[-1] :]
    )


@pytest.mark.parametrize("respawns", [False, True])
@pytest.mark.parametrize("value", POISON)
@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_values_of_unborn_and_dead_agents_have_no_effect(bootstrap, value, respawns):
    found = []
    for poison in (False, True):
        played = Played("joined", 1, respawns=respawns)
        group = played.group
        if poison:
            for i, data in enumerate(played.parts):
                hidden = [
                    (group.observation_key, data[group.mask_key]),
                    (("next", *group.observation_key), bootstrap_mask_of(group, data)),
                    (("next", *group.reward_key), alive_mask_of(group, data)),
                ]
                for key, mask in hidden:
                    data = poisoned(data, key, mask, value)
                played.parts[i] = data
        settings = {"value_network": played.critic(), "group": group, "bootstrap": bootstrap}
        advantage, target, learned = played.estimated(TeamGAE(gamma=GAMMA, lmbda=LMBDA, **settings))
        found.append((advantage[learned], target[learned]))
    for one, other in zip(*found):
        assert_same(one, other)
