"""Custom bodies and custom kinds of parameter sharing."""

from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest
import torch
from pictures import picture_group, randomize_parameters
from runs import small_config, table
from tensordict import TensorDict
from torch import nn
from torchrl.data import Categorical, Unbounded

import torchrl_marl
from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import (
    CriticConfig,
    ModuleStack,
    NetworkConfig,
    make_actor,
    make_critic,
    registry,
)
from torchrl_marl.modules.bodies import initialize, make_mlp
from torchrl_marl.modules.inputs import Features
from torchrl_marl.modules.registry import register_body, register_sharing
from torchrl_marl.recipes import load_config
from torchrl_marl.specs.joining import join


class MeanBody(nn.Module):
    """Reads an agent's own features and the mean over the living agents linked to it."""

    def __init__(self, group, out_features, config, *, gain, device=None):
        super().__init__()
        width = Features(2 * group.observation_dim)
        self.network = make_mlp(width, out_features, config, gain=gain, device=device)

    def forward(self, features, mask, context):
        heard = torch.ones(2 * features.shape[-2:-1], dtype=torch.bool)
        heard = heard if context.links is None else context.links
        heard = (heard if mask is None else heard & mask.unsqueeze(-2)).to(features.dtype)
        mean = heard @ features / heard.sum(-1, keepdim=True).clamp_min(1)
        return self.network(torch.cat([features, mean], -1)), None


@pytest.fixture
def mean_body():
    register_body("mean", "the mean of the living, beside one's own features", body=MeanBody)
    yield
    registry.BODIES.remove("mean")


class TestBodyOfOnesOwn:
    def test_custom_body_reads_living_agents_of_its_group(self, mean_body):
        cat = AgentSpec("cat", 2, Unbounded((3,)), Categorical(4))
        mouse = AgentSpec("mouse", 2, Unbounded((3,)), Categorical(4))
        group = join(tuple(TeamSpec([cat, mouse]).groups.values()))
        actor = randomize_parameters(make_actor(group, NetworkConfig([8], body="mean")))
        mask = torch.tensor([[True, True], [True, False]])
        features = torch.randn(2, 2, 3)

        def logits(features):
            td = {
                name: TensorDict({"observation": features[i], "mask": mask[i]}, [2])
                for i, name in enumerate(["cat", "mouse"])
            }
            return actor(group.gather(TensorDict(td, [])))["cat+mouse", "logits"]

        before = logits(features)
        for i in range(4):
            other = features.clone()
            other.view(4, 3)[i] += 1.0
            changed = (logits(other) != before).any(-1).tolist()
            expected = {0: [1, 1, 0, 0], 1: [1, 1, 0, 0], 2: [0, 0, 1, 1], 3: [0, 0, 0, 0]}[i]
            assert changed == [bool(x) for x in expected]

    def test_custom_body_is_chosen_by_an_override_and_trains(self, mean_body, tmp_path):
        """Also as the body of a central critic, and as a replayed graph."""
        run = torchrl_marl.train(
            "toy_arena_mappo",
            folder=str(tmp_path / "run"),
            total_frames=256,
            frames_per_batch=128,
            execution="trace",
            **{
                "learner.actor.body": "mean",
                "learner.critic.body": "mean",
                "env.num_envs": 8,
                "learner.minibatch_size": 64,
                "evaluation.episodes": 2,
                "logging.progress": False,
            },
        )
        assert run.config.learner.actor.body == "mean"
        assert any(isinstance(module, MeanBody) for module in run.policy.modules())

    def test_per_agent_body_trains_in_a_population(self, tmp_path):
        """Bitwise equal to the built-in network from the same builder."""
        register_body("copy", "the network of mlp", network=make_mlp)
        try:
            for body in ("mlp", "copy"):
                learner = {"actor.body": body, "critic.body": body, "minibatch_size": 40}
                given = {"population": {"size": 2}, "learner": learner, "total_frames": 160}
                torchrl_marl.train(small_config(folder=str(tmp_path / body), **given))
        finally:
            registry.BODIES.remove("copy")
        rows = [table(tmp_path / body / "seed1/metrics.csv") for body in ("mlp", "copy")]
        assert rows[0] == rows[1]

    def test_body_over_all_agents_raises_in_a_population(self, mean_body):
        with pytest.raises(ConfigError, match="critic.body is 'mean', but it reads all agents"):
            load_config("toy_arena_mappo", ["population.size=2", "learner.critic.body=mean"])

    def test_invalid_registrations_raise(self, mean_body):
        with pytest.raises(ConfigError, match="body 'mlp' is registered already"):
            register_body("mlp", "another", body=MeanBody)
        with pytest.raises(ConfigError, match="body 'two' has two makers, expected one"):
            register_body("two", "both", network=make_mlp, body=MeanBody)
        with pytest.raises(ConfigError, match="body 'no' has no maker"):
            register_body("no", "none")

    def test_path_that_cannot_be_imported_raises(self):
        body = registry.Body("lost", network="no_such_module:make")
        with pytest.raises(ConfigError, match="needs no_such_module:make, which cannot be import"):
            body.make_network  # noqa: B018

    def test_rerun_notebook_cell_replaces_registration(self):
        """A notebook defines the function again, with the same name."""
        cell = "def make_own(in_features, out_features, config): return {}"
        register = "register_body('own', 'mine', network=make_own)"
        names = {"__name__": "__main__", "register_body": register_body}
        try:
            for result in (1, 2):
                exec(f"{cell.format(result)}\n{register}", names)
                assert registry.BODIES.of("own").network is names["make_own"]
            with pytest.raises(ConfigError, match="body 'own' is registered already"):
                register_body("own", "another", network=make_mlp)
            with pytest.raises(ConfigError, match="body 'own' is registered already"):
                register_body("own", "another", network=lambda *_: None)
        finally:
            registry.BODIES.remove("own")

    def test_team_value_with_custom_body_raises(self, mean_body):
        config = CriticConfig([8], body="mean", value_per="team")
        with pytest.raises(ConfigError, match="value_per is 'team', but a network over agents"):
            make_critic(picture_group(Unbounded((3,))), config)


