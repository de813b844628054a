"""A trained policy in another environment, for example with more agents."""

import json

import pytest
import torch
from torchrl.envs.utils import ExplorationType, set_exploration_type

import torchrl_marl
from torchrl_marl.apps.cli.main import main
from torchrl_marl.envs.toy import Arena
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.training import Run

SMALL = {
    "threads": 1,
    "execution": "eager",
    "total_frames": 240,
    "frames_per_batch": 120,
    "evaluation": {"both": False, "episodes": 4},
    "logging": {"progress": False},
}
NAVIGATION = {"name": "navigation", "num_envs": 4, "max_steps": 10, "kwargs": {"n_agents": 3}}


def trained(folder, recipe="vmas_balance_mappo", env=None, **learner):
    own = {"minibatch_size": 60, "num_epochs": 1, **learner}
    return torchrl_marl.train(recipe, folder=folder, env=env or NAVIGATION, learner=own, **SMALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "three"
    trained(folder, normalize_observations=True)
    return folder


def test_same_number_of_agents_equals_plain_evaluation(folder):
    plain = Run.load(folder).evaluate(episodes=4)
    assert Run.load(folder, settings={"env.kwargs.n_agents": 3}).evaluate(episodes=4) == plain


@pytest.mark.parametrize("n_agents", [1, 6])
def test_agents_act_the_same_in_teams_of_any_size(folder, n_agents):
    """Agents that observe the same numbers choose the same action, in a team of any size."""
    three, other = Run.load(folder), Run.load(folder, settings={"env.kwargs.n_agents": n_agents})
    envs = three.make_env(2), other.make_env(2)
    tds = [env.reset() for env in envs]
    seen = tds[0]["agents", "observation"]
    assert tds[1]["agents", "observation"].shape == (2, n_agents, seen.shape[-1])
    tds[1]["agents", "observation"][:] = seen[:, :1]
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        actions = [run.policy(td)["agents", "action"] for run, td in zip((three, other), tds)]
    expected = actions[0][:, :1].expand(-1, n_agents, -1)
    torch.testing.assert_close(actions[1], expected, rtol=1e-5, atol=1e-6)


def test_result_is_recorded_with_the_number_of_agents(folder, capsys):
    assert main(["evaluate", str(folder), "env.kwargs.n_agents=5", "--episodes", "4"]) == 0
    assert "return" in capsys.readouterr().out
    rows = (folder / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[-1])["env.kwargs.n_agents"] == 5
    assert json.loads(rows[-1])["episodes"] == 4


def test_communication_works_with_another_number_of_agents(tmp_path):
    actor = {"communication": {"kind": "commnet"}}
    trained(tmp_path / "talk", actor=actor)
    found = Run.load(tmp_path / "talk", settings={"env.kwargs.n_agents": 5}).evaluate(episodes=4)
    assert found["episodes"] == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learner.lr": 1.0}, "learner.lr is given, expected settings of the environment"),
        ({"env.name": "balance"}, r"env.name='balance' needs networks of other shapes.*18\]"),
        ({"env.kwargs.n_agnts": 4}, "n_agnts"),
        ({"env.num_envs": 4}, "env.num_envs is given, but the number of episodes decides"),
        ({"env.reward_scale": 2.0}, "env.reward_scale is given, but evaluations report"),
    ],
)
def test_invalid_settings_raise(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        Run.load(folder, settings=settings)


def test_env_object_with_settings_raises(folder):
    env = Run.load(folder).make_env(2)
    with pytest.raises(ConfigError, match="n_agents is given with an environment object"):
        Run.load(folder, env=env, settings={"env.kwargs.n_agents": 3})


def test_run_of_an_env_object_is_played_by_naming_its_class(tmp_path):
    folder = tmp_path / "own"
    env = Arena(num_envs=4, max_steps=10, seed=0)
    run = trained(folder, "toy_arena_mappo", env)
    with pytest.raises(CheckpointError, match="object; name its class, such as env.library=module"):
        Run.load(folder)
    named = {"env.library": "torchrl_marl.envs.toy:Arena", "env.max_steps": 10}
    returns = Run.load(folder, settings=named).evaluate(episodes=4)["return_mean"]
    assert returns == run.evaluate(episodes=4)["return_mean"]


def test_unshared_networks_with_another_number_of_agents_raise(tmp_path):
    trained(tmp_path / "apart", actor={"sharing": "none"})
    message = r"n_agents=4 needs networks of other shapes.*\[3, .*\[4, .*sharing=group"
    with pytest.raises(ConfigError, match=message):
        Run.load(tmp_path / "apart", settings={"env.kwargs.n_agents": 4})


# ------------------------------------------------------------------------- export and serve


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "toy"
    env = {"num_envs": 4, "kwargs": {"n_agents": 2, "years": 2}}
    trained(folder, "toy_arena_mappo", env)
    return folder


@pytest.mark.clients
def test_export_for_a_larger_team(toy, tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    out = tmp_path / "out"
    assert main(["export", str(toy), "env.kwargs.n_agents=3", "--out", str(out)]) == 0
    assert sorted(path.name for path in out.glob("agent_*")) == ["agent_0", "agent_1", "agent_2"]
    assert "no action differs" in capsys.readouterr().out


def test_server_for_a_larger_team_refreshes(toy):
    from torchrl_marl.apps.serving import PolicyServer

    settings = {"env.kwargs.n_agents": 5}
    with PolicyServer(toy, port=0, execution="eager", settings=settings) as served:
        assert served.declared.settings()["agents"]["agents"]["n"] == 5
        served._checkpoint = toy  # as if there were a newer one
        before = [x.clone() for x in served._policy.parameters()]
        for x in served._policy.parameters():
            torch.nn.init.zeros_(x)
        assert served.refresh()
        assert all(torch.equal(x, y) for x, y in zip(before, served._policy.parameters()))


def test_server_for_a_larger_team_keeps_policy_if_agents_unshare(tmp_path):
    """A checkpoint with unshared networks does not fit. Once, new networks acted instead."""
    from torchrl_marl.apps.serving import PolicyServer

    env = {"num_envs": 4, "kwargs": {"n_agents": 2, "years": 2}}
    run = trained(tmp_path / "run", "toy_arena_mappo", env, unshare_at=0.5)
    checkpoints = run.folder / "checkpoints"
    late = (checkpoints / "iteration_000002.pt").rename(tmp_path / "late.pt")
    settings = {"env.kwargs.n_agents": 5}
    with PolicyServer(run.folder, port=0, execution="eager", settings=settings) as served:
        before = [x.clone() for x in served._policy.parameters()]
        late.rename(checkpoints / "iteration_000002.pt")
        with pytest.raises(ConfigError, match="n_agents=5 needs networks of other shapes"):
            served.refresh()
        assert served.version == 0
        assert all(torch.equal(x, y) for x, y in zip(before, served._policy.parameters()))


@pytest.mark.parametrize("command", ["export", "serve"])
def test_settings_outside_the_environment_raise(toy, command, capsys):
    assert main([command, str(toy), "learner.lr=1.0"]) == 2
    assert "learner.lr is given, expected settings of the environment" in capsys.readouterr().err
    assert main([command, str(toy), "eager"]) == 2
    assert f"torchrl-marl {command} --help" in capsys.readouterr().err
