"""Networks and environments that exceed the memory raise before they are allocated."""

import pytest
from torchrl.data import Bounded, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.cli.main import main
from torchrl_marl.envs import make_env
from torchrl_marl.errors import ConfigError
from torchrl_marl.modules import make_actor, make_critic
from torchrl_marl.modules.config import CriticConfig, NetworkConfig
from torchrl_marl.runtime import memory

GROUP = TeamSpec([AgentSpec("car", 3, Unbounded((4,)), Bounded(-1, 1, (2,)))]).groups["car"]
GIGANTIC = 10**15  # envs; no machine has the petabytes


@pytest.mark.parametrize(("make", "what"), [(make_actor, "actor"), (make_critic, "critic")])
@pytest.mark.parametrize(
    ("sharing", "size"),
    # (4 + 1) 10^7 + (10^7 + 1) 10^7 + (10^7 + 1) weights, each four floats; once or for 3 agents.
    [("group", "1.6 PB"), ("none", "4.8 PB")],
)
def test_networks_larger_than_memory_raise(make, what, sharing, size):
    kind = NetworkConfig if what == "actor" else CriticConfig
    with pytest.raises(ConfigError) as error:
        make(GROUP, kind([10**7, 10**7], sharing=sharing))
    text = str(error.value)
    assert text.startswith(f"group 'car': {what}.num_cells is [10000000, 10000000]")
    assert f"takes {size} at least, but 'cpu' has " in text
    assert text.endswith("; use smaller widths.")


def test_limit_is_the_memory_of_the_device(monkeypatch):
    needed = 4 * 4 * ((4 + 1) * 8 + (8 + 1) * 1)  # bytes of one network of eight hidden units
    monkeypatch.setattr(memory, "memory_of", lambda device: needed)
    make_actor(GROUP, NetworkConfig([8]))
    monkeypatch.setattr(memory, "memory_of", lambda device: needed - 1)
    with pytest.raises(ConfigError, match=f"takes {needed} B at least, but 'cpu' has {needed - 1}"):
        make_actor(GROUP, NetworkConfig([8]))


@pytest.mark.parametrize("name", ["toy/arena", "vmas/dropout", "pettingzoo/mpe2/simple_spread_v3"])
def test_too_many_envs_for_memory_raise(name):
    if name != "toy/arena":
        pytest.importorskip(name.split("/")[-2] if "mpe2" in name else "vmas")
    with pytest.raises(ConfigError) as error:
        make_env(name, num_envs=GIGANTIC)
    assert str(error.value).startswith(f"env.num_envs is {GIGANTIC}, a step of which takes ")
    assert "kwargs" not in str(error.value)


def test_command_line_reports_too_many_envs(capsys, tmp_path):
    frames = [
        f"env.num_envs={GIGANTIC}",
        f"frames_per_batch={GIGANTIC}",
        f"total_frames={GIGANTIC}",
    ]
    assert main(["train", "toy_arena_mappo", *frames, f"folder={tmp_path}/run"]) == 2
    assert f"env.num_envs is {GIGANTIC}, a step of which" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 8 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 800 bytes"),
    ],
)
def test_out_of_memory_error_names_num_envs(error, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("torchrl_marl.envs.toy.library.make_toy", fail)
    with pytest.raises(
        ConfigError, match="env.num_envs is 5, which needs more memory than available"
    ):
        make_env("toy/arena", num_envs=5)
