"""Small groups and batches that several tests share."""

from dataclasses import replace

import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, MultiCategorical, OneHot, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.specs import Hybrid

ACTIONS = {
    "bounded": lambda: Bounded(-1, 1, (2,)),
    "wide": lambda: Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0])),
    "unbounded": lambda: Unbounded((2,)),
    "categorical": lambda: Categorical(4),
    "one_hot": lambda: OneHot(4),
    "multi_discrete": lambda: MultiCategorical([3, 2]),
    "hybrid": lambda: Hybrid([3], Bounded(-1, 1, (2,))),
}
DISCRETE = ("categorical", "one_hot")
LOGITS = (*DISCRETE, "multi_discrete")  # of a policy
POISON = (float("nan"), 1e9)


def make_group(kind="bounded", n=3, *, mask=True, action_mask=False, state=None, name="car", o=5):
    """A group of n agents that observe o numbers."""
    spec = AgentSpec(name, n, Unbounded((o,)), ACTIONS[kind](), action_mask=action_mask)
    group = TeamSpec([spec], None if state is None else Unbounded((state,))).groups[name]
    return group if mask else without_mask(group)


def without_mask(group):
    return replace(group, mask_key=None)


def make_observed(group, *batch, seed=0, alive=0.7):
    """Random observations, masks and states as of an environment."""
    generator = torch.Generator().manual_seed(seed)
    n = group.n_agents
    leaves = {"observation": torch.randn(*batch, n, group.observation_dim, generator=generator)}
    if group.mask_key is not None:
        leaves["mask"] = torch.rand(*batch, n, generator=generator) < alive
    if group.action_mask_key is not None:
        legal = torch.rand(*batch, n, group.n_options, generator=generator) < 0.6
        leaves["action_mask"] = legal
    td = TensorDict({group.name: TensorDict(leaves, [*batch, n])}, batch)
    if group.state_key is not None:
        td["state"] = torch.randn(*batch, group.state_dim, generator=generator)
    return td


def make_batch(group, actor, *batch, seed=0, alive=0.7):
    """A batch for a loss: actions of a slightly older policy, advantages, targets, values."""
    td = make_observed(group, *batch, seed=seed, alive=alive)
    with torch.no_grad():
        actor(td)
    generator = torch.Generator().manual_seed(seed + 1)
    for leaf in ("advantage", "value_target", "state_value"):
        td[group.name, leaf] = torch.randn(*batch, group.n_agents, 1, generator=generator)
    drift = 0.3 * torch.randn(*batch, group.n_agents, generator=generator)
    td[group.name, "action_log_prob"] = td[group.name, "action_log_prob"] + drift
    return td


def make_trajectory(group, *batch, seed=0, alive=0.7):
    """``[*B, T]`` with rewards and flags; masks and flags may be inconsistent."""
    generator = torch.Generator().manual_seed(seed + 2)
    td = make_observed(group, *batch, seed=seed, alive=alive)
    following = make_observed(group, *batch, seed=seed + 3, alive=alive)
    shape = (*batch, group.n_agents, 1)
    following[group.name, "reward"] = torch.randn(shape, generator=generator)
    for where, size in ((group.name, shape), (None, (*batch, 1))):
        terminated = torch.rand(size, generator=generator) < 0.15
        truncated = ~terminated & (torch.rand(size, generator=generator) < 0.1)
        flags = {"terminated": terminated, "truncated": truncated, "done": terminated | truncated}
        for name, flag in flags.items():
            following.set(name if where is None else (where, name), flag)
    td["next"] = following
    return td


def poisoned(td, key, mask, value):
    """A copy with masked entries at ``key`` replaced; integers become a large number."""
    td = td.clone()
    x = td[key].clone()
    if not x.is_floating_point():
        value = 10**9 if value != value else int(value)
    x[~mask] = value
    td[key] = x
    return td


def assert_same(one, other, what=""):
    """Asserts that tensors are bitwise equal, NaN included."""
    assert torch.equal(torch.nan_to_num(one, nan=12345.0), torch.nan_to_num(other, nan=12345.0)), (
        what,
        one,
        other,
    )
    assert torch.equal(one.isnan(), other.isnan()), what


def states(learners):
    """The states of learners as a flat list of tensors."""
    found = []

    def walk(x):
        if isinstance(x, torch.Tensor):
            found.append(x.detach().clone())
        elif isinstance(x, dict):
            for key in sorted(x, key=str):
                walk(x[key])
        elif isinstance(x, (list, tuple)):
            for y in x:
                walk(y)

    walk([dict(learner.state_dict()) for learner in learners])
    return found
