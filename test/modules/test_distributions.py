"""Distributions over padded actions: per-agent equality, padding, gradients, actors."""

import pytest
import torch
from samples import POISON, assert_same
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch.distributions import kl_divergence
from torchrl.modules import IndependentNormal, NormalParamExtractor, ProbabilisticActor, TanhNormal
from torchrl.modules.distributions.utils import has_analytic_entropy, sample_and_log_prob

from torchrl_marl.modules.distributions import PaddedNormal, PaddedTanhNormal

WIDTHS = (3, 1, 2)
MASK = torch.arange(3) < torch.tensor(WIDTHS).unsqueeze(-1)
LOW = torch.where(MASK, torch.tensor([-1.0, 0.0, -2.0]), 0.0)
HIGH = torch.where(MASK, torch.tensor([[1.0, 4.0, 3.0], [2.0, 0.0, 0.0], [0.5, 1.0, 0.0]]), 0.0)
BOUNDS = {
    "normal": None,
    "unit": {},
    "scalar": {"low": -2.0, "high": 3.0},
    "beside 0": {"low": 1.0, "high": 3.0},
    "tensor": {"low": LOW, "high": HIGH},
    "row": {"low": torch.tensor([-1.0, -2.0, 0.0]), "high": torch.tensor([1.0, 2.0, 5.0])},
    "low only": {"low": LOW, "high": 7.0},
    "garbage": {"low": LOW.masked_fill(~MASK, float("nan")), "high": HIGH - 9.0 * ~MASK},
}


def padded(loc, scale, kind, mask=MASK, **keywords):
    if kind == "normal":
        return PaddedNormal(loc, scale, mask=mask, **keywords)
    return PaddedTanhNormal(loc, scale, mask=mask, **BOUNDS[kind], **keywords)


def of_agent(loc, scale, kind, agent, **keywords):
    """TorchRL's distribution of one agent, of its own width."""
    own = (..., agent, slice(WIDTHS[agent]))
    if kind == "normal":
        return IndependentNormal(loc[own], scale[own], **keywords)
    bounds = {
        name: bound.expand(3, 3)[own] if isinstance(bound, torch.Tensor) else bound
        for name, bound in BOUNDS[kind].items()
    }
    return TanhNormal(loc[own], scale[own], event_dims=1, **bounds, **keywords)


