"""A served run: its actions, memory, newer checkpoints, and refused requests."""

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import external  # noqa: F401  (finds the client)
import numpy as np
import pytest
import torch
from runs import small_config
from tensordict import TensorDict
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl_marl_client import Client

import torchrl_marl
from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.cli import main as cli
from torchrl_marl.apps.serving import PolicyServer, declared_of
from torchrl_marl.apps.serving.policy_server import _refresh_if_newer
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.recipes import read_config
from torchrl_marl.training.run import Run

pytestmark = pytest.mark.clients


def config(folder, **settings):
    return small_config(**{"total_frames": 160, "folder": str(folder), **settings})


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """A run with two groups that share one actor."""
    folder = tmp_path_factory.mktemp("served") / "run"
    kwargs = {"n_groups": 2, "kinds": 2, "n_agents": 4}
    return torchrl_marl.train(config(folder, env={"kwargs": kwargs}))


@pytest.fixture(scope="module")
def remembering(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "run"
    learner = {"actor.memory": "gru", "window": 5, "minibatch_size": 20}
    return torchrl_marl.train(read_config(config(folder), {"learner": learner}))


def connect(served, **options):
    host, port = served.address.split(":")
    return Client(host, int(port), served.declared.settings()["agents"], patience=5, **options)


def drawn_observations(served, draw, who=lambda name: True):
    """Random observations and action masks of the agents."""
    seen, legal = {}, {}
    for name, kind in served.declared.kinds.items():
        for i in range(kind.n):
            agent = f"{name}_{i}"
            if who(agent):
                seen[agent] = draw.normal(size=kind.observation).astype(np.float32)
                if kind.mask:
                    legal[agent] = [True, *(draw.random(kind.n_actions - 1) < 0.5).tolist()]
    return seen, legal


def step_of(served, seen, legal):
    """The same data as an environment step for the policy."""
    td = {}
    for name, kind in served.declared.kinds.items():
        names = [f"{name}_{i}" for i in range(kind.n)]
        empty = np.zeros(kind.observation, np.float32)
        rows = np.stack([seen.get(agent, empty) for agent in names])
        td[name] = {"observation": torch.from_numpy(rows)[None]}
        td[name]["mask"] = torch.tensor([[agent in seen for agent in names]])
        if kind.mask:
            flags = [legal.get(agent, [True] * kind.n_actions) for agent in names]
            td[name]["action_mask"] = torch.tensor([flags])
    groups = {name: TensorDict(own, [1, own["mask"].shape[1]]) for name, own in td.items()}
    return TensorDict(groups, [1])


def best(policy, td):
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        return policy(td)


def test_clients_get_the_actions_of_the_policy(kinds):
    policy, draw = Run.load(kinds.folder).policy, np.random.default_rng(0)
    with PolicyServer(kinds.folder, port=0, execution="trace", max_clients=4) as served:
        assert served.version == 160 and list(served.declared.kinds) == ["agents_0", "agents_1"]
        with closing(connect(served)) as client:
            for t in range(6):
                seen, legal = drawn_observations(
                    served, draw, lambda agent: not agent.endswith("1")
                )
                ask = client.step if t else client.begin
                actions = ask(seen, action_masks=legal)
                acted = best(policy, step_of(served, seen, legal))
                assert actions.keys() == seen.keys()
                for agent, action in actions.items():
                    group, i = agent.rsplit("_", 1)
                    expected = acted[group, "action"][0, int(i)]
                    np.testing.assert_allclose(action, expected.numpy(), atol=1e-6)
                assert client.version == 160
            client.end()


def test_sampled_actions_vary(kinds):
    draw = np.random.default_rng(0)
    options = {"port": 0, "execution": "eager", "stochastic": True}
    with PolicyServer(kinds.folder, **options) as served, closing(connect(served)) as client:
        seen, legal = drawn_observations(served, draw)
        client.begin(seen, action_masks=legal)
        found = [str(client.step(seen, action_masks=legal)) for _ in range(20)]
        assert len(set(found)) > 1


def test_memory_is_kept_per_client_and_episode(remembering):
    policy, draw = Run.load(remembering.folder).policy, np.random.default_rng(0)
    with PolicyServer(remembering.folder, port=0, execution="trace", max_clients=2) as served:
        clients = [connect(served, name=name) for name in "ab"]
        size = served.server.slots.hidden["agents"].shape[-1]
        for _ in range(2):  # episodes
            hidden = [None, None]
            for t in range(4):
                for i, client in enumerate(clients):
                    seen, legal = drawn_observations(served, draw)
                    actions = (client.step if t else client.begin)(seen)
                    td = step_of(served, seen, legal)
                    before = torch.zeros(1, 4, size) if hidden[i] is None else hidden[i]
                    td["agents", "hidden"] = before
                    td["agents", "is_init"] = torch.full((1, 4, 1), t == 0)
                    acted = best(policy, td)
                    hidden[i] = acted["next", "agents", "hidden"]
                    for j in range(4):
                        expected = acted["agents", "action"][0, j].numpy()
                        np.testing.assert_allclose(actions[f"agents_{j}"], expected, atol=1e-6)
            for client in clients:
                client.end()
        for client in clients:
            client.close()


def test_newer_checkpoint_is_loaded_in_mid_episode(tmp_path):
    learner = {"actor.memory": "gru", "window": 5, "minibatch_size": 20, "lr": 0.05}
    run = torchrl_marl.train(read_config(config(tmp_path / "run"), {"learner": learner}))
    draw = np.random.default_rng(0)
    with PolicyServer(run.folder, port=0, execution="trace", max_clients=2) as served:
        with closing(connect(served)) as client:
            seen, _ = drawn_observations(served, draw)
            first = client.begin(seen)
            client.step(seen)
            assert not served.refresh() and client.version == 160
            remembered = served.server.slots.hidden["agents"].copy()
            torchrl_marl.resume(run.folder, total_frames=320)
            assert served.refresh() and not served.refresh()
            assert np.array_equal(served.server.slots.hidden["agents"], remembered)
            client.step(seen)
            assert client.version == served.version == 320
            client.end()
            assert client.begin(seen) != first
        policy = Run.load(run.folder).policy
        for own, newer in zip(served._policy.policy.parameters(), policy.parameters()):
            assert torch.equal(own, newer)


def trained_in_stages(folder, tmp_path, **second):
    """Trains two stages and moves the second away, as if it had not begun."""
    stages = {"one": {}, "two": {"total_frames": 320, **second}}
    torchrl_marl.train(read_config(config(folder), {"stages": stages}))
    return (folder / "two").rename(tmp_path / "aside")


def test_next_stage_is_loaded(tmp_path):
    folder = tmp_path / "run"
    aside = trained_in_stages(folder, tmp_path, **{"learner.actor.activation": "relu"})
    with PolicyServer(folder, port=0, execution="trace", max_clients=2) as served:
        assert served.version == 160 and not served.refresh()
        aside.rename(folder / "two")
        assert served.refresh() and not served.refresh()
        assert served.version == 320
        with closing(connect(served)) as client:
            seen, legal = drawn_observations(served, np.random.default_rng(0))
            answers = client.begin(seen, action_masks=legal)
        acted = best(Run.load(folder).policy, step_of(served, seen, legal))
        given = [answers[f"agents_{i}"] for i in range(len(seen))]
        np.testing.assert_allclose(given, acted["agents", "action"][0].numpy(), atol=1e-6)


def test_stage_with_other_agents_is_not_loaded(tmp_path, capsys):
    folder, init = tmp_path / "run", ["actor", "normalization"]
    aside = trained_in_stages(folder, tmp_path, **{"env.kwargs.n_agents": 3, "init": init})
    with PolicyServer(folder, port=0, execution="eager") as served:
        aside.rename(folder / "two")
        _refresh_if_newer(served)
        _refresh_if_newer(served)  # the error is printed once for each checkpoint
        assert served.version == 160
    printed = capsys.readouterr().out
    assert printed.count("still serves 160 frames: stage 'two' has other agents") == 1


def test_client_with_other_agents_is_refused(kinds):
    with PolicyServer(kinds.folder, port=0, execution="eager") as served:
        other = {"walker": {"n": 1, "observation": 2, "action": 1}}
        host, port = served.address.split(":")
        with pytest.raises(RuntimeError, match="but no 'agents_0', expected .'n': 2"):
            Client(host, int(port), other).begin({"walker_0": [0.0, 0.0]})


def test_unsupported_observations_are_refused():
    action = Bounded(-1, 1, (2,))
    for seen in (Unbounded((8, 8, 3)), Composite(a=Unbounded((2,)), b=Unbounded((3,)))):
        with pytest.raises(ConfigError, match="agents 'car' have observations .* one vector"):
            declared_of(TeamSpec([AgentSpec("car", 2, seen, action)]))
    bounds = Bounded(torch.tensor([-1.0, 0.0]), torch.tensor([1.0, 4.0]))
    team = TeamSpec([
        AgentSpec("car", 2, Unbounded((3,)), bounds),
        AgentSpec("bus", 1, Unbounded((4,)), OneHot(5), action_mask=True),
    ])  # fmt: skip
    assert declared_of(team).settings()["agents"] == {
        "car": {"n": 2, "observation": 3, "action": {"size": 2, "low": [-1, 0], "high": [1, 4]}},
        "bus": {"n": 1, "observation": 4, "action": {"n_actions": 5, "mask": True}},
    }


def test_invalid_arguments_raise_one_sentence(kinds, tmp_path, capsys):
    def error(*arguments):
        assert cli.main(["serve", *map(str, arguments)]) == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    quick = ["--execution", "eager"]
    assert "expected a token" in error(kinds.folder, "--host", "0.0.0.0", *quick)
    assert "token_file is" in error(kinds.folder, "--token-file", tmp_path / "none", *quick)
    assert "tls_certificate is" in error(kinds.folder, "--tls-cert", tmp_path / "none", *quick)
    assert "expected a port" in error(kinds.folder, "--port", "70000")
    assert "did you mean 'trace'?" in error(kinds.folder, "--execution", "trase")
    with pytest.raises(CheckpointError):
        PolicyServer(tmp_path)


# Shells start background jobs with SIGINT ignored.
HEEDING = (
    "import signal, sys; from torchrl_marl.apps.cli.main import main;"
    "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main())"
)


def test_serve_command(kinds):
    """From the first lines of output to Ctrl-C."""
    command = [sys.executable, "-c", HEEDING, "serve", str(kinds.folder), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(torchrl_marl.__file__).parents[1])}
    process = subprocess.Popen(
        [*command, "--execution", "eager", "--follow"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        lines = [process.stdout.readline() for _ in range(4)]
        address = lines[0].split()[-1]
        assert lines[0].startswith(f"serves {kinds.folder} (160 frames) at 127.0.0.1:")
        assert lines[1].startswith("  agents_0: {'n': 2, 'observation': 6, ")
        agents = declared_of(TeamSpec.from_env(kinds.make_env())).settings()["agents"]
        host, port = address.split(":")
        with closing(Client(host, int(port), agents)) as client:
            seen = {
                f"{name}_{i}": [0.0] * kind["observation"]
                for name, kind in agents.items()
                for i in range(kind["n"])
            }
            assert client.begin(seen).keys() == seen.keys()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert out.splitlines()[-1] == "ends: 1 steps, 0 refused"
        assert process.returncode == 0 and "Traceback" not in err
    finally:
        process.kill()
        process.wait()


def test_tls_key_requires_a_certificate(kinds):
    with pytest.raises(ConfigError, match="tls_key is 'key.pem', expected tls_certificate beside"):
        PolicyServer(kinds.folder, port=0, execution="eager", tls_key="key.pem")
