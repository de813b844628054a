"""Multi-step returns and soft updates: by hand, against references, and with NaN values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_marl.capture import capture
from torchrl_marl.functional import gae, n_step, q_lambda, soft_update_, within_window

POISON = [float("nan"), 1e9, float("inf")]
GAMMA, LMBDA = 0.5, 0.5


def column(values):
    """Time as the only dim that is not 1: ``[T, 1, 1]``."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)


def flags(times, n):
    flag = torch.zeros(n, 1, 1, dtype=torch.bool)
    flag[list(times)] = True
    return flag


def returns(reward, next_value, done=(), terminated=(), mask=None, lmbda=LMBDA):
    n = len(reward)
    mask = None if mask is None else torch.tensor(mask).view(-1, 1)
    found = q_lambda(
        column(reward),
        column(next_value),
        flags(done, n),
        flags(terminated, n),
        gamma=GAMMA,
        lmbda=lmbda,
        mask=mask,
    )
    return found.flatten().tolist()


# ----------------------------------------------------------------------- n-step, by hand


def summed(rewards, ends):
    total, discount, length = n_step(column(rewards)[None], torch.tensor([ends]), gamma=GAMMA)
    assert total.shape == (1, 1, 1) and discount.shape == (1, 1) and length.shape == (1,)
    return total.item(), discount.item(), length.item()


def test_n_step_return_of_a_full_window():
    assert summed([1, 2, 4], [False] * 3) == (1 + 0.5 * 2 + 0.25 * 4, 0.125, 3)


def test_n_step_window_stops_at_its_first_done():
    assert summed([1, 2, 4], [False, True, True]) == (1 + 0.5 * 2, 0.25, 2)
    assert summed([1, 2, 4], [True, False, False]) == (1, 0.5, 1)
    assert within_window(torch.tensor([False, True, False])).tolist() == [True, True, False]


@pytest.mark.parametrize("poison", POISON)
def test_rewards_after_done_have_no_effect(poison):
    assert summed([1, 2, poison], [False, True, False]) == (2, 0.25, 2)


def test_n_step_batch_equals_single_windows():
    reward, ends = torch.randn(6, 5, 3, 1), torch.rand(6, 5) < 0.3
    total, discount, length = n_step(reward, ends, gamma=0.9)
    for i in range(6):
        m = next((k + 1 for k, end in enumerate(ends[i].tolist()) if end), 5)
        assert length[i] == m
        torch.testing.assert_close(discount[i], torch.tensor([0.9**m]))
        expected = sum(0.9**k * reward[i, k] for k in range(m))
        torch.testing.assert_close(total[i], expected)


def test_one_step_return_is_the_reward():
    reward = torch.randn(6, 1, 3, 1)
    total, discount, _ = n_step(reward, torch.zeros(6, 1, dtype=torch.bool), gamma=0.9)
    assert torch.equal(total, reward[:, 0])
    assert (discount == torch.tensor(0.9)).all()


def test_n_step_with_invalid_arguments_raises():
    with pytest.raises(ValueError, match=r"ends are torch.float32 of shape \(2, 3\), rewards of"):
        n_step(torch.zeros(2, 3, 1), torch.zeros(2, 3), gamma=0.9)
    with pytest.raises(ValueError, match=r"expected torch.bool \[\*B, L\] and \[\*B, L, \*feat"):
        n_step(torch.zeros(2, 3, 1), torch.zeros(3, 2, dtype=torch.bool), gamma=0.9)


# --------------------------------------------------------------------- Q(lambda), by hand


def test_three_steps_worked_out_by_hand():
    # The last: 4 + .5*8 = 8; then 2 + .5*(.5*8 + .5*6) = 5.5; then 1 + .5*(.5*5.5 + .5*2) = 2.875.
    assert returns([1, 2, 4], [2, 6, 8]) == [2.875, 5.5, 8]


def test_termination_stops_bootstrap_and_recursion():
    # 2; then 1 + .5*(.5*2 + .5*2) = 2.
    assert returns([1, 2, 4], [2, 6, 8], done=[1], terminated=[1]) == [2, 2, 8]


def test_truncation_stops_only_the_recursion():
    # 2 + .5*6 = 5, only the greedy value; then 1 + .5*(.5*5 + .5*2) = 2.75.
    assert returns([1, 2, 4], [2, 6, 8], done=[1]) == [2.75, 5, 8]


def test_rewards_between_turns_belong_to_the_last_turn():
    # Own steps 0 and 3. At 3: 8 + .5*10 = 13. At 0 with the rewards while waiting and one discount:
    # 1 + 2 + 4 + .5*(.5*13 + .5*6) = 11.75.
    acts = [True, False, False, True]
    assert returns([1, 2, 4, 8], [99, 99, 6, 10], mask=acts) == [11.75, 0, 0, 13]


def test_reward_at_termination_while_waiting():
    found = returns([1, 2, 4], [99, 99, 8], done=[1], terminated=[1], mask=[True, False, True])
    assert found == [3, 0, 8]


def test_truncation_while_waiting_bootstraps():
    # 1 + 2 + .5*6: bootstraps from the episode's last state.
    assert returns([1, 2, 4], [99, 6, 8], done=[1], mask=[True, False, True]) == [6, 0, 8]


def test_batch_end_while_waiting_bootstraps():
    assert returns([1, 2, 4], [99, 99, 6], mask=[True, False, False]) == [10, 0, 0]


