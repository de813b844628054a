"""GAE: by hand, against TorchRL, against a slow reference, and with NaN in masked steps."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.objectives.value.functional import generalized_advantage_estimate

from torchrl_marl.functional import gae

GAMMA, LMBDA = 0.5, 0.5
POISON = [float("nan"), 1e9, float("inf")]


def column(values, dtype=torch.float64):
    """Time as the only dim that is not 1: ``[T, 1, 1]``."""
    return torch.tensor(values, dtype=dtype).view(-1, 1, 1)


def flags(times, n):
    flag = torch.zeros(n, 1, 1, dtype=torch.bool)
    flag[list(times)] = True
    return flag


def estimate(reward, value, next_value, done=(), terminated=(), mask=None, **kwargs):
    n = len(reward)
    kwargs = {"gamma": GAMMA, "lmbda": LMBDA, **kwargs}
    if mask is not None:
        mask = torch.tensor(mask, dtype=torch.bool).view(-1, 1)
    advantage, target = gae(
        column(reward),
        column(value),
        column(next_value),
        flags(done, n),
        flags(terminated, n),
        mask=mask,
        **kwargs,
    )
    return advantage.flatten().tolist(), target.flatten().tolist()


# -------------------------------------------------------------------------------- hand-worked


def test_three_steps_worked_out_by_hand():
    # deltas: 1 + .5*2 - 4 = -2; 2 + .5*6 - 2 = 3; 4 + .5*8 - 6 = 2. Decay .25.
    advantage, target = estimate([1, 2, 4], [4, 2, 6], [2, 6, 8])
    assert advantage == [-2 + 0.25 * 3.5, 3 + 0.25 * 2, 2]
    assert target == [advantage[0] + 4, advantage[1] + 2, advantage[2] + 6]


def test_termination_stops_bootstrap_and_recursion():
    # deltas: 1 + .5*2 - 4 = -2; 2 - 2 = 0; 4 + .5*8 - 6 = 2.
    advantage, _ = estimate([1, 2, 4], [4, 2, 6], [2, 6, 8], done=[1], terminated=[1])
    assert advantage == [-2, 0, 2]


def test_truncation_stops_only_the_recursion():
    # deltas: -2; 2 + .5*6 - 2 = 3; 2. The next value is that of the episode's last state.
    advantage, _ = estimate([1, 2, 4], [4, 2, 6], [2, 6, 8], done=[1])
    assert advantage == [-2 + 0.25 * 3, 3, 2]


def test_rewards_between_turns_belong_to_the_last_turn():
    # The agent acts at 0 and 3. Rewards while it waits belong to its step 0, undiscounted,
    # which bootstraps from its step 3 with one discount. Values of waiting steps are ignored.
    # delta_0 = 1 + 2 + 4 + .5*6 - 4 = 6; delta_3 = 8 + .5*10 - 6 = 7.
    advantage, target = estimate(
        [1, 2, 4, 8], [4, 99, 99, 6], [99, 99, 6, 10], mask=[True, False, False, True]
    )
    assert advantage == [6 + 0.25 * 7, 0, 0, 7]
    assert target == [advantage[0] + 4, 0, 0, 13]


def test_reward_at_termination_while_waiting():
    # delta_0 = 1 + 2 - 4 = -1: the episode terminates while the agent waits.
    advantage, _ = estimate(
        [1, 2, 4], [4, 99, 6], [99, 99, 8], done=[1], terminated=[1], mask=[True, False, True]
    )
    assert advantage == [-1, 0, 4 + 0.5 * 8 - 6]


def test_truncation_while_waiting_bootstraps():
    # delta_0 = 1 + 2 + .5*6 - 4 = 2: bootstraps from the episode's last state.
    advantage, _ = estimate([1, 2, 4], [4, 99, 6], [99, 6, 8], done=[1], mask=[True, False, True])
    assert advantage == [2, 0, 4 + 0.5 * 8 - 6]


def test_batch_end_while_waiting_bootstraps():
    # delta_0 = 1 + 2 + 4 + .5*6 - 4 = 6: bootstraps from the last state of the batch.
    advantage, _ = estimate([1, 2, 4], [4, 99, 99], [99, 99, 6], mask=[True, False, False])
    assert advantage == [6, 0, 0]


def test_waiting_from_the_first_step():
    advantage, target = estimate([1, 2], [99, 4], [4, 6], mask=[False, True])
    assert advantage == [0, 2 + 0.5 * 6 - 4]
    assert target == [0, 2 + 0.5 * 6]


def test_steps_after_death_have_no_effect():
    # The agent dies in step 1; its done stays. Later steps have no effect on earlier ones.
    advantage, target = estimate(
        [1, 2, 50, 60], [4, 2, 99, 99], [2, 99, 99, 99],
        done=[1, 2, 3], terminated=[1, 2, 3], mask=[True, True, False, False],
    )  # fmt: skip
    assert advantage == [-2, 0, 0, 0]
    assert target == [2, 2, 0, 0]


def test_new_episode_after_death_is_independent():
    # Dead at 1 (died in 0), new episode at 2: nothing crosses the reset.
    advantage, _ = estimate(
        [1, 50, 4], [4, 99, 6], [99, 99, 8],
        done=[0, 1], terminated=[0, 1], mask=[True, False, True],
    )  # fmt: skip
    assert advantage == [-3, 0, 4 + 0.5 * 8 - 6]


# ------------------------------------------------------------------------------- against TorchRL


def sample(shape, seed=0, p_done=0.1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    reward, value, next_value = torch.randn(3, *shape, generator=generator, dtype=dtype)
    done = torch.rand(shape, generator=generator) < p_done
    terminated = done & (torch.rand(shape, generator=generator) < 0.5)
    return reward, value, next_value, done, terminated


@pytest.fixture
def double():
    """TorchRL's discount has the default dtype, not that of the rewards."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("shape", [(7, 1, 1), (3, 5, 2, 1), (2, 3, 10, 4, 1), (64, 100, 4, 1)])
