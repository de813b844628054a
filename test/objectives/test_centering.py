"""Centering: values are shifted to the level of a batch's returns."""

import pytest
import torch
from echo import make_echo
from samples import assert_same, make_group, make_trajectory

from torchrl_marl.modules import NetworkConfig, ValueNorm, make_critic
from torchrl_marl.objectives import TeamGAE


def test_centering_by_hand():
    """A constant reward of 1 has the value 1 / (1 - gamma) = 2, found in one batch from 0."""
    group, norm = make_group(n=2, o=1), ValueNorm()
    settings = {"value_network": make_echo(group), "value_norm": norm, "group": group}
    td = make_trajectory(group, 1, 5, alive=2.0)
    td["car", "observation"].zero_(), td["next", "car", "observation"].zero_()
    td["next", "car", "reward"].fill_(1.0)
    for name in ("terminated", "truncated", "done"):
        td["next", name].zero_(), td["next", "car", name].zero_()
    TeamGAE(gamma=0.5, lmbda=0.7, centering=True, **settings)(td)
    torch.testing.assert_close(td["car", "value_target"], torch.full((1, 5, 2, 1), 2.0))
    torch.testing.assert_close(td["car", "advantage"], torch.zeros(1, 5, 2, 1))
    torch.testing.assert_close(norm.denormalize(torch.zeros(1)), torch.tensor([2.0]))


@pytest.mark.parametrize("bootstrap", ["team", "agent"])
@pytest.mark.parametrize("seed", range(3))
def test_centering_equals_estimates_with_shifted_values(bootstrap, seed):
    """Centered targets equal those of a critic whose values are all raised by the shift."""
    group = make_group(n=3, o=1)
    td = make_trajectory(group, 4, 6, seed=seed)
    common = {"gamma": 0.9, "lmbda": 0.8, "group": group, "bootstrap": bootstrap}
    echo = make_echo(group)
    centered = TeamGAE(**common, value_network=echo, value_norm=ValueNorm(), centering=True)
    found = centered(td.clone())["car"]
    learned = found.get("loss_mask", found["mask"])
    value = found["value_target"] - found["advantage"]
    plain = TeamGAE(**common, value_network=echo)(td.clone())["car"]
    shift = (value - plain["value_target"] + plain["advantage"])[learned]
    assert (shift - shift[0]).abs().max() < 1e-5 and shift[0].abs() > 1e-2
    torch.testing.assert_close(found["value_target"][learned].mean(), value[learned].mean())

    again = TeamGAE(**common, value_network=make_echo(group, shift[0]))(td.clone())["car"]
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(found[key][learned], again[key][learned])


@pytest.mark.parametrize("batches", [1, 2])
def test_values_of_a_centered_batch_equal_the_critics(batches):
    """Also for the first batch, when the norm has no mean to shift yet."""
    group, norm = make_group(), ValueNorm()
    critic = make_critic(group, NetworkConfig([8]), value_norm=norm)
    estimator = TeamGAE(
        gamma=0.99,
        lmbda=0.95,
        value_network=critic,
        group=group,
        value_norm=norm,
        centering=True,
    )
    for seed in range(batches):
        td = make_trajectory(group, 4, 6, seed=seed, alive=2.0)
        td["next", "car", "reward"] += 1.0
        estimator(td)
    torch.testing.assert_close(critic(td.clone())["car", "state_value"], td["car", "state_value"])


def test_no_shift_without_ends_and_discounting():
    group, norm = make_group(n=2, o=1), ValueNorm()
    td = make_trajectory(group, 1, 5, alive=2.0)
    for name in ("terminated", "truncated", "done"):
        td["next", name].zero_(), td["next", "car", name].zero_()
    settings = {"gamma": 1.0, "lmbda": 0.0, "value_network": make_echo(group), "group": group}
    found = TeamGAE(**settings, value_norm=norm, centering=True)(td.clone())["car"]
    expected = TeamGAE(**settings)(td.clone())["car"]
    assert_same(found["advantage"], expected["advantage"])
    assert_same(found["value_target"], expected["value_target"])


def test_centering_without_value_norm_raises():
    group = make_group()
    critic = make_critic(group, NetworkConfig([8]))
    with pytest.raises(ValueError, match="centering=True shifts the mean of .*ValueNorm.* is None"):
        TeamGAE(gamma=0.9, lmbda=0.8, value_network=critic, group=group, centering=True)


def test_no_shift_in_eval_mode_or_in_fully_masked_batches():
    group, norm = make_group(), ValueNorm()
    critic = make_critic(group, NetworkConfig([8]), value_norm=norm)
    settings = {"gamma": 0.9, "lmbda": 0.8, "value_network": critic, "group": group}
    estimator = TeamGAE(**settings, value_norm=norm, centering=True)
    td = make_trajectory(group, 4, 6)
    estimator.eval()
    one, other = estimator(td.clone()), TeamGAE(**settings)(td.clone())
    assert_same(one["car", "advantage"], other["car", "advantage"])
    estimator.train()
    estimator(td)
    before = norm.denormalize(torch.zeros(1)).clone()
    for where in (td, td["next"]):
        where["car", "mask"].zero_()
    estimator(td)
    assert_same(norm.denormalize(torch.zeros(1)), before)
    assert td["car", "advantage"].isfinite().all()
