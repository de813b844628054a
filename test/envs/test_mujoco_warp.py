"""MuJoCo Warp against MuJoCo, one step from equal states; kernels are compiled for minutes."""

import pytest
import torch

from torchrl_marl.envs import MujocoEnv
from torchrl_marl.envs.mujoco.engines import advance, engine_of
from torchrl_marl.errors import ConfigError

pytest.importorskip("mujoco_warp")
pytest.importorskip("gymnasium_robotics")

pytestmark = pytest.mark.environments

E, STEPS = 256, 20


@pytest.fixture(scope="module")
def ant():
    return MujocoEnv("ant", E, seed=0), MujocoEnv("ant", E, seed=0, engine="warp")


def test_steps_from_equal_states_are_close_to_mujoco(ant):
    exact, fast = ant
    td, td_fast = exact.reset(), fast.reset()
    torch.manual_seed(0)
    for _ in range(STEPS):  # until many legs stand on the ground
        td = exact.rand_action(td)
        fast.physics, fast.fields = exact.physics.float(), exact.fields.float()
        td_fast["agent", "action"] = td["agent", "action"]
        found, expected = fast.step(td_fast)["next"], exact.step(td)["next"]
        torch.testing.assert_close(
            found["state"][:, :27], expected["state"][:, :27], atol=1e-3, rtol=1e-3
        )
        reward = ("agent", "reward")
        torch.testing.assert_close(found[reward], expected[reward], atol=1e-3, rtol=1e-3)
        assert torch.equal(found["agent", "terminated"], expected["agent", "terminated"])
        td = expected.exclude(("agent", "reward"))
        td_fast = td.clone()
    assert exact.fields.any()  # contact forces


def test_contacts_that_exceed_the_memory_give_nan(ant):
    physics = ant[1].physics.clone()
    model, data = engine_of("warp", ant[1]._key)._get_memory(E, "cpu")
    limit, data.njmax = data.njmax, 1
    try:
        found, _ = advance(physics, torch.zeros(E, 8), torch.zeros(E, 0), "warp", ant[1]._key, 1)
    finally:
        data.njmax = limit
    assert model is not None and found.isnan().any(1).sum() > 0


def test_randomization_is_refused_by_the_warp_engine(ant):
    with pytest.raises(ConfigError, match="has no parameter .mass. to randomize"):
        ant[1].randomize({"mass": 2.0})