def test_gae_without_mask_equals_torchrl(shape):
    reward, value, next_value, done, terminated = sample(shape)
    found = gae(reward, value, next_value, done, terminated, gamma=0.99, lmbda=0.95)
    expected = generalized_advantage_estimate(
        0.99, 0.95, value, next_value, reward, done, terminated, time_dim=-3
    )
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gae_of_a_training_batch_equals_torchrl():
    inputs = sample((1024, 100, 4, 1), dtype=torch.float32, p_done=0.02)
    reward, value, next_value, done, terminated = inputs
    advantage, _ = gae(*inputs, gamma=0.99, lmbda=0.9)
    expected, _ = generalized_advantage_estimate(
        0.99, 0.9, value, next_value, reward, done, terminated, time_dim=-3
    )
    torch.testing.assert_close(advantage, expected, rtol=1e-4, atol=1e-4)


def test_gae_is_the_same_with_gradients():
    reward, value, next_value, done, terminated = sample((3, 6, 2, 1))
    plain = gae(reward, value, next_value, done, terminated, gamma=0.9, lmbda=0.8)
    value.requires_grad_()
    advantage, target = gae(reward, value, next_value, done, terminated, gamma=0.9, lmbda=0.8)
    assert torch.equal(advantage.detach(), plain[0])
    assert torch.equal(target.detach(), plain[1])
    (gradient,) = torch.autograd.grad(advantage.sum(), value)
    torch.testing.assert_close(gradient[:, 0], torch.full_like(gradient[:, 0], -1.0))


def test_inputs_are_not_modified():
    inputs = sample((2, 5, 3, 1))
    mask = torch.rand(2, 5, 3) < 0.5
    copies = [x.clone() for x in (*inputs, mask)]
    gae(*inputs, gamma=1.0, lmbda=1.0, mask=mask)
    gae(*inputs, gamma=1.0, lmbda=1.0)
    assert all(torch.equal(x, copy) for x, copy in zip((*inputs, mask), copies))


