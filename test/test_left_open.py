"""Environments, collectors and runs that a script leaves open do not disturb its exit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

HEAD = """
import logging, torch
torch.set_num_threads(1)
logging.getLogger("torchrl_marl.capture").setLevel("WARNING")
"""
RUN = """
import torchrl_marl
{name} = torchrl_marl.iterate(
    {recipe!r}, total_frames=160, frames_per_batch=40, env={{"num_envs": 4, **{env}}},
    learner={{"minibatch_size": 40}}, evaluation={{"episodes": 2}},
    logging={{"progress": False}}, execution={execution!r}, folder="run_{name}")
next({name})
"""
DROPOUT = {"name": "dropout", "kwargs": {"n_agents": 2}, "info": False}
SCRIPTS = {
    "envs, compiled and traced, collectors and trainings": """
from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import VmasEnv
from torchrl_marl.envs.toy import Arena
# Of docs/one_program.md, whose graph it finds.
compiled = VmasEnv("dropout", num_envs=64, n_agents=2, execution="compile")
compiled.rollout(7, break_when_any_done=False)
env = VmasEnv("dropout", num_envs=4, max_steps=5, seed=0, n_agents=2, execution="trace")
env.rollout(7, break_when_any_done=False)
environment = VmasEnv("dropout", num_envs=4, max_steps=5, seed=0, n_agents=2)
collector = RolloutCollector(environment, frames_per_batch=40, execution="trace")
batches = iter(collector)
next(batches)
own = Arena(4, max_steps=5, seed=0)
other = RolloutCollector(own, frames_per_batch=40, execution="trace")
other.next()
"""
    + RUN.format(name="eager", recipe="toy_arena_mappo", execution="eager", env={})
    + RUN.format(name="traced", recipe="vmas_balance_mappo", execution="trace", env=DROPOUT),
    "workers' envs": """
from torchrl.envs import ParallelEnv
from torchrl_marl.envs import VmasEnv

def make():
    return VmasEnv("dropout", num_envs=4, seed=0, n_agents=2, execution="trace")

if __name__ == "__main__":
    env = ParallelEnv(1, make, mp_start_method="spawn")
    env.rollout(3)
    env.close()  # TorchRL waits for workers for ever otherwise, whatever they hold
""",
    "worlds of mpe2 and jaxmarl": """
from torchrl_marl.envs import JaxMarlEnv, PettingZooEnv
env = PettingZooEnv("mpe2/simple_spread_v3", num_envs=4, workers=2, seed=0)
env.rollout(3)
other = JaxMarlEnv("MPE_simple_spread_v3", num_envs=4, seed=0)
other.rollout(3)
""",
}
NEEDS = {"worlds of mpe2 and jaxmarl": ("mpe2", "jaxmarl")}


@pytest.mark.parametrize("left", SCRIPTS)
def test_script_with_open_resources_exits_cleanly(left, tmp_path):
    for needed in NEEDS.get(left, ()):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    script = tmp_path / "script.py"
    script.write_text(HEAD + SCRIPTS[left], encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    if "trainings" in left:
        assert len(list(tmp_path.glob("run_*/checkpoints/iteration_*1.pt"))) == 2
