"""V-trace: by hand, against TorchRL, against a slow reference, and exact off-policy values."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.objectives.value.functional import vtrace_advantage_estimate

from torchrl_marl.functional import gae, vtrace

POISON = [float("nan"), 1e9, float("inf")]


def column(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype).view(-1, 1, 1)


def sample(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    done = torch.rand(shape, generator=generator) < 0.2
    terminated = done & (torch.rand(shape, generator=generator) < 0.5)
    mask = torch.rand(shape[:-1], generator=generator) < 0.7
    return numbers[0], (*numbers[1:], done, terminated), mask


# -------------------------------------------------------------------------------- hand-worked

NEVER = torch.zeros(3, 1, 1, dtype=torch.bool)
RATIOS = column([2.0, 0.5, 4.0]).log()
SIGNALS = column([1, 2, 4]), column([4, 2, 6]), column([2, 6, 8]), NEVER, NEVER


def test_three_steps_worked_out_by_hand():
    # deltas -2, 3, 2 (gamma .5); rho and c 1, .5, 1.
    advantage, target = vtrace(RATIOS, *SIGNALS, gamma=0.5, lmbda=1.0)
    # x_2 = 2; x_1 = .5*3 + .5*.5*2 = 2; x_0 = -2 + .5*1*2 = -1.
    assert target.flatten().tolist() == [4 - 1, 2 + 2, 6 + 2]
    # A_0 = -2 + .5*2; A_1 = .5 * (3 + .5*2); A_2 = 2.
    assert advantage.flatten().tolist() == [-1, 2, 2]
    plain, _ = vtrace(RATIOS, *SIGNALS, gamma=0.5, lmbda=1.0, weigh=False)
    assert plain.flatten().tolist() == [-1, 4, 2]


def test_result_dtype_with_ratios_of_another_dtype():
    """Log-probabilities are float64 if the action bounds are. Critics return float32."""
    signals = [x.float() if x.is_floating_point() else x for x in SIGNALS]
    for one, other in zip(
        vtrace(RATIOS, *signals, gamma=0.5, lmbda=1.0),
        vtrace(RATIOS, *SIGNALS, gamma=0.5, lmbda=1.0),
        strict=True,
    ):
        assert one.dtype == torch.float32 and one.tolist() == other.tolist()


def test_clips_and_lambda_worked_out_by_hand():
    # rho 1.5, .5, 1.5; c = .5 * (1, .5, 1): x_2 = 3; x_1 = 1.5 + .5*.25*3 = 1.875;
    # x_0 = -3 + .5*.5*1.875.
    settings = {"gamma": 0.5, "lmbda": 0.5, "rho_clip": 1.5, "c_clip": 1.0}
    advantage, target = vtrace(RATIOS, *SIGNALS, **settings)
    assert target.flatten().tolist() == pytest.approx([4 - 3 + 0.46875, 2 + 1.875, 6 + 3])
    assert advantage.flatten().tolist() == pytest.approx(
        [1.5 * (-2 + 0.25 * 1.875), 0.5 * (3 + 0.25 * 3), 3]
    )


def test_rewards_between_turns_belong_to_the_last_turn():
    # Acts at 0 and 3; earns 1 + 2 + 4 before its next turn. delta_0 = 7 + .5*6 - 4 = 6, rho .5;
    # delta_3 = 8 + .5*10 - 6 = 7, rho 1. Values of waiting steps are ignored.
    advantage, target = vtrace(
        column([0.5, 99.0, 0.01, 2.0]).log(),
        column([1, 2, 4, 8]),
        column([4, 99, 99, 6]),
        column([99, 99, 6, 10]),
        *[torch.zeros(4, 1, 1, dtype=torch.bool)] * 2,
        gamma=0.5,
        lmbda=1.0,
        mask=torch.tensor([True, False, False, True]).view(4, 1),
    )
    assert target.flatten().tolist() == pytest.approx([4 + 0.5 * 6 + 0.5 * 0.5 * 7, 0, 0, 6 + 7])
    assert advantage.flatten().tolist() == pytest.approx([0.5 * (6 + 0.5 * 7), 0, 0, 7])


# ----------------------------------------------------------------- identities and references -----


@pytest.mark.parametrize("masked", [False, True])
def test_on_policy_vtrace_equals_gae(masked):
    log_ratio, signals, mask = sample((5, 20, 3, 1))
    settings = {"gamma": 0.99, "lmbda": 0.95, "mask": mask if masked else None}
    expected = gae(*signals, **settings)
    for clips in ({}, {"rho_clip": 3.0, "c_clip": math.inf}):
        found = vtrace(torch.zeros_like(log_ratio), *signals, **settings, **clips)
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clips", [(1.0, 1.0), (2.0, 1.5), (0.5, 3.0)])
def test_vtrace_without_mask_equals_torchrl(clips):
    log_ratio, (reward, value, next_value, done, terminated), _ = sample((4, 9, 2, 1))
    goes_on = ~done[:, :-1]  # then the next value is that of the next step
    next_value[:, :-1] = torch.where(goes_on, value[:, 1:], next_value[:, :-1])
    found = vtrace(
        log_ratio, reward, value, next_value, done, terminated,
        gamma=0.9, lmbda=1.0, rho_clip=clips[0], c_clip=clips[1],
    )  # fmt: skip
    agents_first = (x.movedim(-2, 0) for x in (value, next_value, reward, done, terminated))
    own = log_ratio.movedim(-2, 0)
    gamma = torch.tensor(0.9, dtype=torch.float64)
    # TorchRL's is exp(log_pi - log_mu): log_pi is the policy, despite its docstring.
    expected = vtrace_advantage_estimate(gamma, own, torch.zeros_like(own), *agents_first, *clips)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b.movedim(0, -2), rtol=1e-12, atol=1e-12)


def slow_vtrace(log_ratio, reward, value, next_value, done, terminated, mask, gamma, lmbda, clips):
    """Own steps of one agent with the rewards until the next one, then the recursion."""
    n, own = len(reward), [t for t, acts in enumerate(mask) if acts]
    targets, advantages, after = [0.0] * n, [0.0] * n, None
    for t in reversed(own):
        end = t
        while not done[end] and end + 1 < n and not mask[end + 1]:
            end += 1
        goes_on = not done[end] and end + 1 < n
        bootstrap = 0.0 if terminated[end] else gamma * next_value[end]
        delta = sum(reward[t : end + 1]) + bootstrap - value[t]
        later = gamma * lmbda * (targets[after] - value[after]) if goes_on else 0.0
        ratio = math.exp(log_ratio[t])
        targets[t] = value[t] + min(clips[0], ratio) * delta + min(clips[1], ratio) * later
        advantages[t] = min(clips[0], ratio) * (delta + later)
        after = t
    return advantages, targets


@st.composite
def trajectories(draw):
    n = draw(st.integers(1, 12))
    number = st.floats(-3, 3, width=16)

    def rows(of):
        return draw(st.lists(of, min_size=n, max_size=n))

    done = rows(st.booleans())
    terminated = [d and t for d, t in zip(done, rows(st.booleans()))]
    numbers = [rows(number) for _ in range(4)]
    clip = st.sampled_from([0.5, 1.0, 2.0, math.inf])
    unit = st.sampled_from([0.0, 0.5, 0.9, 1.0])
    return (
        *numbers, done, terminated, rows(st.booleans()), draw(unit), draw(unit),
        (draw(clip), draw(clip)),
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(trajectories())
def test_vtrace_equals_slow_reference(trajectory):
    *numbers, done, terminated, mask, gamma, lmbda, clips = trajectory
    n = len(done)
    found = vtrace(
        *(column(x) for x in numbers),
        *(torch.tensor(x).view(n, 1, 1) for x in (done, terminated)),
        gamma=gamma,
        lmbda=lmbda,
        rho_clip=clips[0],
        c_clip=clips[1],
        mask=torch.tensor(mask).view(n, 1),
    )
    expected = slow_vtrace(*numbers, done, terminated, mask, gamma, lmbda, clips)
    for a, b in zip(found, expected):
        assert a.flatten().tolist() == pytest.approx(b, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("poison", POISON)
def test_values_in_masked_steps_have_no_effect(poison):
    log_ratio, (reward, value, next_value, done, terminated), mask = sample((6, 15, 3, 1))
    keep = mask.unsqueeze(-1)
    settings = {"gamma": 0.9, "lmbda": 0.8, "mask": mask}
    clean = vtrace(log_ratio, reward, value, next_value, done, terminated, **settings)
    dirty = vtrace(
        torch.where(keep, log_ratio, poison), reward, torch.where(keep, value, poison), next_value,
        done, terminated, **settings,
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty))


def test_same_with_gradients_and_inputs_are_not_modified():
    log_ratio, signals, mask = sample((3, 6, 2, 1))
    copies = [x.clone() for x in (log_ratio, *signals, mask)]
    plain = vtrace(log_ratio, *signals, gamma=0.9, lmbda=0.8, mask=mask)
    assert all(torch.equal(a, b) for a, b in zip((log_ratio, *signals, mask), copies))
    traced = vtrace(log_ratio.requires_grad_(), *signals, gamma=0.9, lmbda=0.8, mask=mask)
    assert all(torch.equal(a, b.detach()) for a, b in zip(plain, traced))
    assert torch.autograd.grad(traced[1].sum(), log_ratio)[0].isfinite().all()


# ------------------------------------------------------------------- exact off-policy values ------

T, GAMMA = 3, 0.8
EARNED = torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float64)  # by state and action
POLICY = torch.tensor([[0.9, 0.1], [0.3, 0.7]], dtype=torch.float64)
ACTED = torch.tensor([[0.4, 0.6], [0.8, 0.2]], dtype=torch.float64)
ACTIONS = torch.tensor(list(itertools.product((0, 1), repeat=T)))  # every possible action sequence
STATES = torch.cat([torch.zeros(len(ACTIONS), 1, dtype=torch.long), ACTIONS[:, :-1]], 1)


def value_of(policy):
    """Value of three steps from each state. The state is the last action."""
    value = torch.zeros(T + 1, 2, dtype=torch.float64)
    for t in reversed(range(T)):
        value[t] = (policy * (EARNED + GAMMA * value[t + 1])).sum(-1)
    return value


def expected_targets(value, policy=POLICY, **settings):
    """Mean targets by state and time over all sequences, weighted by their chance in ``ACTED``."""
    chance = ACTED[STATES, ACTIONS].prod(-1, keepdim=True).expand(-1, T)
    ratio = policy[STATES, ACTIONS] / ACTED[STATES, ACTIONS]
    times = torch.arange(T).expand_as(STATES)
    last = times == T - 1
    signals = EARNED[STATES, ACTIONS], value[times, STATES], value[times + 1, ACTIONS], last, last
    rows = (x.reshape(len(ACTIONS), T, 1, 1) for x in (ratio.log(), *signals))
    _, target = vtrace(*rows, gamma=GAMMA, **settings)
    found = torch.zeros(T + 1, 2, dtype=torch.float64)
    for t, s in itertools.product(range(T), (0, 1)):
        there = STATES[:, t] == s
        if there.any():
            weight = chance[there, t] / chance[there, t].sum()
            found[t, s] = (weight * target[there, t].flatten()).sum()
    return found


REACHED = torch.tensor([[True, False], [True, True], [True, True], [False, False]])


def test_unclipped_targets_are_the_policy_value_for_any_critic():
    wrong = torch.full((T + 1, 2), 50.0, dtype=torch.float64)
    wrong[T] = 0.0
    found = expected_targets(wrong, lmbda=1.0, rho_clip=math.inf, c_clip=math.inf)
    torch.testing.assert_close(found[REACHED], value_of(POLICY)[REACHED])
    uncorrected = expected_targets(wrong, policy=ACTED, lmbda=1.0)
    torch.testing.assert_close(uncorrected[REACHED], value_of(ACTED)[REACHED])
    assert (value_of(POLICY) - value_of(ACTED))[REACHED].abs().min() > 0.2


@pytest.mark.parametrize("lmbda", [0.0, 0.7])
@pytest.mark.parametrize(("rho_clip", "c_clip"), [(math.inf, 1.0), (1.0, 1.0), (1.5, 0.5)])
def test_critic_converges_to_the_value_of_the_clipped_policy(lmbda, rho_clip, c_clip):
    clipped = torch.minimum(rho_clip * ACTED, POLICY)
    clipped = clipped / clipped.sum(-1, keepdim=True)  # eq. 3 of the paper
    value = torch.zeros(T + 1, 2, dtype=torch.float64)
    for _ in range(60):
        value = expected_targets(value, lmbda=lmbda, rho_clip=rho_clip, c_clip=c_clip)
    torch.testing.assert_close(value[REACHED], value_of(clipped)[REACHED])


# ----------------------------------------------------------------------------------- bad input


def test_invalid_shapes_raise():
    log_ratio, signals, _ = sample((2, 5, 3, 1))
    with pytest.raises(ValueError, match=r"vtrace: expected six tensors.*log_ratio \(2, 5, 3\)"):
        vtrace(log_ratio.squeeze(-1), *signals, gamma=0.9, lmbda=0.9)