# --------------------------------------------------------------------- masks: identities, NaN


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1))
def test_all_true_mask_equals_no_mask(dtype, gamma, lmbda):
    inputs = sample((4, 20, 3, 1), dtype=dtype)
    mask = torch.ones(4, 20, 3, dtype=torch.bool)
    expected = gae(*inputs, gamma=gamma, lmbda=lmbda)
    for m in (mask, mask.unsqueeze(-1)):
        found = gae(*inputs, gamma=gamma, lmbda=lmbda, mask=m)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))


def dying_team(seed=0, shape=(8, 30, 3, 1)):
    """Agents that die and stay dead until the team's episode ends."""
    generator = torch.Generator().manual_seed(seed)
    reward, value, next_value, *_ = sample(shape, seed)
    num_envs, n_steps, n_agents, _ = shape
    done = torch.zeros(shape, dtype=torch.bool)
    terminated = torch.zeros(shape, dtype=torch.bool)
    mask = torch.zeros(shape[:-1], dtype=torch.bool)
    alive = torch.ones(num_envs, n_agents, dtype=torch.bool)
    for t in range(n_steps):
        mask[:, t] = alive
        dies = torch.rand(num_envs, n_agents, generator=generator) < 0.1
        end = (torch.rand(num_envs, 1, generator=generator) < 0.05) | ~(alive & ~dies).any(
            -1, keepdim=True
        )
        terminated[:, t, :, 0] = ~alive | dies
        done[:, t, :, 0] = ~alive | dies | end
        alive = torch.where(end, True, alive & ~dies)
    return reward, value, next_value, done, terminated, mask


@pytest.mark.parametrize("poison", POISON)
def test_values_in_dead_steps_have_no_effect(poison):
    reward, value, next_value, done, terminated, mask = dying_team()
    assert 0.1 < mask.double().mean() < 0.9
    expected = gae(reward, value, next_value, done, terminated, gamma=0.9, lmbda=0.8, mask=mask)
    dead = ~mask.unsqueeze(-1)
    poisoned = [torch.where(dead, poison, x) for x in (reward, value, next_value)]
    found = gae(*poisoned, done, terminated, gamma=0.9, lmbda=0.8, mask=mask)
    for a, b in zip(found, expected):
        assert torch.equal(a, b)
        assert (a[dead] == 0).all()


