"""Advantages of turn-based agents: from each turn to the same agent's next turn."""

from collections import defaultdict

import pytest
import torch
from samples import POISON, assert_same
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import Bounded, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.envs import MarlEnv
from torchrl_marl.envs.toy import Nim
from torchrl_marl.functional import gae
from torchrl_marl.modules import NetworkConfig, ValueNorm, make_actor, make_critic
from torchrl_marl.objectives import MAPPOLoss, TeamGAE
from torchrl_marl.objectives.estimator import transition_complete

GAMMA, LMBDA = 0.9, 0.5


class Whims(MarlEnv):
    """Random masks, rewards and done flags; observations are the values."""

    def __init__(self, num_envs, **kwargs):
        super().__init__(num_envs, **kwargs)
        self.register_agent(AgentSpec("agent", 3, Unbounded((1,)), Bounded(-1, 1, (1,))))

    def _reset(self, tensordict):
        return {"agent": {"observation": self._noise(), "mask": self._chance(0.4).squeeze(-1)}}

    def _step(self, tensordict):
        own = {"observation": self._noise(), "reward": self._noise()}
        own |= {"terminated": self._chance(0.05), "truncated": self._chance(0.05)}
        return {"agent": {**own, "mask": self._chance(0.4).squeeze(-1)}}

    def _noise(self):
        return torch.randn(self.num_envs, 3, 1)

    def _chance(self, p):
        return torch.rand(self.num_envs, 3, 1) < p


def whims(num_envs=200, steps=15):
    env = Whims(num_envs, max_steps=9, seed=0)
    group = TeamSpec.from_env(env).groups["agent"]
    return group, env.rollout(steps, break_when_any_done=False)


def table(name="agent"):
    """A critic whose value is the observation."""
    return TensorDictModule(lambda x: 1 * x, [(name, "observation")], [(name, "state_value")])


def estimate(group, td, critic=None, gamma=GAMMA, lmbda=LMBDA, **settings):
    critic = table(group.name) if critic is None else critic
    settings = {"gamma": gamma, "lmbda": lmbda, "group": group, "bootstrap": "agent"} | settings
    return TeamGAE(value_network=critic, **settings)(td)


# ------------------------------------------------------------------------------ worked by hand


def test_two_player_game_by_hand():
    """Black moves first. Each has three moves and is also rewarded in the other's turns."""
    group = TeamSpec([AgentSpec("player", 2, Unbounded((1,)), Bounded(-1, 1, (1,)))])
    nan = float("nan")
    black = [4.0, nan, 2.0, nan, 6.0, nan]
    white = [nan, 3.0, nan, -1.0, nan, 8.0]
    value = torch.tensor([black, white]).T.view(1, 6, 2, 1)
    reward = torch.tensor([[1.0, -10, 1, 2, 0, -10], [-10.0, 1, 5, 0, -10, 20]]).T
    end = torch.tensor([False] * 5 + [True]).view(1, 6, 1)
    flags = {"done": end, "terminated": end, "truncated": torch.zeros_like(end)}
    own = {name: flag.unsqueeze(-2).expand(1, 6, 2, 1) for name, flag in flags.items()}
    following = torch.cat([value[:, 1:], torch.full((1, 1, 2, 1), nan)], 1)
    td = TensorDict(
        {
            "player": {"observation": value, "mask": ~value.isnan().squeeze(-1)},
            "next": {
                "player": {
                    "observation": following,
                    "mask": ~following.isnan().squeeze(-1),
                    "reward": reward.view(1, 6, 2, 1),
                    **own,
                },
                **flags,
            },
        },
        [1, 6],
    )
    estimate(group.groups["player"], td)
    advantage = td["player", "advantage"][0, ..., 0]
    # Black earns 1 - 10, 1 + 2 and 0 - 10 from turn to turn, so its errors are
    # -9 + .9 * 2 - 4 = -11.2, 3 + .9 * 6 - 2 = 6.4 and -10 - 6 = -16;
    # White earns 1 + 5, 0 - 10 and 20 (the -10 before its first turn does not count):
    # 6 + .9 * -1 - 3 = 2.1, -10 + .9 * 8 + 1 = -1.8 and 20 - 8 = 12. They add up by .9 * .5.
    black = [-11.2 + 0.45 * (6.4 + 0.45 * -16), 0, 6.4 + 0.45 * -16, 0, -16, 0]
    white = [0, 2.1 + 0.45 * (-1.8 + 0.45 * 12), 0, -1.8 + 0.45 * 12, 0, 12]
    torch.testing.assert_close(advantage, torch.tensor([black, white]).T)
    target = td["player", "value_target"][0, ..., 0]
    torch.testing.assert_close(target, advantage + value[0, ..., 0].nan_to_num())
    assert torch.equal(td["player", "loss_mask"], td["player", "mask"])


