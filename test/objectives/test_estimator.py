"""The value estimator: done flags, rewards and values of dead agents, by hand."""

import pytest
import torch
from echo import make_echo
from samples import assert_same, make_group, make_trajectory, without_mask
from tensordict import TensorDict
from torch import nn
from torchrl.objectives.value import MultiAgentGAE

from torchrl_marl.learners.config import OnPolicyConfig
from torchrl_marl.learners.on_policy import OnPolicyLearner
from torchrl_marl.modules import NetworkConfig, ValueNorm, make_critic
from torchrl_marl.objectives import TeamGAE
from torchrl_marl.objectives import estimator as estimator_module
from torchrl_marl.objectives.flags import blank_masked_inputs, share


def estimate(bootstrap, *, gamma=0.5, lmbda=1.0, **entries):
    """Two agents, one env; each entry is a list of rows, one a step."""
    group = make_group(n=2, o=1)
    td = {"next": {"car": {}}, "car": {}}
    steps = len(entries["value"])
    for name, default in (("value", None), ("next_value", None), ("reward", 0.0)):
        rows = torch.tensor(entries[name]) if name in entries else torch.full((steps, 2), default)
        where = td["car"] if name == "value" else td["next"]["car"]
        where["reward" if name == "reward" else "observation"] = rows.view(1, steps, 2, 1)
    for name, where in (("mask", td["car"]), ("next_mask", td["next"]["car"])):
        rows = entries.get(name, [[True, True]] * steps)
        where["mask"] = torch.tensor(rows).view(1, steps, 2)
    for name in ("terminated", "truncated"):
        own = torch.tensor(entries.get(f"own_{name}", [[False] * 2] * steps))
        root = torch.tensor(entries.get(name, [False] * steps))
        td["next"]["car"][name] = own.view(1, steps, 2, 1)
        td["next"][name] = root.view(1, steps, 1)
    for where in (td["next"], td["next"]["car"]):
        where["done"] = where["terminated"] | where["truncated"]
    td = TensorDict(td, [1, steps])
    estimator = TeamGAE(
        gamma=gamma,
        lmbda=lmbda,
        value_network=make_echo(group),
        group=group,
        bootstrap=bootstrap,
    )
    out = estimator(td)
    assert out is td
    return td["car", "advantage"][0, ..., 0], td["car", "value_target"][0, ..., 0]


# Agent 1 dies in step 0; in step 1 agent 0 earns 4; then the episode ends.
DEATH = {
    "value": [[1.0, 2.0], [3.0, 77.0]],
    "next_value": [[3.0, 88.0], [5.0, 99.0]],
    "reward": [[1.0, 1.0], [4.0, -50.0]],
    "mask": [[True, True], [True, False]],
    "next_mask": [[True, False], [False, False]],
    "own_terminated": [[False, True], [True, True]],
    "terminated": [False, True],
}


def test_buffers_are_on_the_device_of_the_network():
    # CUDA graphs read no tensors on other devices; gamma and lmbda are tensors.
    group = make_group(n=2, o=1)
    network = make_echo(group)
    network.register_parameter("weight", nn.Parameter(torch.empty(1, device="meta")))
    estimator = TeamGAE(gamma=0.5, lmbda=1.0, value_network=network, group=group)
    assert {x.device.type for x in estimator.buffers()} == {"meta"}


def test_team_bootstrap_gives_dead_agents_the_rewards_of_living_ones():
    advantage, target = estimate("team", **DEATH)
    # Step 1: both earn 4 and have the value of agent 0: 4 - 3.
    assert advantage[1].tolist() == [1.0, 1.0]
    # Step 0: 1 + 0.5 * 3 - 1 + 0.5 * 1 and 1 + 0.5 * 3 - 2 + 0.5 * 1
    assert advantage[0].tolist() == [2.0, 1.0]
    assert target[0].tolist() == [3.0, 3.0]  # 1 + 0.5 * 4 for both


GAMMA, EPISODE = 0.99, 40
REMAINING = [sum(GAMMA**k for k in range(EPISODE - t)) for t in range(EPISODE + 1)]  # 33.10, ...


