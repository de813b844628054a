"""A vault of OG-MARL that flashbax 0.1.3 wrote: two agents, and episodes of 3, 2 and 4 steps.

The second episode is truncated. One more step belongs to no complete episode. Observations and
state count upwards, and the reward of agent i in step t is (2 t + i) / 10.
"""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torchrl.data import Bounded, Categorical, OneHot, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps import vaults
from torchrl_marl.apps.record import record
from torchrl_marl.apps.vaults import is_vault, read_vault
from torchrl_marl.collectors import Dataset, DatasetCollector, write_dataset
from torchrl_marl.errors import DatasetError, MissingExtraError

VAULT = Path(__file__).with_name("vault") / "Good"
ACTIONS = [[3, 2], [2, 1], [1, 0], [0, 0], [0, 3], [2, 3], [2, 2], [3, 2], [2, 2]]


def team_of(action=None, width=3, n=2):
    how = {"action_mask": not isinstance(action, Bounded)}
    spec = AgentSpec("ally", n, Unbounded((width,)), action or Categorical(4), **how)
    return TeamSpec([spec], Unbounded((5,)))


@pytest.fixture(autouse=True)
def _tensorstore():
    pytest.importorskip("tensorstore")


def test_complete_episodes_are_read():
    steps = read_vault(VAULT, team_of())
    assert is_vault(VAULT) and len(steps) == 9
    count = torch.arange(9 * 6, dtype=torch.float32).reshape(9, 2, 3)
    assert torch.equal(steps["ally", "observation"], count)
    assert torch.equal(steps["state"], torch.arange(45.0).reshape(9, 5))
    assert steps["ally", "action"].tolist() == ACTIONS
    assert steps["ally", "action_mask"].all() and steps["ally", "mask"].all()
    expected = torch.arange(18.0).reshape(9, 2, 1) / 10
    torch.testing.assert_close(steps["next", "ally", "reward"], expected)


def test_next_observations_and_done_flags():
    following = read_vault(VAULT, team_of())["next"]
    ends = [False, False, True, False, True, False, False, False, True]
    assert following["done"].flatten().tolist() == ends
    assert following["truncated"].flatten().nonzero().flatten().tolist() == [4]
    assert following["terminated"].flatten().nonzero().flatten().tolist() == [2, 8]
    first = following["ally", "observation"][:, 0, 0] / 6  # number of the step that is observed
    assert first.tolist() == [1, 2, 2, 4, 4, 6, 7, 8, 8]


def test_one_hot_actions():
    steps = read_vault(VAULT, team_of(OneHot(4)))
    assert steps["ally", "action"].long().argmax(-1).tolist() == ACTIONS


def test_vault_is_converted_to_a_dataset(tmp_path):
    team = team_of()
    dataset = write_dataset(tmp_path / "data", read_vault(VAULT, team), {"source": "vault"})
    assert dataset.lengths.tolist() == [3, 2, 4]
    Dataset.open(dataset.folder).check(team)
    assert DatasetCollector(dataset, 3, 6).rollout().shape == (3, 2)


@pytest.mark.parametrize(
    ("team", "message"),
    [
        (team_of(width=4), r"observations \[2, 3\], expected \[2, 4\]"),
        (team_of(n=3), r"observations \[2, 3\], expected \[3, 3\]"),
        (team_of(Bounded(-1, 1, (2,))), r"actions \[2\], expected \[2, 2\]"),
    ],
)
def test_another_environment_is_refused(team, message):
    with pytest.raises(DatasetError, match=message):
        read_vault(VAULT, team)


def test_several_groups_are_refused():
    specs = [AgentSpec(name, 1, Unbounded((3,)), Categorical(4)) for name in ("cat", "mouse")]
    with pytest.raises(DatasetError, match="has one group of agents, but the environment has 2"):
        read_vault(VAULT, TeamSpec(specs))


def test_damaged_vault_raises(tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(VAULT, broken)
    shutil.rmtree(broken / "d")
    with pytest.raises(DatasetError, match="cannot be read .*download it again"):
        read_vault(broken, team_of())


def test_vault_without_complete_episode_raises(monkeypatch):
    found = vaults._read_arrays(VAULT)
    found["terminals"], found["truncations"] = (torch.zeros(1, 10, 2) for _ in range(2))
    monkeypatch.setattr(vaults, "_read_arrays", lambda folder: found)
    with pytest.raises(DatasetError, match="Good' has no whole episode"):
        read_vault(VAULT, team_of())


def test_record_refuses_another_environment(tmp_path):
    with pytest.raises(DatasetError, match=r"observations \[2, 3\], expected \[2, 2\]"):
        record(VAULT, tmp_path / "data", "toy_matrix_game_mappo")
    assert not list(tmp_path.iterdir())


def test_missing_tensorstore_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(MissingExtraError, match=r"tensorstore.*\[vault\]"):
        read_vault(VAULT, team_of())
