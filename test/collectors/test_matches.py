"""Matches: stored players act in their envs and seats for whole episodes."""

import pytest
import torch
from torchrl.data import Categorical, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.collectors.matches import MatchPolicy
from torchrl_marl.envs import MarlEnv
from torchrl_marl.envs.remember import with_memory, with_players
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import SpecError
from torchrl_marl.learners.build import build_learners
from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.modules import MemoryConfig, NetworkConfig, RecurrentNetworkConfig
from torchrl_marl.modules.players import tensors_of

K = 4


class Race(MarlEnv):
    """Two sides of two agents; an episode ends at random, after 1 to 8 steps."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        for name in ("home", "away"):
            self.register_agent(AgentSpec(name, 2, Unbounded((1,)), Categorical(K + 1)))

    def _reset(self, tensordict):
        self.left = torch.randint(1, 9, (self.num_envs,))
        return self._observe()

    def _step(self, tensordict):
        self.left = self.left - 1
        out = self._observe()
        for name in ("home", "away"):
            out[name]["reward"] = torch.zeros(self.num_envs, 2, 1)
        return {**out, "terminated": (self.left == 0).unsqueeze(-1)}

    def _observe(self):
        seen = self.left.float().view(-1, 1, 1).expand(-1, 2, 1)
        return {"home": {"observation": seen}, "away": {"observation": seen.clone()}}


SEATS = [{"home": [0, 1]}, {"away": [0, 1]}]


def always(networks, action):
    """Makes a network choose one action for all observations."""
    *_, weight, bias = networks.values()
    with torch.no_grad():
        for value in networks.values():
            value.zero_()
        bias[..., action] = 50.0


def match_of(env, envs, *, n_slots=K, learners=None, **kwargs):
    team = TeamSpec.from_env(env)
    config = OnPolicyConfig(actor=NetworkConfig(num_cells=[8]))
    made = build_learners(team, config, learners)
    policy = TeamPolicy(actor for own in made for actor in own.actors.values())
    for actor in policy.module:
        always(tensors_of(actor), K)
    match = MatchPolicy(policy, team, SEATS, envs, n_slots=n_slots, block=4, **kwargs)
    for players in match.players:
        for slot in range(n_slots):
            networks = players.copy_of(slot)
            always(networks, slot)
            players.load(slot, networks)
    match.chances.fill_(1.0)
    return match


def rollouts(match, env, n, execution="eager", steps=20):
    frames = env.batch_size.numel() * steps
    collector = RolloutCollector(env, match, frames_per_batch=frames, execution=execution)
    return collector, [collector.rollout() for _ in range(n)]


@pytest.mark.parametrize("learners", [None, {"away": {"lr": 1e-3}}], ids=["joined", "apart"])
@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_seat_keeps_its_player_for_a_whole_episode(execution, learners):
    env = with_players(Race(24, seed=0), ["home", "away"])
    match = match_of(env, [8, 10, 6], learners=learners)
    collector, batches = rollouts(match, env, 3, execution)
    match.chances.zero_()[:, 3] = 1.0  # matchmaking changes in place
    batches += [collector.rollout() for _ in range(3)]
    assert collector.execution == execution
    if execution == "trace":
        assert len(collector._captured._programs) == 1
    batch = torch.cat(batches, 1)
    home, away = (batch[name, "action"] for name in ("home", "away"))
    learns = {name: batch[name, "learns"] for name in ("home", "away")}
    # In the first envs all learn, then the home seat, then the away seat.
    assert (home[:8] == K).all() and (away[:8] == K).all()
    assert (home[8:18] == K).all() and (away[8:18] < K).all()
    assert (home[18:] < K).all() and (away[18:] == K).all()
    for name, action in (("home", home), ("away", away)):
        assert torch.equal(learns[name], action == K)
        player = batch[name, "player"]
        assert torch.equal(player, torch.where(action == K, 0, action + 1))
    swapped, episodes, first = 0, 0, set()
    ids = batch["collector", "traj_ids"]
    for rows, action in ((slice(8, 18), away), (slice(18, 24), home)):
        for episode in ids[rows].unique():
            own = action[rows][ids[rows] == episode]
            episodes += 1
            swapped += int((own != own[0, 0]).any())
            first.add(int(own[0, 0]))
    assert episodes > 100 and swapped == 0 and first == set(range(K))
    assert (home[18:, -20:] == 3).all() and (away[8:18, -20:] == 3).all()


def test_match_of_copies_acts_as_the_policy():
    env = with_players(Race(12, seed=0), ["home", "away"])
    match = match_of(env, [0, 6, 6])
    torch.manual_seed(3)
    for actor, players in zip(match.policy.module, match.players):
        for value in tensors_of(actor).values():
            torch.nn.init.normal_(value.data)
        for slot in range(K):
            players.store(slot, actor)
    td = env.reset()
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        own, found = match.policy(td.copy()), match(td.copy())
    for name in ("home", "away"):
        torch.testing.assert_close(found[name, "action"], own[name, "action"])
        torch.testing.assert_close(found[name, "action_log_prob"], own[name, "action_log_prob"])


def test_players_are_drawn_in_proportion_to_chances_of_the_seat():
    env = with_players(Race(3000, seed=0), ["home", "away"])
    match = match_of(env, [0, 2000, 1000])
    match.chances.copy_(torch.tensor([[0.1, 0.0, 0.6, 0.3], [0.0, 1.0, 0.0, 0.0]]))
    found = match(env.reset())
    share = torch.bincount(found["away", "player"][:2000, 0], minlength=5) / 2000
    torch.testing.assert_close(share, torch.tensor([0.0, 0.1, 0.0, 0.6, 0.3]), atol=0.05, rtol=0.0)
    assert (found["home", "player"][2000:] == 2).all()


def test_guest_acts_in_seats_where_it_was_drawn():
    def guest(td):
        for name in ("home", "away"):
            td[name, "action"] = torch.full((*td.shape, 2), 2)
        return td

    env = with_players(Race(12, seed=0), ["home", "away"])
    match = match_of(env, [4, 4, 4], guests=[guest])
    match.chances.zero_()[:, K] = 1.0
    _, [batch] = rollouts(match, env, 1)
    assert (batch["away", "action"][4:8] == 2).all() and (batch["home", "action"][8:] == 2).all()
    assert (batch["away", "player"][4:8] == K + 1).all()
    assert (batch["home", "action"][:8] == K).all()
    assert match.in_use(batch[:, -1]) == {K}


def test_stored_players_have_separate_recurrent_states():
    memory = RecurrentNetworkConfig([8], memory=MemoryConfig("gru", size=4))
    env = Arena(10, n_agents=2, seed=0)
    team = TeamSpec.from_env(env)
    [learner] = build_learners(team, OnPolicyConfig(actor=memory, window=5))
    policy = TeamPolicy(learner.actors.values())
    env = with_players(with_memory(env, policy), ["agents"])
    seats = [{"agents": [0]}, {"agents": [1]}]
    match = MatchPolicy(policy, TeamSpec.from_env(env), seats, [0, 5, 5], n_slots=1)
    [players] = match.players
    torch.manual_seed(1)
    networks = {name: torch.randn_like(x) for name, x in players.copy_of(0).items()}
    players.load(0, networks)
    match.chances.fill_(1.0)
    _, [batch] = rollouts(match, env, 1)
    [actor] = policy.module
    mine = {name: value.clone() for name, value in tensors_of(actor).items()}
    live, other = torch.tensor([[True, False]] * 5 + [[False, True]] * 5), networks
    for step in range(19):
        now, then = batch[:, step], batch[:, step + 1]
        goes_on = ~now["next", "done"].squeeze(-1)
        for tensors, rows in ((mine, live), (other, ~live)):
            for name, value in tensors_of(actor).items():
                value.data.copy_(tensors[name])
            following = actor(now.clone())["next", "agents", "hidden"]
            rows = rows & goes_on.unsqueeze(-1)
            torch.testing.assert_close(following[rows], then["agents", "hidden"][rows])


def test_invalid_arguments_raise():
    env = Race(4, seed=0)
    team = TeamSpec.from_env(env)
    [learner] = build_learners(team, OnPolicyConfig())
    policy = TeamPolicy(learner.actors.values())
    with pytest.raises(ValueError, match=r"envs is \[2, 2\], expected 3 integers"):
        MatchPolicy(policy, team, SEATS, [2, 2], n_slots=1)
    with pytest.raises(ValueError, match="a seat has group 'awy', expected one of home, away"):
        MatchPolicy(policy, team, [{"home": [0, 1]}, {"awy": [0, 1]}], [2, 1, 1], n_slots=1)
    with pytest.raises(
        ValueError, match=r"have agents \[\] of group 'away', expected each of 0 to 1"
    ):
        MatchPolicy(policy, team, [{"home": [0, 1]}, {}], [2, 1, 1], n_slots=1)
    with pytest.raises(SpecError, match="matches have 3 envs, found a step of shape"):
        MatchPolicy(policy, team, SEATS, [1, 1, 1], n_slots=1)(env.reset())
    match = MatchPolicy(policy, team, SEATS, [2, 1, 1], n_slots=1)
    with pytest.raises(SpecError, match=r"has no \('home', 'player'\)"):
        match(env.reset())