def linear_of(extra):
    def make(inputs, out_features, config, *, gain, device=None, **cells):
        return nn.Sequential(nn.Linear(inputs.width + extra[0], out_features + extra[1]))

    return make


class Stateful(MeanBody):
    """Returns a hidden state, which bodies over all agents do not have."""

    def forward(self, features, mask, context):
        return super().forward(features, mask, context)[0], features


class Pooled(MeanBody):
    """Returns one row for the team."""

    def forward(self, features, mask, context):
        return super().forward(features, mask, context)[0].mean(-2), None


class TestInvalidBody:
    """Errors come before the first step; a wrong width used to become an action out of range."""

    @pytest.mark.parametrize(
        ("maker", "message"),
        [
            ({"network": linear_of((0, 1))}, r"returns \[2, 5\] for .*, expected \[2, 4\]"),
            ({"network": linear_of((1, 0))}, r"make fails on zeros \[2, 3\]: RuntimeError"),
            ({"network": lambda *_, **__: None}, "returns a NoneType, expected a torch.nn.Module"),
            ({"network": lambda inputs: None}, "fails: TypeError: .* unexpected keyword"),
            ({"body": Stateful}, r"network of Stateful must return \(features, None\)"),
            ({"body": Pooled}, r"Pooled returns \[2, 4\] for .*, expected \[2, 4, 4\]"),
        ],
    )
    def test_invalid_networks_raise(self, maker, message):
        register_body("wrong", "a mistake", **maker)
        try:
            with pytest.raises(ConfigError, match=message):
                make_actor(picture_group(Unbounded((3,)), n=4), NetworkConfig(body="wrong"))
        finally:
            registry.BODIES.remove("wrong")

    def test_bodies_that_need_a_mask_are_built_for_groups_with_one(self):
        class Masked(MeanBody):
            def forward(self, features, mask, context):
                return super().forward(features, mask & mask, context)

        group = picture_group(Unbounded((3,)), n=4)
        register_body("masked", "needs a mask", body=Masked)
        try:
            make_actor(replace(group, mask_key=("agents", "mask")), NetworkConfig(body="masked"))
            with pytest.raises(ConfigError, match="TypeError: unsupported operand"):
                make_actor(replace(group, mask_key=None), NetworkConfig(body="masked"))
        finally:
            registry.BODIES.remove("masked")

    def test_check_preserves_modes_and_norm_statistics(self):
        def make(inputs, out_features, config, **settings):
            frozen = nn.BatchNorm1d(inputs.width).eval()
            return nn.Sequential(frozen, nn.Linear(inputs.width, 8), nn.BatchNorm1d(8), own)

        own = nn.Linear(8, 4)
        register_body("norms", "with statistics", network=make)
        try:
            actor = make_actor(picture_group(Unbounded((3,)), n=4), NetworkConfig(body="norms"))
        finally:
            registry.BODIES.remove("norms")
        first, last = (one for one in actor.modules() if isinstance(one, nn.BatchNorm1d))
        assert (first.training, last.training, last.num_batches_tracked) == (False, True, 0)


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (lambda builder: builder.by_index([0]), r"index is \[0\], expected a number for each of 4"),
        (lambda builder: builder.by_index([0, 2, 0, 2]), "number the networks 0, 1, 2"),
        (lambda builder: [0, 0, 1, 1], "returns a list, expected a torch.nn.Module"),
    ],
)
def test_invalid_ways_of_sharing_raise(way, message):
    register_sharing("wrong", "a mistake", way)
    try:
        with pytest.raises(ConfigError, match=message):
            make_actor(picture_group(Unbounded((3,)), n=4), NetworkConfig(sharing="wrong"))
    finally:
        registry.SHARINGS.remove("wrong")


