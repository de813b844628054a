"""Policies, masks and settings that are invalid for a team."""

import itertools

import numpy as np
import pytest
import torch
from meadow import make_meadow, make_team
from samples import make_group
from team_learners import E, config_of, learners_of, policy_of
from tensordict import TensorDict
from torchrl.envs import Transform, TransformedEnv

from torchrl_marl import TeamSpec
from torchrl_marl.collectors import RolloutCollector, TeamPolicy
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError, SpecError
from torchrl_marl.learners import OnPolicyConfig, build_learners
from torchrl_marl.learners.team_checks import check_cooperative_agents
from torchrl_marl.modules import NetworkConfig, RandomActor, make_actor


@pytest.mark.parametrize("layout", ["two", "three"])
def test_policy_without_action_of_a_group_raises(layout):
    env = make_meadow(E, layout)
    team = TeamSpec.from_env(env)
    first, group = team.groups.values()
    actor = make_actor(first, NetworkConfig([8]))
    message = rf"group 'mice' has no action: .*\('mice', 'action'\).*\('{first.name}', 'action'\)"
    with pytest.raises(SpecError, match=message):
        TeamPolicy([actor], team)
    with pytest.raises(SpecError, match=message):
        RolloutCollector(env, TeamPolicy([actor]), frames_per_batch=E)
    silent = RolloutCollector(env, lambda td: actor(td), frames_per_batch=E)
    with pytest.raises(SpecError, match=message):
        silent.next()
    with pytest.raises(SpecError, match=r"\('mice', 'action'\)"):
        env.rollout(2, TeamPolicy([actor]))
    whole = TeamPolicy([actor, RandomActor(group)], team)
    assert RolloutCollector(env, whole, frames_per_batch=E).next().shape == (E, 1)


def test_policy_without_action_of_a_vmas_group_raises():
    env = VmasEnv("simple_tag", num_envs=3, seed=0)
    policy = TeamPolicy([RandomActor(TeamSpec.from_env(env).groups["adversary"])])
    with pytest.raises(SpecError, match=r"group 'agent' has no action.*\('agent', 'action'\)"):
        env.rollout(2, policy)