@pytest.mark.parametrize("lmbda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("steps", [EPISODE, 15, 1])
def test_early_deaths_are_credited_with_the_whole_team_return(lmbda, steps):
    """The reward is 1 in each of 40 steps. Agent 1 dies in the first. Batches may be shorter."""
    assert round(REMAINING[0], 2) == 33.10
    ends = [t == EPISODE for t in range(1, steps + 1)]
    nobody_told = [-500.0] * steps  # the critic's values of dead agents, which are masked
    _, target = estimate(
        "team",
        gamma=GAMMA,
        lmbda=lmbda,
        value=[[v, dead] for v, dead in zip(REMAINING, [REMAINING[0], *nobody_told[1:]])],
        next_value=[[v, dead] for v, dead in zip(REMAINING[1:], nobody_told)],
        reward=[[1.0, 1.0]] + [[1.0, -50.0]] * (steps - 1),
        mask=[[True, t == 0] for t in range(steps)],
        next_mask=[[not end, False] for end in ends],
        own_terminated=[[end, True] for end in ends],
        terminated=ends,
    )
    expected = torch.tensor(REMAINING[:steps]).unsqueeze(-1).expand(-1, 2)
    torch.testing.assert_close(target, expected, rtol=1e-5, atol=1e-4)


def test_dead_agents_have_the_mean_value_of_acting_ones():
    """Of three agents, agent 2 is dead and agent 1 waits; the critic values agent 0 only."""
    group = make_group(n=3, o=1)
    estimator = TeamGAE(gamma=0.5, lmbda=1.0, value_network=make_echo(group), group=group)
    living = torch.tensor([[True, True, False]])
    acting = torch.tensor([[True, False, False]])
    value = torch.tensor([[[3.0], [100.0], [float("nan")]]])

    def shared(told):
        sources = estimator._value_sources(told, living)
        return share(value, living, sources, estimator.per_group).flatten().tolist()

    assert shared(acting) == [3.0, 100.0, 3.0]
    assert shared(living) == [3.0, 100.0, 51.5]
    assert shared(torch.zeros_like(acting)) == [3.0, 100.0, 51.5]  # none acts: mean of the living
    nobody = torch.zeros_like(living)
    assert share(value, nobody, nobody, estimator.per_group).flatten().tolist() == [0.0] * 3


def test_state_with_as_many_features_as_agents_is_not_masked():
    group = make_group(n=3, state=3)
    critic = make_critic(group, NetworkConfig([8]), centralized="state")
    td = make_trajectory(group, 4, 6, alive=0.4)
    estimator = TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, group=group)
    seen = critic(td.clone())["car", "state_value"]
    value = estimator(td)["car", "state_value"]
    living = ~td["car"].get("done", ~td["car", "mask"].unsqueeze(-1))
    torch.testing.assert_close(value[living], seen[living])
    inputs = blank_masked_inputs(td.select("state", ("car", "observation")), ("car", "mask"), td)
    assert torch.equal(inputs["state"], td["state"])
    assert (inputs["car", "observation"][~td["car", "mask"]] == 0).all()


def test_agent_bootstrap_ends_the_return_at_death():
    advantage, target = estimate("agent", **DEATH)
    assert advantage[1].tolist() == [1.0, 0.0]
    assert advantage[0].tolist() == [2.0, 1.0 - 2.0]
    assert target[0].tolist() == [3.0, 1.0]


def test_team_bootstrap_uses_the_root_done_flags():
    """All agents are done and the root is not: the return continues."""
    entries = {
        "value": [[0.0, 0.0], [0.0, 0.0]],
        "next_value": [[0.0, 0.0], [8.0, 8.0]],
        "reward": [[1.0, 1.0], [2.0, 2.0]],
        "own_terminated": [[True, True], [True, True]],
    }
    assert estimate("team", **entries)[0].tolist() == [[1 + 0.5 * 6] * 2, [2 + 0.5 * 8] * 2]
    assert estimate("agent", **entries)[0].tolist() == [[1.0] * 2, [2.0] * 2]