@pytest.mark.parametrize("blank", [0.0, 7.0])
def test_turns_cut_off_by_the_end_of_the_batch(blank):
    """Turns 0 and 2 of 4; the next one would be step 4 or later.

    The critic gives a masked observation the value ``blank``, which has no effect.
    """
    group, td = whims(1, 4)
    td["agent", "mask"] = torch.tensor([True, False, True, False]).view(1, 4, 1).expand(1, 4, 3)
    last = torch.tensor([[True, False, True]])  # agent 1 keeps waiting; the others act next
    td["next", "agent", "mask"] = torch.cat([td["agent", "mask"][:, 1:], last.unsqueeze(1)], 1)
    for flag in ("done", "terminated", "truncated"):
        td["agent", flag] = td["next", "agent", flag] = torch.zeros(1, 4, 3, 1).bool()
    td["agent", "observation"] = torch.tensor([4.0, 0, 2, 0]).view(1, 4, 1, 1).expand(1, 4, 3, 1)
    td["next", "agent", "observation"] = torch.full((1, 4, 3, 1), 6.0)
    td["next", "agent", "observation"][:, 1] = 2.0
    td["next", "agent", "reward"] = torch.ones(1, 4, 3, 1)
    keys = [("agent", "observation")], [("agent", "state_value")]
    for where in (td, td["next"]):
        where["agent", "observation"] = where["agent", "observation"] - blank
    estimate(group, td, TensorDictModule(lambda x: x + blank, *keys))
    first, second = 1 + 1 + 0.9 * 2 - 4, 1 + 1 + 0.9 * 6 - 2
    advantage = td["agent", "advantage"][0, ..., 0].T
    closed, open_ = [first + 0.45 * second, 0, second, 0], [first, 0, 0, 0]
    torch.testing.assert_close(advantage, torch.tensor([closed, open_, closed]))
    learned = td["agent", "loss_mask"][0].T
    assert learned.tolist() == [[True, False, turn, False] for turn in (True, False, True)]
    assert td["agent", "value_target"][0, 2, 1] == 2.0  # the critic's value


# ---------------------------------------------------------------- against own turns only


def own_turns(td, env, agent):
    """One agent's transitions: step, value, summed reward, next value, done, terminated."""
    now, after = td["agent"][env, :, agent], td["next", "agent"][env, :, agent]
    transition, found = None, []
    for t in range(td.shape[1]):
        if now["mask"][t]:
            if transition is not None:
                found.append((*transition, now["observation"][t], False, False))
            transition = (t, now["observation"][t], 0.0)
        if transition is not None:
            transition = (*transition[:2], transition[2] + after["reward"][t])
        if transition is not None and after["done"][t]:
            found.append((*transition, after["observation"][t], True, after["terminated"][t]))
            transition = None
    if transition is not None and after["mask"][-1]:
        found.append((*transition, after["observation"][-1], False, False))
    return found


def test_advantages_equal_gae_over_own_turns():
    group, td = whims()
    estimate(group, td)
    expected, learned = torch.zeros(td["agent"].shape), torch.zeros(td["agent"].shape).bool()
    counts = defaultdict(int)
    for env in range(len(td)):
        for agent in range(3):
            turns = own_turns(td, env, agent)
            if not turns:
                continue
            step, *columns = zip(*turns)
            value, reward, following, done, terminated = (
                torch.tensor(x).view(1, -1, 1, 1) for x in columns
            )
            settings = {"gamma": GAMMA, "lmbda": LMBDA}
            advantage, _ = gae(reward, value, following, done, terminated, **settings)
            expected[env, list(step), agent] = advantage.flatten()
            learned[env, list(step), agent] = True
            counts["done"] += int(done.sum())
            counts["truncated"] += int((done & ~terminated).sum())
    assert torch.equal(td["agent", "loss_mask"], learned)
    torch.testing.assert_close(td["agent", "advantage"].squeeze(-1), expected)
    # All cases occur.
    assert counts["done"] > counts["truncated"] > 50
    assert 50 < (td["agent", "mask"] & ~learned).sum() < learned.sum()


