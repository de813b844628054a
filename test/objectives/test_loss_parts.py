"""Losses of a minibatch's parts, with the total count, add up to that of the whole."""

import pytest
import torch
from rank_cases import Case, train_alone
from tensordict import TensorDict
from torchrl.modules import TanhNormal

from torchrl_marl.objectives.ppo import entropy_of
from torchrl_marl.runtime.ranks import SingleProcess


@pytest.mark.parametrize("layout", ["one", "two"])
def test_losses_of_parts_add_up_to_the_whole(layout):
    case = Case(layout, iterations=1, actions="unbounded", settings={"clip_value": True})
    (batch,), (learner,), _, _ = train_alone(case)
    (loss,) = learner.losses.values()
    data = learner.block.gather(batch)
    learner.add_targets(data)
    frames = learner._frames(data)
    sizes = (10, 25, 45)
    parts = frames.split(sizes)
    whole = loss(frames)
    counts = [loss.local_count(part) for part in parts]
    torch.testing.assert_close(sum(counts), loss.local_count(frames))
    assert len({round(float(c.sum() / n), 3) for c, n in zip(counts, sizes)}) == 3  # deaths differ
    loss.count = sum(counts)
    found = [loss(part) for part in parts]
    loss.count = None
    for key, value in whole.items():
        own = torch.stack([part[key] for part in found])
        combine = loss.combine.get(key)
        together = own.sum(0) if combine is None else combine(own, sum(counts))
        torch.testing.assert_close(together, value, rtol=1e-5, atol=1e-6, msg=key)
    assert isinstance(whole, TensorDict) and set(loss.combine) <= set(whole.keys())


def test_ranks_draw_the_noise_of_one_process():
    """Each rank draws for its rows from an equal generator, which ends in the same state."""

    class OneOfTwo(SingleProcess):
        size = 2

        def __init__(self, rank):
            self.rank = rank

    def squashed(loc):
        return TanhNormal(loc, torch.full_like(loc, 0.7))

    loc = torch.randn(6, 3, 2)
    torch.manual_seed(1)
    whole, after = entropy_of(squashed(loc), 4), torch.rand(3)
    for rank in range(2):
        torch.manual_seed(1)
        with OneOfTwo(rank).active():
            own = entropy_of(squashed(loc[3 * rank : 3 * rank + 3]), 4)
        torch.testing.assert_close(own, whole[3 * rank : 3 * rank + 3])
        assert torch.equal(torch.rand(3), after)