def test_time_limit_bootstraps_from_the_last_observation():
    entries = {
        "value": [[0.0, 0.0]],
        "next_value": [[6.0, 10.0]],
        "truncated": [True],
        "own_truncated": [[True, True]],
    }
    for bootstrap in ("team", "agent"):
        assert estimate(bootstrap, **entries)[0].tolist() == [[3.0, 5.0]]
    terminated = {**entries, "terminated": [True], "truncated": [False]}
    assert estimate("team", **terminated)[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_truncated_agent_bootstraps_from_its_last_observation(bootstrap):
    """Agent 1 is truncated in mid-episode: its next mask is False, its last observation counts."""
    entries = {
        "value": [[0.0, 0.0], [0.0, 0.0]],
        "next_value": [[0.0, 10.0], [0.0, 20.0]],
        "mask": [[True, True], [True, False]],
        "next_mask": [[True, False], [True, False]],
        "own_truncated": [[False, True], [False, True]],
    }
    advantage, _ = estimate(bootstrap, **entries)
    # The team continues without it, with its value 0 from then on.
    assert advantage[0, 1].item() == 5.0
    dead = {
        **entries,
        "own_terminated": entries["own_truncated"],
        "own_truncated": [[False] * 2] * 2,
    }
    assert estimate(bootstrap, **dead)[0][0, 1].item() == 0.0


def test_agent_terminated_at_its_limit_does_not_bootstrap():
    """Agent 1 has both flags; the team's value is then 4, that of agent 0."""
    entries = {
        "value": [[0.0, 0.0]],
        "next_value": [[4.0, 10.0]],
        "next_mask": [[True, False]],
        "own_terminated": [[False, True]],
        "own_truncated": [[False, True]],
    }
    assert estimate("team", **entries)[0].tolist() == [[2.0, 2.0]]
    assert estimate("agent", **entries)[0].tolist() == [[2.0, 0.0]]


def test_agent_bootstrap_skips_waiting_steps():
    """Agent 1 waits in step 1: its reward counts for step 0 and is not discounted."""
    advantage, _ = estimate(
        "agent",
        value=[[0.0, 1.0], [0.0, 77.0], [0.0, 2.0]],
        next_value=[[0.0, 88.0], [0.0, 2.0], [0.0, 0.0]],
        reward=[[0.0, 1.0], [0.0, 3.0], [0.0, 7.0]],
        mask=[[True, True], [True, False], [True, True]],
        next_mask=[[True, False], [True, True], [False, False]],
        terminated=[False, False, True],
        own_terminated=[[False] * 2, [False] * 2, [True] * 2],
    )
    # 7 - 2; then 1 + 3 + 0.5 * 2 - 1 + 0.5 * 5
    assert advantage[:, 1].tolist() == [6.5, 0.0, 5.0]


def test_rewards_of_a_fully_dead_group_have_no_effect():
    advantage, _ = estimate(
        "team",
        value=[[0.0, 0.0], [0.0, 0.0]],
        next_value=[[0.0, 0.0], [0.0, 0.0]],
        reward=[[1.0, 1.0], [float("nan"), 1e9]],
        mask=[[True, True], [False, False]],
        next_mask=[[False, False], [False, False]],
        terminated=[False, True],
        own_terminated=[[True, True], [True, True]],
    )
    assert advantage[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
def test_root_reward_is_shared_by_all_agents(bootstrap):
    group = make_group()
    critic = make_critic(group, NetworkConfig([8]))
    td = make_trajectory(group, 4, 5, alive=2.0)
    reward = torch.randn(4, 5, 1)
    expanded = td.clone()
    expanded["next", "car", "reward"] = reward.unsqueeze(-2).expand(4, 5, 3, 1).clone()
    td["next", "reward"] = reward
    settings = {"gamma": 0.9, "lmbda": 0.8, "value_network": critic, "bootstrap": bootstrap}
    root = TeamGAE(**settings, group=group)
    root.set_keys(reward="reward")
    root(td)
    TeamGAE(**settings, group=group)(expanded)
    assert_same(td["car", "advantage"], expanded["car", "advantage"])


def test_without_masks_equals_torchrl():
    group = make_group()
    critic = make_critic(group, NetworkConfig([8]))
    td = make_trajectory(group, 4, 6, alive=2.0)
    theirs = td.clone()
    settings = {"gamma": 0.9, "lmbda": 0.8, "value_network": critic}
    estimator = MultiAgentGAE(**settings)
    estimator.set_keys(
        advantage=("car", "advantage"),
        value_target=("car", "value_target"),
        value=("car", "state_value"),
        reward=("car", "reward"),
        done="done",
        terminated="terminated",
    )
    estimator(theirs)
    for which in (group, without_mask(group)):
        ours = td.clone()
        TeamGAE(**settings, group=which)(ours)
        for leaf in ("advantage", "value_target", "state_value"):
            torch.testing.assert_close(ours["car", leaf], theirs["car", leaf], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [(6,), (2, 3, 6)])
def test_any_batch_dims(batch):
    group = make_group()
    critic = make_critic(group, NetworkConfig([8]))
    td = make_trajectory(group, *batch)
    estimator = TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, group=group)
    one = estimator(td.clone())["car", "advantage"]
    rows = td.reshape(-1, 6) if len(batch) > 1 else td.unsqueeze(0)
    for i, row in enumerate(rows.unbind(0)):
        alone = estimator(row.clone())["car", "advantage"]
        torch.testing.assert_close(one.reshape(-1, *alone.shape)[i], alone)


def test_values_are_denormalized_with_updated_statistics():
    group = make_group()
    norm = ValueNorm(decay=0.5)
    critic = make_critic(group, NetworkConfig([8]), value_norm=norm)
    settings = {"gamma": 0.9, "lmbda": 0.8, "value_network": critic, "group": group}
    td = make_trajectory(group, 4, 6, alive=2.0)
    before = critic(td.clone())["car", "state_value"].detach()
    TeamGAE(**settings, value_norm=norm)(td)
    assert not torch.allclose(td["car", "state_value"], before)
    torch.testing.assert_close(norm.normalize(td["car", "state_value"]), before)  # was identity
    torch.testing.assert_close(critic(td.clone())["car", "state_value"], td["car", "state_value"])


def test_no_gradient_reaches_the_estimates():
    group = make_group()
    critic = make_critic(group, NetworkConfig([8]))
    td = make_trajectory(group, 4, 6)
    TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, group=group)(td)
    for leaf in ("advantage", "value_target", "state_value"):
        assert not td["car", leaf].requires_grad