def parameters(*batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    loc = torch.randn(*batch, 3, 3, generator=generator)
    return loc, 0.3 + torch.rand(*batch, 3, 3, generator=generator)


def actions(loc, scale, kind):
    """Inside the bounds, 0 in the padding."""
    with torch.no_grad():
        return padded(loc, scale, kind).sample()


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("batch", [(), (5,), (2, 4)])
def test_equals_per_agent_distributions(kind, batch):
    loc, scale = parameters(*batch)
    distribution, action = padded(loc, scale, kind), actions(loc, scale, kind)
    log_prob = distribution.log_prob(action)
    assert log_prob.shape == (*batch, 3)
    assert distribution.batch_shape == (*batch, 3)
    assert distribution.event_shape == (3,)
    for agent, width in enumerate(WIDTHS):
        own = of_agent(loc, scale, kind, agent)
        torch.testing.assert_close(
            log_prob[..., agent], own.log_prob(action[..., agent, :width]), rtol=1e-6, atol=1e-6
        )
        assert torch.equal(
            distribution.deterministic_sample[..., agent, :width], own.deterministic_sample
        )
        if kind == "normal":
            torch.testing.assert_close(distribution.entropy()[..., agent], own.entropy())
            assert torch.equal(distribution.mean[..., agent, :width], own.mean)
            assert torch.equal(distribution.mode[..., agent, :width], own.mode)


@pytest.mark.parametrize("kind", ["normal", "unit", "scalar", "row"])
@pytest.mark.parametrize("tanh_loc", [False, True])
def test_without_padding_equals_torchrl(kind, tanh_loc):
    loc, scale = parameters(7)
    action = actions(loc, scale, kind)
    keywords = {"upscale": 3.0, "tanh_loc": tanh_loc}
    results = []
    for plain in (True, False):
        inputs = [x.clone().requires_grad_() for x in (loc, scale, action)]
        if not plain:
            one = padded(*inputs[:2], kind, torch.ones(3, 3, dtype=torch.bool), **keywords)
        elif kind == "normal":
            one = IndependentNormal(*inputs[:2], **keywords)
        else:
            one = TanhNormal(*inputs[:2], **BOUNDS[kind], event_dims=1, **keywords)
        log_prob = one.log_prob(inputs[2])
        torch.manual_seed(1)
        sample, (drawn, score) = one.rsample((2,)), sample_and_log_prob(one, reparameterize=True)
        (log_prob.sum() + sample.square().sum() + score.sum()).backward()
        rest = [one.entropy(), one.variance] if kind == "normal" else []
        results.append(
            [log_prob, sample, drawn, score, one.deterministic_sample]
            + rest
            + [x.grad for x in inputs]
        )
    for first, second in zip(*results):
        assert_same(first, second)


@pytest.mark.parametrize("kind", BOUNDS)
def test_samples_are_zero_in_padding(kind):
    loc, scale = parameters(6)
    distribution = padded(loc, scale, kind)
    draws = [distribution.sample(), distribution.rsample((4,)), distribution.deterministic_sample]
    draws += [sample_and_log_prob(distribution, (4,))[0]]
    draws += [sample_and_log_prob(distribution, reparameterize=True)[0]]
    if kind == "normal":
        draws += [distribution.mean, distribution.mode, distribution.variance]
    for draw in draws:
        assert draw.shape[-3:] == (6, 3, 3)
        padding = draw[..., ~MASK]
        assert torch.equal(padding, torch.zeros_like(padding))
        assert bool((draw[..., MASK] != 0).all())


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("value", [*POISON, float("inf"), 0.0])
def test_values_in_padding_have_no_effect(kind, value):
    loc, scale = parameters(5)
    action = actions(loc, scale, kind)

    def run(poison):
        inputs = [x.clone() for x in (loc, scale, action)]
        if poison:
            for x in inputs:
                x[..., ~MASK] = value
        for x in inputs:
            x.requires_grad_()
        distribution = padded(*inputs[:2], kind)
        log_prob = distribution.log_prob(inputs[2])
        torch.manual_seed(1)
        draws = [*sample_and_log_prob(distribution, (2,), reparameterize=True)]
        draws += [*sample_and_log_prob(distribution, (2,)), distribution.rsample()]
        total = log_prob.sum() + sum(draw.square().sum() for draw in draws)
        if kind == "normal":
            total = total + distribution.entropy().sum()
        total.backward()
        return [log_prob, *draws, *(x.grad for x in inputs)]

    clean, poisoned = run(False), run(True)
    for first, second in zip(clean, poisoned):
        assert bool(second.isfinite().all())
        assert_same(first, second)
    for gradient in poisoned[-3:]:
        assert bool((gradient[..., ~MASK] == 0).all())
        assert bool((gradient[..., MASK] != 0).any())


@pytest.mark.parametrize("kind", ["normal", "scalar", "tensor"])
def test_gradients_of_log_prob_pass_gradcheck(kind):
    loc, scale = (x.double() for x in parameters(2))
    action = actions(loc, scale, kind).double()
    inputs = [x.requires_grad_() for x in (loc, scale, action)]
    assert torch.autograd.gradcheck(lambda a, b, c: padded(a, b, kind).log_prob(c), inputs)


@pytest.mark.parametrize("kind", ["normal", "tensor"])
@pytest.mark.parametrize("shape", [(3, 3), (1, 3, 3), (4, 3, 3), (2, 1, 3, 3), (2, 4, 3, 3)])
def test_mask_broadcasts_over_batch_dims(kind, shape):
    loc, scale = parameters(2, 4)
    action = actions(loc, scale, kind)
    log_prob = padded(loc, scale, kind, MASK.expand(shape)).log_prob(action)
    assert_same(log_prob, padded(loc, scale, kind).log_prob(action))


def test_agent_without_action_features_has_log_prob_0():
    mask = MASK.clone()
    mask[1] = False
    loc, scale = parameters(2)
    for kind in ("normal", "tensor"):
        distribution = padded(loc, scale, kind, mask)
        assert bool((distribution.log_prob(torch.full((2, 3, 3), 0.1))[:, 1] == 0).all())


@pytest.mark.parametrize("kind", ["normal", "tensor"])
def test_expand(kind):
    loc, scale = parameters(1)
    action = actions(*parameters(5), kind)
    one = padded(loc, scale, kind)
    wide = one.expand((5, 3))
    assert type(wide) is type(one)
    assert wide.batch_shape == (5, 3)
    assert wide.sample().shape == (5, 3, 3)
    assert wide.root_dist.loc.shape == (5, 3, 3) if kind != "normal" else True
    assert_same(wide.log_prob(action), one.log_prob(action))
    assert one.batch_shape == (1, 3)


@pytest.mark.parametrize("kind", ["normal", "unit", "tensor"])
def test_update_replaces_parameters(kind):
    loc, scale = parameters(4)
    action = actions(loc, scale, kind)
    distribution = padded(*parameters(4, seed=1), kind)
    distribution.update(loc.masked_fill(~MASK, float("nan")), scale)
    assert_same(distribution.log_prob(action), padded(loc, scale, kind).log_prob(action))


@pytest.mark.parametrize("kind", ["normal", "tensor"])
@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), lambda loc: torch.full_like(loc, 0.5)])
def test_scale_may_be_a_number_or_a_function(kind, scale):
    loc, _ = parameters(4)
    action = actions(loc, torch.full_like(loc, 0.5), kind)
    full = padded(loc, torch.full_like(loc, 0.5), kind).log_prob(action)
    assert_same(padded(loc, scale, kind).log_prob(action), full)