def test_steps_after_death_have_no_effect():
    # The agent dies in step 1; its done stays. Later steps have no effect on earlier ones.
    found = returns(
        [1, 2, 50, 60],
        [2, 99, 99, 99],
        done=[1, 2, 3],
        terminated=[1, 2, 3],
        mask=[True, True, False, False],
    )
    assert found == [2, 2, 0, 0]


# --------------------------------------------------------------------- Q(lambda), identities


def sample(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    reward, value, next_value = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    done = torch.rand(shape, generator=generator) < 0.15
    terminated = done & (torch.rand(shape, generator=generator) < 0.5)
    mask = torch.rand(shape[:-1], generator=generator) < 0.6
    return reward, value, next_value, done, terminated, mask


@pytest.mark.parametrize("masked", [False, True])
@settings(max_examples=30, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
def test_q_lambda_of_consistent_values_equals_gae_target(masked, gamma, lmbda, seed):
    reward, value, next_value, done, terminated, mask = sample((4, 20, 3, 1), seed)
    next_value[:, :-1] = value[:, 1:]
    mask = mask if masked else None
    settings_ = {"gamma": gamma, "lmbda": lmbda, "mask": mask}
    _, expected = gae(reward, value, next_value, done, terminated, **settings_)
    found = q_lambda(reward, next_value, done, terminated, **settings_)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_lambda_0_is_one_step_q_learning():
    reward, _, next_value, done, terminated, _ = sample((4, 20, 3, 1))
    found = q_lambda(reward, next_value, done, terminated, gamma=0.9, lmbda=0.0)
    torch.testing.assert_close(found, reward + 0.9 * torch.where(terminated, 0.0, next_value))


def test_all_true_mask_equals_no_mask():
    reward, _, next_value, done, terminated, mask = sample((4, 20, 3, 1))
    arguments = (reward, next_value, done, terminated)
    plain = q_lambda(*arguments, gamma=0.9, lmbda=0.8)
    masked = q_lambda(*arguments, gamma=0.9, lmbda=0.8, mask=torch.ones_like(mask))
    assert torch.equal(plain, masked)


@pytest.mark.parametrize("poison", POISON)
def test_unused_values_have_no_effect(poison):
    reward, _, next_value, done, terminated, mask = sample((4, 20, 3, 1))
    clean = q_lambda(reward, next_value, done, terminated, gamma=0.9, lmbda=0.8, mask=mask)
    acts_next = torch.ones_like(done)
    acts_next[:, :-1] = mask.unsqueeze(-1)[:, 1:]
    ends = done.clone()
    ends[:, -1] = True
    after_end = torch.zeros_like(done)
    after_end[:, 1:] = done[:, :-1]
    unread = terminated | ~(acts_next | ends)
    dead = after_end & ~mask.unsqueeze(-1)
    next_value[unread], reward[dead] = poison, poison
    next_value[dead] = poison
    found = q_lambda(reward, next_value, done, terminated, gamma=0.9, lmbda=0.8, mask=mask)
    assert torch.equal(found, clean)


def test_q_lambda_with_invalid_arguments_raises():
    x, flag = torch.zeros(2, 3, 1), torch.zeros(2, 3, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"q_lambda: expected four tensors of one shape"):
        q_lambda(x, x, flag, flag[:, :1], gamma=0.9, lmbda=0.9)
    with pytest.raises(ValueError, match=r"q_lambda: done is torch.float32, expected torch.bool"):
        q_lambda(x, x, x, flag, gamma=0.9, lmbda=0.9)


# ------------------------------------------------------------------------- target networks


def test_soft_update_worked_out_by_hand():
    targets = [torch.tensor([0.0, 4.0]), torch.tensor(2.0)]
    sources = [torch.tensor([8.0, 0.0]), torch.tensor(-2.0)]
    soft_update_(targets, sources, 0.25)
    assert targets[0].tolist() == [2, 3] and targets[1] == 1


def test_tau_1_copies_exactly_and_tau_0_changes_nothing():
    sources, targets = [torch.randn(5, 3), torch.randn(7)], [torch.randn(5, 3), torch.randn(7)]
    before = [x.clone() for x in targets]
    soft_update_(targets, sources, torch.zeros(()))
    assert all(map(torch.equal, targets, before))
    soft_update_(targets, sources, torch.ones(()))
    assert all(map(torch.equal, targets, sources))


def test_soft_update_from_parameters_records_no_gradient():
    source = torch.nn.Parameter(torch.ones(3))
    target = torch.zeros(3)
    soft_update_([target], [source], 0.5)
    assert not target.requires_grad and target.tolist() == [0.5] * 3


@pytest.mark.parametrize("execution", ["trace", "compile"])
def test_tau_may_change_in_a_captured_graph(execution):
    sources, targets = [torch.randn(5, 3), torch.randn(7)], [torch.randn(5, 3), torch.randn(7)]
    tau = torch.zeros(())

    def update(tau, targets, sources):
        soft_update_(targets, sources, tau)
        return targets[0].sum()

    program = capture(update, tau, targets, sources, name="targets", execution=execution)
    eager = [x.clone() for x in targets]
    for share in (0.0, 0.25, 1.0):
        program(tau.fill_(share), targets, sources)
        soft_update_(eager, sources, share)
        for one, other in zip(targets, eager):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert all(map(torch.equal, targets, sources))


def test_targets_of_other_shapes_raise():
    with pytest.raises(ValueError, match=r"targets have shapes \[\(2,\)\], sources \[\(3,\)\]"):
        soft_update_([torch.zeros(2)], [torch.zeros(3)], 0.5)