def test_invalid_settings_and_rewards_raise():
    group = make_group()
    critic = make_critic(group)
    with pytest.raises(ValueError, match="'nobody'.*'team' or 'agent'"):
        TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, bootstrap="nobody")
    td = make_trajectory(group, 4, 6)
    td["next", "car", "reward"] = torch.zeros(4, 6, 3, 2)
    with pytest.raises((ValueError, RuntimeError), match="reward|expand|size"):
        TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, group=group)(td)
    td["next", "wrong"] = torch.zeros(4, 5, 3, 1).expand(4, 5, 3, 1)[:, :1].expand(4, 6, 3, 1)
    td["next", "wrong"] = td["next", "wrong"].unsqueeze(-1)
    estimator = TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, group=group)
    estimator.set_keys(reward="wrong")
    with pytest.raises(ValueError, match=r"'wrong' has shape \(4, 6, 3, 1, 1\)"):
        estimator(td)


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("centralized", [False, True])
def test_fast_values_evaluate_fewer_steps(bootstrap, centralized, monkeypatch):
    monkeypatch.setattr(estimator_module, "_CACHED_CHUNK", 16)
    torch.manual_seed(0)
    group = make_group(n=2, o=3)
    critic = make_critic(group, NetworkConfig([8]), centralized=centralized)
    td = make_trajectory(group, 4, 5, alive=1.0)
    observation, following = td["car", "observation"], td["next", "car", "observation"]
    following[:, :-1] = observation[:, 1:]
    following[2, 1] += 1  # an episode ends there, and the next one starts elsewhere
    arguments = {"gamma": 0.9, "lmbda": 0.9, "value_network": critic, "group": group}
    plain, fast = (TeamGAE(**arguments, bootstrap=bootstrap) for _ in range(2))
    fast.fast_values = True
    expected, read = plain(td.copy()), []
    critic.register_forward_hook(lambda module, inputs, output: read.append(output.numel()))
    found = fast(td.copy())
    assert read == [
        16,
        4,
        4 + 1,
    ]  # 20 steps in two parts; the last next steps, and the one that ends
    for key in ("advantage", "value_target", "state_value"):
        torch.testing.assert_close(found["car", key], expected["car", key], rtol=1e-5, atol=1e-6)


def test_fast_values_equal_plain_ones_with_masks():
    torch.manual_seed(0)
    group = make_group(n=3, o=2)
    critic = make_critic(group, NetworkConfig([8]), centralized=True)
    td = make_trajectory(group, 6, 7)
    plain, fast = (TeamGAE(gamma=0.9, lmbda=0.9, value_network=critic, group=group) for _ in "ab")
    fast.fast_values = True
    expected, found = plain(td.copy()), fast(td.copy())
    for key in ("advantage", "value_target", "state_value"):
        torch.testing.assert_close(found["car", key], expected["car", key], rtol=1e-5, atol=1e-6)


def test_compiled_learner_on_cpu_uses_fast_values():
    group = make_group(n=2, o=3)
    for execution, fast in (("eager", False), ("trace", False), ("compile", True)):
        learner = OnPolicyLearner({"car": group}, OnPolicyConfig(), execution=execution)
        assert learner.losses["car"].value_estimator.fast_values is fast
