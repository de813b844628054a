"""The examples of ``docs/extending.md`` run in environments with masks and without."""

import contextlib
import csv
import importlib.util
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from tensordict import TensorDict

from torchrl_marl import TeamSpec, resume, train
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import ConfigError
from torchrl_marl.learners.algorithms import ALGORITHMS
from torchrl_marl.modules.registry import BODIES, SHARINGS

pytest.importorskip("vmas")

pytestmark = pytest.mark.pages

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
EXAMPLES = {
    "algorithm": "class Reinforce(",
    "body": "def make_residual(",
    "team_body": "class MeanBody(",
}
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def block(of):
    (found,) = (text for text in BLOCKS if of in text)
    return found


@pytest.fixture
def as_before():
    """Restores the registries, and removes the module of an example, after a test."""
    with contextlib.ExitStack() as stack:
        for register in (ALGORITHMS, BODIES, SHARINGS):
            stack.enter_context(mock.patch.dict(register._known))
        yield
    sys.modules.pop("extending", None)


def run_as_module(program, folder):
    """Runs a program as a module file; returns the module and its printed lines."""
    path, printed = folder / "extending.py", []
    path.write_text(program, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("extending", path)
    module = sys.modules["extending"] = importlib.util.module_from_spec(spec)
    module.print = lambda *values: printed.append(" ".join(map(str, values)))
    spec.loader.exec_module(module)
    return module, printed


def in_world(program, recipe):
    """The program of the page with another recipe and a small run."""
    program = re.sub(r'"toy_[a-z_]+_mappo"', repr(recipe), program)
    start, end = program.rindex("total_frames="), program.rindex(")\nprint(run")
    small = "total_frames=160, frames_per_batch=80, env={'num_envs': 4}, evaluation={'episodes': 4}"
    program = f"{program[:start]}{small}\n{program[end:]}"
    if "minibatch" not in program and "reinforce" not in program:
        program = program.replace("learner={", "learner={'minibatch_size': 80, ")
    return program


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("recipe", ["vmas_balance_mappo", "toy_arena_mappo"])
@pytest.mark.parametrize("of", EXAMPLES.values(), ids=EXAMPLES)
def test_example_trains_with_and_without_masks(of, recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, printed = run_as_module(in_world(block(of), recipe), tmp_path)
    (folder,) = (tmp_path / "runs").iterdir()
    with open(folder / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 and "agents/loss_objective" in rows[0]
    assert len(printed) == 1 and "nan" not in printed[0]


@pytest.mark.usefixtures("as_before")
def test_custom_sharing_works_in_an_environment_without_masks(tmp_path):
    program = block("def halves(").replace(
        "from torchrl_marl.envs.toy import Arena", "from torchrl_marl.envs import VmasEnv"
    )
    program = program.replace("Arena(", "VmasEnv('balance', ")
    _, printed = run_as_module(program, tmp_path)
    assert printed == ["[0, 0, 1]"]  # three agents


@pytest.mark.usefixtures("as_before")
def test_masked_values_have_no_effect_on_loss_and_gradients(tmp_path, monkeypatch, capsys):
    """With NaN in all masked entries, loss and gradients stay the same."""
    monkeypatch.chdir(tmp_path)
    algorithm = block("class Reinforce(").split("register_algorithm(\n")[0]
    module, _ = run_as_module(algorithm, tmp_path)
    env = Arena(8, seed=0)
    group = TeamSpec.from_env(env).groups["agents"]
    learner = module.Reinforce({"agents": group}, module.ReinforceConfig())
    batch = env.rollout(8, learner.actors["agents"], break_when_any_done=False).detach()
    acts = batch[group.mask_key]
    assert not acts.all()
    poisoned = batch.clone()
    for key in ("observation", "reward"):
        where = ("next", "agents", key) if key == "reward" else ("agents", key)
        rows = acts.unsqueeze(-1)
        poisoned[where] = torch.where(rows, poisoned[where], float("nan"))
    found = []
    for data in (batch, poisoned):
        learner.optimizer.zero_grad()
        loss = learner.loss(group, data)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in learner.parameters())])
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)


def test_group_mask_with_and_without_mask_key():
    arena, balance = Arena(4, seed=0), VmasEnv("balance", num_envs=4, seed=0)
    masked = TeamSpec.from_env(arena).groups["agents"]
    td = arena.reset()
    assert masked.mask(td) is td["agents", "mask"]
    bare = TeamSpec.from_env(balance).groups["agents"]
    td = balance.reset()
    assert bare.mask_key is None
    assert torch.equal(bare.mask(td), torch.ones(4, 3, dtype=torch.bool))
    assert bare.mask(TensorDict({}, [5, 4])).shape == (5, 4, 3)


def test_group_mask_excludes_agents_of_stored_policies():
    arena = Arena(4, seed=0)
    group, td = TeamSpec.from_env(arena).groups["agents"], arena.reset()
    learns = torch.tensor([True, False, True, False])[:, None].expand_as(td["agents", "mask"])
    td["agents", "learns"] = learns.clone()
    assert torch.equal(group.mask(td), td["agents", "mask"] & learns)
    balance = VmasEnv("balance", num_envs=4, seed=0)
    bare, td = TeamSpec.from_env(balance).groups["agents"], balance.reset()
    td["agents", "learns"] = learns[:, :1].expand(4, 3).clone()
    assert torch.equal(bare.mask(td), td["agents", "learns"])


LEAGUE = {"opponents": "uniform", "snapshot_every": 80, "exploiters": 1, "exploited": 0.5}


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("toy_arena_mappo", {"distributed": {"collectors": 2}}),
        ("toy_kuhn_ippo", {"league": LEAGUE}),
    ],
)
def test_custom_algorithm_trains_and_resumes(recipe, settings, tmp_path, monkeypatch, capsys):
    """Works with distributed collectors and with a league with exploiters."""
    monkeypatch.chdir(tmp_path)
    run_as_module(block("class Reinforce(").split("run = torchrl_marl")[0], tmp_path)
    small = {"env": {"num_envs": 8}, "frames_per_batch": 80, "evaluation": {"episodes": 4}}
    small |= {"learner": {"algorithm": "reinforce"}, "folder": str(tmp_path / "run"), **settings}
    run = train(recipe, total_frames=240, **small)
    with open(run.folder / "metrics.csv") as file:
        assert len(list(csv.DictReader(file))) == 3
    again = resume(run.folder, total_frames=320)
    assert again.summary["frames"] == 320


@pytest.mark.usefixtures("as_before")
def test_algorithm_without_league_support_states_the_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = block("class Reinforce(").split("run = torchrl_marl")[0]
    said = '    learner=f"{__name__}:Reinforce",\n'
    assert said in program
    program = program.replace(said, said + '    no_league="which this one forgets",\n')
    run_as_module(program, tmp_path)
    with pytest.raises(ConfigError, match="is 'reinforce', but a league is given, which this one"):
        train("toy_kuhn_ippo", learner={"algorithm": "reinforce"}, league=LEAGUE)