class Wrong(Transform):
    """Changes the mask so that it does not match its spec."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def _call(self, next_tensordict):
        key = ("mice", "mask")
        return next_tensordict.set(key, self.change(next_tensordict.get(key)))

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mask: mask.float(), "is torch.float32, expected torch.bool"),
        (lambda mask: mask.unsqueeze(-1), r"is \(8, 3, 1\), expected \(8, 3\)"),
    ],
    ids=["type", "shape"],
)
@pytest.mark.parametrize("joined", [True, False])
def test_mask_of_wrong_shape_or_dtype_raises(change, message, joined):
    env = make_meadow(E, "two")
    learners = learners_of(TeamSpec.from_env(env), config_of(), () if joined else ["mice"])
    collector = RolloutCollector(
        TransformedEnv(env, Wrong(change)), policy_of(learners), frames_per_batch=E
    )
    with pytest.raises(SpecError, match=rf"group 'mice': \('mice', 'mask'\) {message}"):
        collector.next()


MISFITS = {
    "sharing_index": (
        {"actor": NetworkConfig([8], sharing="index", sharing_index=[0, 1])},
        r"group 'cats\+mice': actor: sharing_index has 2 entries, expected 5",
    ),
    "critic's sharing_index": (
        {
            "critic": {"sharing": "index", "sharing_index": [0, 1, 1]},
        },
        r"group 'cats\+mice': critic: sharing_index has 3 entries, expected 5",
    ),
    "sharing": (
        {"actor": NetworkConfig([8], sharing="gruop")},
        r"group 'cats\+mice': actor: sharing is 'gruop'; did you mean 'group'",
    ),
    "clusters": (
        {"actor": NetworkConfig([8], sharing="clusters")},
        r"group 'cats\+mice': actor: sharing is 'clusters', but sharing_index is not set",
    ),
    "ippo with attention": (
        {"algorithm": "ippo", "critic": {"architecture": "attention"}},
        r"group 'cats': critic: .*architecture 'attention'.*algorithm=mappo",
    ),
    "no state": (
        {"central_input": "state"},
        r"group 'cats\+mice': critic: .*no 'state'.*central_input",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_settings_invalid_for_the_team_raise(name):
    settings, message = MISFITS[name]
    team = make_team("two", state=None)
    with pytest.raises(ConfigError, match=message):
        build_learners(team, config_of(**settings))


@pytest.mark.parametrize("n_groups", [1, 2])
@pytest.mark.parametrize("leaf", ["done", "terminated"])
def test_batch_without_done_flags_of_agents_raises(n_groups, leaf):
    env = Arena(4, n_agents=4, n_groups=n_groups, seed=0)
    [learner] = build_learners(TeamSpec.from_env(env), OnPolicyConfig(minibatch_size=20))
    policy = TeamPolicy(learner.actors.values())
    batch = RolloutCollector(env, policy, frames_per_batch=80).rollout()
    for name in learner.groups:
        del batch["next", name, leaf]
    with pytest.raises(SpecError, match=f"the batch has no '{leaf}' of its agents"):
        learner.learn(batch)


COSTS = (0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 0.7, 1.1)


@pytest.mark.parametrize("n_steps", [100, 150, 1500])
@pytest.mark.parametrize("rounding", [0.0, 2e-7], ids=["constant", "rounded"])
def test_constant_rewards_do_not_compete(n_steps, rounding):
    """Float32 means of equal numbers differ from these, which correlates any two by 1 or -1."""
    group = make_group("categorical", n=2, mask=False)
    every_other = torch.arange(n_steps).remainder(2).view(1, n_steps, 1, 1)
    rounded = 1 + rounding * every_other * torch.tensor([[1.0], [-1.0]])
    for costs in itertools.combinations(COSTS, 2):
        reward = -(torch.tensor(costs).view(2, 1) * rounded).expand(4, n_steps, 2, 1)
        batch = TensorDict({"next": {"car": {"reward": reward}}}, [4, n_steps])
        check_cooperative_agents([group], batch, "learner.algorithm=iql")


def test_small_opposed_changes_of_large_rewards_compete():
    """The second agent loses the thousandth that the first one earns more."""
    group = make_group("categorical", n=2, mask=False)
    more = 0.001 * torch.rand(4, 20, 1)
    batch = TensorDict({"next": {"car": {"reward": torch.stack([1 + more, 1 - more], 2)}}}, [4, 20])
    with pytest.raises(ConfigError, match=r"'car_0' and 'car_1' compete: .* of -1\.00 in"):
        check_cooperative_agents([group], batch, "learner.algorithm=iql")


def is_refused(*rewards):
    """Whether one mixer is refused for agents with these rewards, ``[E, T]`` each."""
    group = make_group("categorical", n=len(rewards), mask=False)
    reward = torch.stack(rewards, -1).unsqueeze(-1)
    batch = TensorDict({"next": {"car": {"reward": reward}}}, reward.shape[:2])
    try:
        check_cooperative_agents([group], batch, "learner.algorithm=iql")
    except ConfigError:
        return True
    return False


def test_opposed_trends_of_independent_agents_do_not_compete():
    """One env: distances of random walks are correlated below -0.5 in a fifth of the cases."""
    torch.manual_seed(0)
    opposed = 0
    for _ in range(50):
        one, other = torch.randn(2, 1, 100).cumsum(-1)
        opposed += np.corrcoef(one[0], other[0])[0, 1] < -0.5
        assert not is_refused(one, other) and not is_refused(one, one)
        assert is_refused(one, 3 - 2 * one)
    assert opposed >= 8


@pytest.mark.parametrize(("num_envs", "n_steps"), [(1, 12), (12, 1), (4, 3)])
def test_few_rewards_are_no_proof_of_competition(num_envs, n_steps):
    """Of 12 independent rewards 5 % have a correlation below -0.5."""
    torch.manual_seed(0)
    found = [is_refused(*torch.randn(2, num_envs, n_steps)) for _ in range(400)]
    assert sum(found) <= 3
    one = torch.randn(num_envs, n_steps)
    assert is_refused(one, 5 - one)
