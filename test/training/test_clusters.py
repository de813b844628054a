"""SePS from the recipe: sharing is computed once, before training."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Unbounded

import torchrl_marl
from torchrl_marl import AgentSpec
from torchrl_marl.envs import MarlEnv
from torchrl_marl.errors import ConfigError
from torchrl_marl.training import Run
from torchrl_marl.training.config import read_run_config


class Pushed(MarlEnv):
    """The effect of an action depends on the agent: it pushes forward or back."""

    def __init__(self, num_envs, signs=(1.0, -1.0, 1.0, -1.0), **kwargs):
        super().__init__(num_envs, **kwargs)
        self.signs = torch.tensor(signs).view(-1, 1)
        spec = AgentSpec("cart", len(signs), Unbounded((1,)), Bounded(-1, 1, (1,)))
        self.register_agent(spec, group="carts")

    def _reset(self, tensordict):
        self.place = torch.randn(self.num_envs, len(self.signs), 1)
        return TensorDict({"carts": {"observation": self.place}})

    def _step(self, tensordict):
        self.place = self.place + self.signs * tensordict["carts", "action"]
        reward = -self.place.square()
        return TensorDict({"carts": {"observation": self.place, "reward": reward}})


def train(folder, **network):
    return torchrl_marl.train(
        "toy_arena_mappo",
        env=Pushed(8, max_steps=10),
        total_frames=160,
        frames_per_batch=160,
        learner={"minibatch_size": 80, "actor": {"sharing": "clusters", **network}},
        evaluation={"episodes": 2},
        logging={"progress": False},
        folder=str(folder),
    )


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    return train(tmp_path_factory.mktemp("clustered") / "run", clustering_frames=4000)


def test_clusters_are_computed_and_stored(clustered):
    written = read_run_config(clustered.folder)
    assert written.groups["carts"]["actor"]["sharing_index"] == [0, 1, 0, 1]
    assert "critic" not in written.groups["carts"]
    first = next(clustered.policy.parameters())
    assert first.shape[0] == 2  # networks
    again = Run.load(clustered.folder, env=Pushed(8, max_steps=10))
    for a, b in zip(clustered.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.runs
def test_same_seed_gives_the_same_clusters(clustered, tmp_path):
    torch.rand(7)
    other = train(tmp_path / "other", clustering_frames=4000)
    for a, b in zip(clustered.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_more_clusters_than_agents_raise(tmp_path):
    with pytest.raises(ConfigError, match="n_clusters is 5, expected 1 to 4"):
        train(tmp_path / "run", n_clusters=5, clustering_frames=400)