@pytest.mark.parametrize("batch", [(7,), (3, 2, 7)])
def test_transition_complete_equals_a_loop(batch):
    generator = torch.Generator().manual_seed(0)
    done, terminated, seen = (
        torch.rand(*batch, 4, 1, generator=generator) < p for p in (0.2, 0.1, 0.2)
    )
    done, expected = done | terminated, torch.zeros_like(done)
    later = torch.zeros_like(done[..., 0, :, :])
    for t in reversed(range(7)):
        later = terminated[..., t, :, :] | seen[..., t, :, :] | (~done[..., t, :, :] & later)
        expected[..., t, :, :] = later
    assert torch.equal(transition_complete(done, terminated, seen), expected)
    assert 0 < expected.sum() < expected.numel()


def test_first_moves_get_the_results_of_their_games():
    """Exactly the sum of a player's rewards; losers are rewarded in the winner's turn."""
    env = Nim(500, seed=0)
    td = env.rollout(10, break_when_any_done=False)
    over = td["next", "done"].squeeze(-1)
    first_game = torch.cat([over[:, :1], over], 1)[:, :-1].cummax(1).values.logical_not()
    first_game[:, 0] = True
    groups = TeamSpec.from_env(env).groups
    results = {}
    for name, group in groups.items():
        critic = TensorDictModule(
            lambda x: 0 * x[..., :1], [(name, "observation")], [(name, "state_value")]
        )
        estimate(group, td, critic, gamma=1.0, lmbda=1.0)
        turns = td[name, "mask"].squeeze(-1) & first_game
        reward = td["next", name, "reward"].flatten(1)
        results[name] = (reward * first_game).sum(1)
        played = turns.any(1)
        advantage = td[name, "advantage"].flatten(1)
        first = turns.int().argmax(1, keepdim=True)
        assert torch.equal(advantage.gather(1, first).squeeze(1)[played], results[name][played])
        assert td[name, "loss_mask"].squeeze(-1)[turns].all()
    assert torch.equal(results["first"], -results["second"])
    assert results["first"].abs().eq(1).all()


# ------------------------------------------------------------- open turns and masked entries


def make_loss(group, centralized, norm=None):
    torch.manual_seed(0)
    actor = make_actor(group, NetworkConfig([8]))
    critic = make_critic(group, NetworkConfig([8]), centralized=centralized, value_norm=norm)
    return MAPPOLoss(actor, critic, group=group, bootstrap="agent")


@pytest.mark.parametrize("centralized", [False, True])
@pytest.mark.parametrize("poison", POISON)
def test_masked_entries_and_open_turns_have_no_effect(centralized, poison):
    group, td = whims(20)
    with torch.no_grad():
        make_loss(group, centralized).actor_network(td)
    mask, living = td["agent", "mask"], group.living(td)
    seen = td["next", "agent", "mask"]
    seen = seen | (living & td["next", "agent", "truncated"].squeeze(-1))

    def run(td, after=lambda td: td):
        norm = ValueNorm()
        loss = make_loss(group, centralized, norm)
        loss.value_estimator(td)
        found = loss(after(td))
        sum(x for key, x in found.items() if key.startswith("loss_")).backward()
        grads = [p.grad for p in loss.parameters()]
        return [*found.values(), *grads, norm.running_mean, td["agent", "loss_mask"]]

    def assert_unchanged(before, after):
        assert all(bool(torch.isfinite(x).all()) for x in before)
        for x, y in zip(before, after):
            assert_same(x, y)

    before = run(td.clone())
    # In masked entries, and in open turns after the estimation.
    poisoned = td.clone()
    for key, kept in (
        (("agent", "observation"), mask),
        (("agent", "action"), mask),
        (("next", "agent", "observation"), seen),
        (("next", "agent", "reward"), living),
    ):
        poisoned[key][~kept] = poison
    assert_unchanged(before, run(poisoned))

    def spoil(td):
        td = td.clone()
        for leaf in ("advantage", "value_target", "state_value", "action_log_prob"):
            td["agent", leaf][~td["agent", "loss_mask"]] = poison
        return td

    assert_unchanged(before, run(td.clone(), spoil))


def test_open_turns_do_not_update_the_value_norm():
    group, td = whims(20)
    norm = ValueNorm(decay=0.0)
    estimate(group, td, value_norm=norm)
    targets = td["agent", "value_target"][td["agent", "loss_mask"]]
    assert (td["agent", "mask"] & ~td["agent", "loss_mask"]).any()
    assert norm.running_mean[0].item() == pytest.approx(targets.mean().item())


def test_team_bootstrap_has_no_open_turns():
    group, td = whims(20)
    estimate(group, td, bootstrap="team")
    assert "loss_mask" not in td["agent"].keys()