OWN_BODY = registry.Body("the network of mlp", network=make_mlp)
OWN_SHARING = registry.Sharing("one network", lambda builder: builder.by_index([0] * 4))


def test_entry_points_of_packages_are_found(monkeypatch):
    """Commands find own bodies and ways of sharing by entry points only."""

    def points(group):
        what = {"torchrl_marl.bodies": "OWN_BODY", "torchrl_marl.sharings": "OWN_SHARING"}
        return [EntryPoint("own", f"{__name__}:{what[group]}", group)] if group in what else []

    monkeypatch.setattr("torchrl_marl.settings.registry.entry_points", points)
    words = ["learner.actor.body=own", "learner.actor.sharing=own"]
    actor = load_config("toy_arena_mappo", words).learner.actor
    make_actor(picture_group(Unbounded((5,)), n=4), actor)
    with pytest.raises(ConfigError, match="body 'own' is registered already"):
        register_body("own", "another", network=linear_of((0, 0)))


@pytest.mark.parametrize("setting", ["actor.body", "actor.sharing", "algorithm"])
def test_unregistered_name_error_mentions_registration(setting):
    """The error suggests to register the name, not only to use another algorithm or body."""
    with pytest.raises(ConfigError, match="use learner.*, or register 'own1234' first"):
        load_config("toy_arena_mappo", [f"learner.{setting}=own1234"])


def mirrored(builder):
    """Builds the networks of ``sharing_index`` for the agents from the last to the first."""
    return builder.by_index(builder.config.sharing_index[::-1])


def test_custom_sharing():
    register_sharing("mirrored", "as sharing_index says, backwards", mirrored, needs_index=True)
    try:
        words = ["learner.actor.sharing=mirrored", "learner.actor.sharing_index=[1,0,0,0]"]
        config = load_config("toy_arena_mappo", words).learner.actor
        actor = make_actor(picture_group(Unbounded((5,)), n=4), config)
        (network,) = [m for m in actor.modules() if isinstance(m, ModuleStack)]
        assert network.index == (0, 0, 0, 1)
        with pytest.raises(ConfigError, match="sharing_index"):
            load_config("toy_arena_mappo", words[1:])
    finally:
        registry.SHARINGS.remove("mirrored")


def test_hidden_layers_start_orthogonal():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(4, 2))
    initialize(network, 0.5)
    kernel = network[0].weight.flatten(1)
    torch.testing.assert_close(kernel @ kernel.mT, 2 * torch.eye(4))
    torch.testing.assert_close(network[1].weight @ network[1].weight.mT, 0.25 * torch.eye(2))
