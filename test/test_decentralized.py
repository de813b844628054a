"""The tutorial in which every agent runs in a separate process."""

import importlib.util
from pathlib import Path

import pytest
from runs import small_config

import torchrl_marl

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

pytestmark = pytest.mark.clients

_path = Path(__file__).parents[1] / "tutorials" / "decentralized" / "environment.py"
_spec = importlib.util.spec_from_file_location("world", _path)
world = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(world)


@pytest.mark.parametrize(("kind", "n_agents"), [("tarmac", 2), ("bicnet", 3)])
def test_agents_in_processes_act_as_the_joint_policy(kind, n_agents, tmp_path):
    kwargs = {"n_agents": n_agents, "late_spawn": 1, "years": 2, "action_mask": True}
    talk = {"kind": kind, "gate": True, **({} if kind == "bicnet" else {"rounds": 2})}
    actor = {"communication": talk, "memory": "gru"}
    config = small_config(
        env={"kwargs": kwargs},
        learner={"actor": actor, "window": 5, "minibatch_size": 40},
        folder=str(tmp_path / "run"),
        total_frames=80,
    )
    run = torchrl_marl.train(config)
    found = world.play(run, tmp_path / "export", steps=16)
    assert found.startswith(f"{n_agents} processes, 16 steps, ")
    assert found.endswith("an agent was dead or not born: no action differs")
    assert ", 0 episodes" not in found and ", 0 times" not in found