def test_kl_divergence_ignores_padding():
    (loc, scale), (other, wide) = parameters(4), parameters(4, seed=1)
    divergence = kl_divergence(padded(loc, scale, "normal"), padded(other, wide, "normal"))
    for agent in range(3):
        own = of_agent(loc, scale, "normal", agent)
        torch.testing.assert_close(
            divergence[..., agent], kl_divergence(own, of_agent(other, wide, "normal", agent))
        )


def test_entropy_mean_and_mode_of_tanh_normal_are_undefined():
    distribution = padded(*parameters(2), "tensor")
    assert not has_analytic_entropy(distribution)
    assert has_analytic_entropy(padded(*parameters(2), "normal"))
    for name in ("entropy", "mean"):
        with pytest.raises(NotImplementedError):
            value = getattr(distribution, name)
            value()
    with pytest.raises(RuntimeError, match="mode"):
        _ = distribution.mode
    assert distribution.num_params == PaddedNormal.num_params == 2
    assert distribution.arg_constraints == TanhNormal.arg_constraints


def test_get_mode_finds_most_likely_action():
    loc, scale = parameters(2)
    distribution = padded(loc, 0.3 * scale, "tensor")
    mode = distribution.get_mode()
    assert bool((mode[..., ~MASK] == 0).all())
    better = distribution.log_prob(mode) > distribution.log_prob(distribution.sample((50,)))
    assert bool(better.float().mean() > 0.95)


@pytest.mark.parametrize("kind", ["normal", "tensor"])
@pytest.mark.parametrize(
    "mask",
    [
        MASK.float(),
        MASK[:2],
        MASK[:, :2],
        MASK[0],
        MASK.expand(3, 3, 3),
        MASK.expand(1, 2, 3, 3),
        torch.ones(1, 1, dtype=torch.bool),
    ],
)
def test_mask_of_wrong_shape_or_dtype_raises(kind, mask):
    with pytest.raises(ValueError, match=r"mask .* expected torch.bool \(3, 3\)"):
        padded(*parameters(2), kind, mask)


@pytest.mark.parametrize("kind", ["normal", "unit", "tensor"])
def test_compiles(kind):
    loc, scale = parameters(4)
    action = actions(loc, scale, kind)

    def score(loc, scale, action):
        distribution = padded(loc, scale, kind)
        return distribution.log_prob(action), distribution.deterministic_sample

    compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
    for first, second in zip(
        compiled(loc.requires_grad_(), scale, action), score(loc, scale, action)
    ):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


def make_actor(kind):
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), NormalParamExtractor())
    keys = {"loc": ("car", "loc"), "scale": ("car", "scale")}
    bounds = BOUNDS[kind] or {}
    return ProbabilisticActor(
        TensorDictModule(module, [("car", "observation")], [*keys.values()]),
        in_keys=keys,
        out_keys=[("car", "action")],
        distribution_class=PaddedNormal if kind == "normal" else PaddedTanhNormal,
        distribution_kwargs={"mask": MASK, **bounds},
        return_log_prob=True,
        log_prob_key=("car", "action_log_prob"),
    )


@pytest.mark.parametrize("kind", ["normal", "unit", "tensor"])
@pytest.mark.parametrize("how", ["RANDOM", "DETERMINISTIC", "MEAN", "MODE"])
def test_actor_samples_and_scores_actions(kind, how):
    actor = make_actor(kind)
    td = TensorDict({"car": TensorDict({"observation": torch.randn(5, 3, 4)}, [5, 3])}, [5])
    with set_interaction_type(InteractionType[how]):
        if kind != "normal" and how == "MODE":
            with pytest.raises(RuntimeError, match="mode"):
                actor(td)
            return
        actor(td)
    action = td["car", "action"]
    assert action.shape == (5, 3, 3)
    assert td["car", "action_log_prob"].shape == (5, 3)
    assert bool((action[:, ~MASK] == 0).all())
    assert bool((action[:, MASK] != 0).all())
    again = actor.get_dist(td).log_prob(action)
    torch.testing.assert_close(again, td["car", "action_log_prob"])
    again.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in actor.parameters())


def test_padded_outputs_of_an_actor_get_no_gradient():
    actor = make_actor("tensor")
    last = torch.zeros(5, 3, 4)
    last[:, 1] = torch.randn(5, 4)  # besides the bias, only agent 1 has an output
    td = actor(TensorDict({"car": TensorDict({"observation": last}, [5, 3])}, [5]))
    actor.get_dist(td).log_prob(td["car", "action"])[:, 1].sum().backward()
    weight = next(p for p in actor.parameters() if p.ndim == 2).grad
    assert bool((weight[[1, 2, 4, 5]] == 0).all())
    assert bool((weight[[0, 3]] != 0).all())