@pytest.mark.parametrize("poison", POISON)
def test_values_in_waiting_steps_have_no_effect(poison):
    reward, value, next_value, done, terminated = sample((8, 30, 3, 1), p_done=0.0)
    mask = torch.rand(8, 30, 3, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[:, -1] = True
    expected = gae(reward, value, next_value, done, terminated, gamma=0.9, lmbda=0.8, mask=mask)
    waits = ~mask.unsqueeze(-1)
    value = torch.where(waits, poison, value)
    # The next value of a step is that of the step after it.
    waits_next = torch.cat([waits[:, 1:], torch.zeros_like(waits[:, :1])], 1)
    next_value = torch.where(waits_next, poison, next_value)
    found = gae(reward, value, next_value, done, terminated, gamma=0.9, lmbda=0.8, mask=mask)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def slow_gae(reward, value, next_value, done, terminated, mask, gamma, lmbda):
    """One agent, lists in and lists out: first its own steps, then GAE over them."""
    advantages = [0.0] * len(reward)
    own = [t for t in range(len(reward)) if mask[t]]
    turns = []
    for t in own:
        earned, end = reward[t], t
        # The turn lasts until the next own step, the trajectory's end or the batch's.
        while not done[end] and end + 1 < len(reward) and not mask[end + 1]:
            end += 1
            earned += reward[end]
        bootstrap = 0.0 if terminated[end] else gamma * next_value[end]
        turns.append((t, earned + bootstrap - value[t], done[end] or end + 1 == len(reward)))
    following = 0.0
    for t, delta, ends in reversed(turns):
        following = delta + (0.0 if ends else gamma * lmbda * following)
        advantages[t] = following
    return advantages


@st.composite
def trajectories(draw):
    n = draw(st.integers(1, 12))
    number = st.floats(-5, 5, width=16)

    def rows(of):
        return draw(st.lists(of, min_size=n, max_size=n))

    done = rows(st.booleans())
    terminated = [d and t for d, t in zip(done, rows(st.booleans()))]
    unit = st.sampled_from([0.0, 0.5, 0.9, 1.0])
    return (
        rows(number), rows(number), rows(number), done, terminated, rows(st.booleans()),
        draw(unit), draw(unit),
    )  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(trajectories())
def test_gae_equals_slow_reference(trajectory):
    reward, value, next_value, done, terminated, mask, gamma, lmbda = trajectory
    n = len(reward)
    advantage, target = gae(
        *(column(x) for x in (reward, value, next_value)),
        *(torch.tensor(x).view(n, 1, 1) for x in (done, terminated)),
        gamma=gamma,
        lmbda=lmbda,
        mask=torch.tensor(mask).view(n, 1),
    )
    # A waiting step after the end of an episode belongs to no agent.
    expected = slow_gae(reward, value, next_value, done, terminated, mask, gamma, lmbda)
    assert advantage.flatten().tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    targets = [a + v if m else 0.0 for a, v, m in zip(expected, value, mask)]
    assert target.flatten().tolist() == pytest.approx(targets, rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_agents_and_envs_are_independent(seed):
    reward, value, next_value, done, terminated, mask = dying_team(seed, (3, 7, 2, 1))
    whole, _ = gae(reward, value, next_value, done, terminated, gamma=0.9, lmbda=0.7, mask=mask)
    for e in range(3):
        for i in range(2):
            one = [x[e, :, i].flatten().tolist() for x in (reward, value, next_value)]
            ends = [x[e, :, i].flatten().tolist() for x in (done, terminated)]
            alone = slow_gae(*one, *ends, mask[e, :, i].tolist(), 0.9, 0.7)
            assert whole[e, :, i].flatten().tolist() == pytest.approx(alone, abs=1e-9)


# ----------------------------------------------------------------------------------- bad input


def test_invalid_shapes_and_dtypes_raise():
    reward, value, next_value, done, terminated = sample((2, 5, 3, 1))
    estimate = lambda **kw: gae(  # noqa: E731
        **{
            "reward": reward,
            "value": value,
            "next_value": next_value,
            "done": done,
            "terminated": terminated,
            "gamma": 0.9,
            "lmbda": 0.9,
            **kw,
        }
    )
    with pytest.raises(ValueError, match=r"found reward \(2, 5, 1, 1\), value \(2, 5, 3, 1\)"):
        estimate(reward=reward[:, :, :1])
    with pytest.raises(ValueError, match="done is torch.float64, expected torch.bool"):
        estimate(done=done.double())
    with pytest.raises(ValueError, match="terminated is torch.int64"):
        estimate(terminated=terminated.long())
    with pytest.raises(ValueError, match="mask is torch.float32"):
        estimate(mask=torch.ones(2, 5, 3))
    with pytest.raises(ValueError, match=r"mask of shape \(2, 5\)|mask of shape \(2, 5, 2\)"):
        estimate(mask=torch.ones(2, 5, 2, dtype=torch.bool))
    squeezed = {
        name: x.squeeze(-1)
        for name, x in {
            "reward": reward,
            "value": value,
            "next_value": next_value,
            "done": done,
            "terminated": terminated,
        }.items()
    }
    with pytest.raises(ValueError, match="expected five tensors of one shape"):
        estimate(**squeezed)
