"""Convolutions over images: hand-computed values and training."""

import pytest
import torch
from pictures import BYTES, picture_group, randomize_parameters
from samples import POISON
from spotlights import Spotlights
from tensordict import TensorDict, lazy_stack
from torch import nn
from torchrl.data import Categorical, Composite, Unbounded

import torchrl_marl
from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import (
    CriticConfig,
    NetworkConfig,
    ObservationNorm,
    make_actor,
    make_critic,
)
from torchrl_marl.modules.bodies import PictureEncoder, make_cnn
from torchrl_marl.modules.build import make_agent_network
from torchrl_marl.modules.inputs import Features, Picture, agent_features
from torchrl_marl.modules.unsharing import unshare
from torchrl_marl.recipes import load_config
from torchrl_marl.specs.joining import join
from torchrl_marl.specs.teams import group_from_agents

pytestmark = pytest.mark.learning

SMALL = {"num_cells": [8], "body": "cnn"}
SHARINGS = ("none", "full", "group", "trunk", "agent_id", "index")


def pictures(group, *batch, seed=0):
    """Images of bytes, and a mask in which the second agent is dead."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch, *group.observation_shapes[0])
    mask = torch.ones(*batch, group.n_agents, dtype=torch.bool)
    mask[..., 1:2] = group.n_agents == 1
    leaves = {
        "observation": torch.randint(256, shape, generator=generator, dtype=torch.uint8),
        "mask": mask,
    }
    return TensorDict({group.name: TensorDict(leaves, [*batch, group.n_agents])}, batch)


def config_with(sharing, n=3, kind=NetworkConfig, **settings):
    index = [i % 2 for i in range(n)] if sharing == "index" else None
    return kind(sharing=sharing, sharing_index=index, **{**SMALL, **settings})


class TestPictures:
    @pytest.mark.parametrize(
        ("shape", "sides"),
        [
            ((5, 5, 3), (5, 5)),  # never halved
            ((9, 4, 1), (5, 2)),  # once
            ((20, 30, 3), (5, 8)),  # twice: 30, 15, 8
            ((3, 20, 30), (5, 8)),
            ((84, 84, 4), (11, 11)),  # 84, 42, 21, 11
        ],
    )
    def test_sizes_by_hand(self, shape, sides):
        encoder = PictureEncoder(shape, nn.ReLU)
        assert encoder.width == 32 * sides[0] * sides[1]
        assert encoder(torch.zeros(2, *shape)).shape == (2, encoder.width)
        kernels = [layer.weight.shape for layer in encoder.layers if isinstance(layer, nn.Conv2d)]
        channels = min(shape[0], shape[-1])
        assert kernels == [(16, channels, 3, 3), (32, 16, 3, 3), (32, 32, 3, 3)]

    def test_channels_may_be_first_or_last(self):
        last, first = PictureEncoder((7, 6, 2), nn.Tanh), PictureEncoder((2, 7, 6), nn.Tanh)
        first.load_state_dict(last.state_dict())
        picture = torch.randn(4, 7, 6, 2)
        torch.testing.assert_close(first(picture.permute(0, 3, 1, 2)), last(picture))

    def test_explicit_channel_position(self):
        """Overcooked's cramped room is 4 x 5 with 26 channels."""
        group = picture_group(Unbounded((4, 5, 26)))
        for channels, n in [(None, 4), ("first", 4), ("last", 26)]:
            actor = make_actor(group, NetworkConfig(**SMALL, channels=channels))
            (kernel,) = [p for p in actor.parameters() if p.ndim == 4 and p.shape[0] == 16]
            assert kernel.shape == (16, n, 3, 3)
        critic = make_critic(group, CriticConfig(**SMALL, channels="last"))
        assert any(p.shape == (16, 26, 3, 3) for p in critic.parameters())
        encoder = PictureEncoder((4, 5, 26), nn.Tanh, channels="last")
        moved = PictureEncoder((26, 4, 5), nn.Tanh, channels="first")
        moved.load_state_dict(encoder.state_dict())
        picture = torch.randn(3, 4, 5, 26)
        torch.testing.assert_close(moved(picture.permute(0, 3, 1, 2)), encoder(picture))

    def test_channels_are_read_by_convolutions_only(self):
        settings = {"learner.actor.body": "cnn", "learner.actor.channels": "last"}
        assert load_config("toy_arena_mappo", settings).learner.actor.channels == "last"
        with pytest.raises(ConfigError, match="read only where learner.actor.body is cnn"):
            load_config("toy_arena_mappo", {"learner.actor.channels": "last"})
        with pytest.raises(ConfigError, match="channels is 'middle', expected first or last"):
            load_config("toy_arena_mappo", settings | {"learner.actor.channels": "middle"})

    def test_features_with_images_by_hand(self):
        """Two images of one leaf among other numbers; bytes are divided by 255."""
        shape, scale = (2, 2, 1), 1 / 255
        pictures = (Picture(1, shape, "eye", scale), Picture(7, shape, "eye", scale))
        network = make_cnn(Features(12, pictures), 3, NetworkConfig([]), gain=1.0)
        row = torch.arange(12.0)
        encoder, linear = network.encoders[0], network.head
        first = encoder(row[1:5].view(1, 2, 2, 1) / 255)
        second = encoder(row[7:11].view(1, 2, 2, 1) / 255)
        others = row[[0, 5, 6, 11]].unsqueeze(0)
        expected = linear(torch.cat([first, second, others], -1)).squeeze(0)
        torch.testing.assert_close(network(row), expected)
        torch.testing.assert_close(network(row.expand(4, 2, 12)), expected.expand(4, 2, 3))
        assert len(network.encoders) == 1
        assert sum(p.numel() for p in linear.parameters()) == 3 * (2 * 128 + 4) + 3

    def test_cnn_actor_by_hand(self):
        group = picture_group()
        actor = randomize_parameters(make_actor(group, NetworkConfig(**SMALL)))
        td = actor(pictures(group, 4))
        (network,) = actor.module[0].module.network
        seen = td["car", "observation"].float() / 255
        seen = torch.where(td["car", "mask"][..., None, None, None], seen, 0.0)
        encoding = network.encoders[0](seen.flatten(0, 1))
        torch.testing.assert_close(td["car", "logits"], network.head(encoding).view(4, 3, 4))

    def test_positions_of_images_in_features(self):
        """A dict of a camera and a speed; leaves are in the order of their keys."""
        both = Composite(camera=BYTES, speed=Unbounded((2,)))
        row = agent_features(picture_group(both))[0]
        start = 0 if row.pictures[0].start == 0 else 2
        assert row == Features(92, (Picture(start, (6, 5, 3), "observation.camera", 1 / 255),))
        floats = agent_features(picture_group(Unbounded((6, 5, 3))))
        assert floats == [Features(90, (Picture(0, (6, 5, 3), "observation"),))] * 3
        assert agent_features(picture_group(Unbounded((5,)))) == [Features(5)] * 3

    def test_observation_of_image_and_numbers(self):
        both = Composite(camera=BYTES, speed=Unbounded((2,)))
        group = picture_group(both)
        actor = randomize_parameters(make_actor(group, NetworkConfig(**SMALL)))
        leaves = {"camera": pictures(picture_group(), 4)["car", "observation"]}
        leaves["speed"] = torch.randn(4, 3, 2)
        mask = torch.ones(4, 3, dtype=torch.bool)
        td = TensorDict({"car": {"observation": leaves, "mask": mask}}, [4])
        before = actor(td.clone())["car", "logits"]
        for leaf in ("camera", "speed"):
            other = td.clone()
            other["car", "observation", leaf][:, 0] += 1
            after = actor(other)["car", "logits"]
            assert bool((after != before)[:, 0].all())
            assert torch.equal(after[:, 1:], before[:, 1:])

    @pytest.mark.parametrize("sharing", SHARINGS)
    def test_every_kind_of_sharing(self, sharing):
        group = picture_group()
        actor = randomize_parameters(make_actor(group, config_with(sharing)))
        td = pictures(group, 4)
        before = actor(td.clone())["car", "logits"]
        td["car", "observation"][:, 2] = 255 - td["car", "observation"][:, 2]
        after = actor(td)["car", "logits"]
        assert torch.equal(after[:, :2], before[:, :2])
        assert bool((after != before)[:, 2].any(-1).all())
        n = {"none": 3, "index": 2}.get(sharing, 1)
        kernels = [p for p in actor.parameters() if p.shape[-2:] == (3, 3)]
        assert sum(p.numel() for p in kernels) == n * 9 * (16 * 3 + 32 * 16 + 32 * 32)

    @pytest.mark.parametrize("sharing", ["full", "none", "trunk"])
    def test_unsharing_keeps_the_outputs(self, sharing):
        network = randomize_parameters(
            make_agent_network(picture_group(), 4, config_with(sharing), gain=1.0)
        )
        features = torch.randn(5, 3, 90)
        own, _ = unshare(network, 3)
        torch.testing.assert_close(own(features), network(features)[0])
        kernels = [p for p in own.parameters() if p.shape[-2:] == (3, 3)]
        assert all(len(p) == 3 for p in kernels)

    def test_sharing_by_masks_without_mlp_raises(self):
        with pytest.raises(ConfigError, match=r"sharing is 'masks'.*use body=mlp"):
            make_actor(picture_group(), config_with("masks"))

    def test_cnn_without_image_raises(self):
        with pytest.raises(ConfigError, match=r"body is 'cnn', but no observation is an image"):
            make_actor(picture_group(Unbounded((5,))), NetworkConfig(**SMALL))

    def test_unknown_body_raises(self):
        with pytest.raises(ConfigError, match=r"body is 'cn'; did you mean 'cnn'.*one of mlp, cnn"):
            make_actor(picture_group(), NetworkConfig(body="cn"))

    @pytest.mark.parametrize("architecture", ["set", "attention"])
    def test_set_critics_with_cnn_raise(self, architecture):
        config = CriticConfig(architecture=architecture, **SMALL)
        with pytest.raises(ConfigError, match="body is 'cnn'; use architecture=mlp or body=mlp"):
            make_critic(picture_group(), config)

    @pytest.mark.parametrize("centralized", [True, False])
    @pytest.mark.parametrize("sharing", ["none", "group"])
    def test_agents_that_a_critic_observes(self, centralized, sharing):
        group = picture_group()
        config = config_with(sharing, kind=CriticConfig)
        critic = randomize_parameters(make_critic(group, config, centralized=centralized))
        td = pictures(group, 4)
        before = critic(td.clone())["car", "state_value"]
        assert before.shape == (4, 3, 1)
        td["car", "observation"][:, 2] = 255 - td["car", "observation"][:, 2]
        changed = (critic(td)["car", "state_value"] != before).flatten(1).all(0)
        assert changed.tolist() == ([True] * 3 if centralized else [False, False, True])

    def test_central_critic_shares_one_encoder(self):
        """One encoder for the images of three agents, one perceptron over the encodings."""
        critic = randomize_parameters(make_critic(picture_group(), CriticConfig(**SMALL)))
        network = critic.module.network[0]
        assert len(network.encoders) == 1
        assert network.head[0].in_features == 3 * 32 * 6 * 5

    @pytest.mark.parametrize("value", POISON)
    def test_values_of_masked_agents_have_no_effect(self, value):
        group = picture_group(Unbounded((6, 5, 3)))
        actor = randomize_parameters(make_actor(group, NetworkConfig(**SMALL)))
        critic = randomize_parameters(make_critic(group, CriticConfig(**SMALL)))
        found = []
        for hold in (0.0, value):
            td = pictures(group, 4)
            td["car", "observation"] = td["car", "observation"].float() / 255
            td["car", "observation"][:, 1] = hold
            output = critic(actor(td))
            total = output["car", "logits"].square().sum() + output["car", "state_value"].sum()
            parameters = [*actor.parameters(), *critic.parameters()]
            found.append([total, *torch.autograd.grad(total, parameters)])
        assert all(torch.equal(a, b) for a, b in zip(*found))

    def test_normalized_images_are_not_rescaled(self):
        norm = ObservationNorm(90)
        actor = make_actor(picture_group(), NetworkConfig(**SMALL), observation_norm=norm)
        assert actor.module[0].module.network[0].pictures[0].scale == 1.0


class TestKinds:
    """Two kinds with images of two sizes in one group: padded, or stacked lazily."""

    def group(self):
        near = AgentSpec("near", 1, Unbounded((6, 5, 3)), Categorical(4))
        far = AgentSpec("far", 2, Unbounded((4, 7, 3)), Categorical(4))
        return group_from_agents("cars", [near, far], None, False)

    def data(self):
        own = [torch.randn(5, 6, 5, 3), torch.randn(5, 4, 7, 3), torch.randn(5, 4, 7, 3)]
        agents = [
            TensorDict({"observation": x, "mask": torch.ones(5, dtype=torch.bool)}, [5])
            for x in own
        ]
        return own, TensorDict({"cars": lazy_stack(agents, -1)}, [5])

    def test_each_kind_has_its_own_convolutions(self):
        group = self.group()
        actor = randomize_parameters(make_actor(group, NetworkConfig(**SMALL)))
        own, td = self.data()
        logits = actor.get_dist(td).logits
        logits = logits - logits.logsumexp(-1, keepdim=True)
        for agent, seen in enumerate(own):
            stack = actor.module[0].module.network
            stack = next(m for m in stack.modules() if hasattr(m, "index"))
            alone = stack[agent].detach()(seen.flatten(1))
            expected = alone - alone.logsumexp(-1, keepdim=True)
            torch.testing.assert_close(logits[:, agent], expected)

    @pytest.mark.parametrize("sharing", ["full", "trunk", "agent_id"])
    def test_one_network_for_images_of_two_sizes_is_refused(self, sharing):
        with pytest.raises(ConfigError, match="images of different shapes; use sharing=group"):
            make_actor(self.group(), config_with(sharing))

    def test_joined_groups_with_images(self):
        near = AgentSpec("near", 1, BYTES, Categorical(4))
        far = AgentSpec("far", 2, Unbounded((4, 7, 3)), Categorical(4))
        group = join(tuple(TeamSpec([near, far]).groups.values()))
        scales = [row.pictures[0].scale for row in agent_features(group)]
        assert scales == [1 / 255, 1.0, 1.0]
        td = TensorDict(
            {
                "near": pictures(picture_group(n=1, name="near"), 4)["near"],
                "far": {
                    "observation": torch.randn(4, 2, 4, 7, 3),
                    "mask": torch.ones(4, 2, dtype=torch.bool),
                },
            },
            [4],
        )
        td["far"].batch_size = [4, 2]
        actor = randomize_parameters(make_actor(group, NetworkConfig(**SMALL)))
        critic = randomize_parameters(make_critic(group, CriticConfig(**SMALL)))
        joined = critic(actor(group.gather(td)))
        assert joined["near+far", "logits"].shape == (4, 3, 4)
        before = joined["near+far", "state_value"]
        td["far", "observation"] += 1.0
        changed = critic(group.gather(td))["near+far", "state_value"] != before
        assert changed.flatten(1).all(0).tolist() == [False, True, True]


def trained(tmp_path, env, **settings):
    own = {
        "frames_per_batch": 128,
        "learner.minibatch_size": 64,
        "learner.lr": 3e-3,
        "evaluation.episodes": 128,
        "logging.progress": False,
    }
    return torchrl_marl.train(
        "toy_matrix_game_mappo", env=env, folder=str(tmp_path / "run"), **{**own, **settings}
    )


@pytest.mark.parametrize("execution", ["eager", "trace"])
def test_training_on_images(tmp_path, execution):
    """Random actions earn 1/4 per agent; a perceptron over the bytes learns no more."""
    run = trained(
        tmp_path,
        Spotlights(32, seed=0),
        execution=execution,
        total_frames=2560 if execution == "eager" else 256,
        **{"learner.actor.body": "cnn", "learner.critic.body": "cnn"},
    )
    if execution == "eager":
        assert run.summary["return_random"] == pytest.approx(0.25, abs=0.1)
        assert run.summary["return_after"] > 0.9
