"""Copies of PettingZoo's environments: random states, snapshots, seeds, and copies that fail."""

import random
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from played import rollout_of_ones
from scripted import BOX, Breaking, Drawn, Faulty, Gambler, OwnSource, Script

from torchrl_marl.envs import PettingZooEnv
from torchrl_marl.envs.pettingzoo.pickling import unpickled
from torchrl_marl.errors import NonFiniteError, WorkerError

# ------------------------------------------------------------------- random states, snapshots


@pytest.mark.parametrize("workers", [0, 2])
def test_copies_have_separate_global_generators(workers):
    def observed(**kwargs):
        env = PettingZooEnv(
            lambda: Gambler("bob_0", [{}]), num_envs=3, seed=0, max_steps=3, **kwargs
        )
        td = env.rollout(7, break_when_any_done=False)["next", "bob", "observation"]
        env.close()
        return td

    before = np.random.get_state()[1].copy(), random.getstate()
    first = observed(workers=workers)
    assert (before[0] == np.random.get_state()[1]).all() and before[1] == random.getstate()
    assert torch.equal(first, observed())
    assert first.unique().numel() == first.numel()


def test_random_draws_of_the_constructor_are_seeded():
    def drawn(seed, workers):
        env = PettingZooEnv(lambda: Drawn("bob_0", [{}]), num_envs=2, seed=seed, workers=workers)
        seen = env.reset()["bob", "observation"]
        env.close()
        return seen

    before = np.random.get_state()[1].copy(), random.getstate()
    first = drawn(0, 0)
    assert torch.equal(first, drawn(0, 2)) and first.unique().numel() == 4
    assert not torch.equal(first, drawn(1, 0))
    assert (before[0] == np.random.get_state()[1]).all() and before[1] == random.getstate()


def test_snapshot_of_env_that_pickles_only_its_arguments():
    env = PettingZooEnv("mpe2/simple_spread_v3", num_envs=2, seed=0, max_cycles=7)
    td = env.rollout(4, break_when_any_done=False)[:, -1]["next"]
    saved = env.snapshot()
    actions = [env.rand_action() for _ in range(8)]

    def go(env, td):
        out = []
        for action in actions:
            step, td = env.step_and_maybe_reset(td.clone().update(action))
            out.append(step["next", "agent", "observation"])
        return torch.stack(out)

    expected = go(env, td.exclude(("agent", "reward")))
    twin = PettingZooEnv("mpe2/simple_spread_v3", num_envs=2, seed=5, max_cycles=7)
    twin.restore(saved)
    assert torch.equal(go(twin, td.exclude(("agent", "reward"))), expected)


@pytest.mark.parametrize("workers", [0, 2])  # two, of which one plays two copies
def test_every_episode_has_a_new_seed(workers):
    env = PettingZooEnv(
        lambda: OwnSource("bob_0", [{}]), num_envs=3, seed=0, max_steps=2, workers=workers
    )
    seen = [env.rollout(8, break_when_any_done=False) for _ in range(2)]
    env.close()
    seen = torch.cat([td["bob", "observation"][..., 0].flatten(1) for td in seen], 1)
    assert seen.unique().numel() == seen.numel() == 3 * 16
    again = PettingZooEnv(lambda: OwnSource("bob_0", [{}]), num_envs=3, seed=0, max_steps=2)
    again = [again.rollout(8, break_when_any_done=False) for _ in range(2)]
    again = torch.cat([td["bob", "observation"][..., 0].flatten(1) for td in again], 1)
    assert torch.equal(seen, again)


def test_restored_copy_continues_the_sequence_of_seeds():
    env = PettingZooEnv(lambda: OwnSource("bob_0", [{}]), num_envs=2, seed=0, max_steps=2)
    env.rollout(5, break_when_any_done=False)
    saved = env.snapshot()
    expected = env.rollout(6, break_when_any_done=False, auto_reset=False, tensordict=env.reset())
    twin = PettingZooEnv(lambda: OwnSource("bob_0", [{}]), num_envs=2, seed=9, max_steps=2)
    twin.restore(saved)
    found = twin.rollout(6, break_when_any_done=False, auto_reset=False, tensordict=twin.reset())
    assert torch.equal(found["next", "bob", "observation"], expected["next", "bob", "observation"])


def test_hanabi_deals_are_reproducible():
    def dealt():
        env = PettingZooEnv("classic/hanabi_v5", num_envs=2, seed=3)
        legal = torch.Generator().manual_seed(0)

        def policy(td):
            chosen = td["player", "action_mask"].float().flatten(0, 1)
            drawn = torch.multinomial(chosen, 1, generator=legal)
            return td.set(("player", "action"), drawn.view(td["player", "action_mask"].shape[:-1]))

        return env.rollout(200, policy, break_when_any_done=False)

    first, second = dealt(), dealt()
    assert first["next", "done"].sum() >= 4
    assert (first["player", "observation"] == second["player", "observation"]).all()


def test_failing_close_warns_once():
    class Clinging(Script):
        def close(self):
            raise OSError("no window")

    with pytest.warns(RuntimeWarning, match=r"close\(\) raised OSError: no window") as warned:
        env = PettingZooEnv(lambda: Clinging("bob_0", [{}]), num_envs=3, seed=0, max_steps=3)
    assert len(warned) == 1
    assert env.rollout(3).shape == (3, 3)
    env.close()


# --------------------------------------------------------------------------------- many copies


def test_copy_that_raises_is_named_or_restarted():
    def env(**kwargs):
        return PettingZooEnv(
            lambda: Faulty("bob_0 bob_1", [{"earns": {"bob_0": 1.0}}]), num_envs=2, **kwargs
        )

    with pytest.raises(WorkerError, match="Copy 0.*out of petrol"):
        env(max_steps=9).rollout(5)
    with pytest.warns(RuntimeWarning, match="out of petrol"):
        again = env(max_steps=9, restart_workers=True)
        td = again.rollout(6, break_when_any_done=False)
    assert again.restarts == 2
    next_ = td["next"]
    # The failed step is truncated and repeats the last observation.
    assert next_["truncated"][0, :, 0].tolist() == [False] * 3 + [True] + [False] * 2
    assert next_["bob", "reward"][0, :, 0, 0].tolist() == [1, 1, 1, 0, 1, 1]
    assert next_["bob", "observation"][0, :, 0, 1].tolist() == [1, 2, 3, 3, 1, 2]
    assert next_["bob", "mask"].all()


def test_programming_error_in_env_is_not_restarted():
    world = Script("bob_0", None)  # has no steps
    with pytest.raises(
        WorkerError, match=r"Copy 0 of Script raised TypeError: .*; fix the environment"
    ):
        rollout_of_ones(world, 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "where, words",
    [
        ("step", "the wheel is off; it failed 3 times in step 4 of its episode 1 after"),
        ("begin", "no second life; it failed 3 times in step 1 of its episode 2 after"),
    ],
)
def test_copy_that_fails_three_times_in_one_step_raises(where, words, workers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = PettingZooEnv(
            lambda: Breaking(where), num_envs=2, restart_workers=True, max_steps=6, workers=workers
        )
        with pytest.raises(WorkerError, match=f"^Copy 0 of .*{words}"):
            env.rollout(100, break_when_any_done=False)
    assert env.restarts == 4  # two of each copy
    env.close()


@pytest.mark.parametrize("error", [KeyError, AssertionError, ImportError])
def test_types_of_programming_errors_are_not_restarted(error):
    env = PettingZooEnv(lambda: Breaking("step", error), restart_workers=True, max_steps=6)
    with pytest.raises(WorkerError, match=f"raised {error.__name__}.*; fix the environment"):
        env.rollout(9)
    assert env.restarts == 0


def test_non_finite_action_raises_before_the_step():
    world = Script("bob_0 bob_1", [{}], action=dict.fromkeys(["bob_0", "bob_1"], BOX))
    env = PettingZooEnv(world, restart_workers=True, max_steps=6)
    td = env.rand_action(env.reset())
    td["bob", "action"][0, 1, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="the action of agent 'bob_1' in copy 0 is .nan"):
        env.step(td)
    assert world.got == []


@pytest.mark.parametrize("workers", [0, 2])
def test_results_do_not_depend_on_workers(workers):
    env = PettingZooEnv(
        "mpe2/simple_speaker_listener_v4", num_envs=3, seed=3, workers=workers, max_cycles=5
    )
    torch.manual_seed(0)
    td = env.rollout(12, break_when_any_done=False)
    env.close()
    assert td["next", "done"].sum() == 6
    with torch.random.fork_rng():
        torch.manual_seed(0)
        alone = PettingZooEnv(
            "mpe2/simple_speaker_listener_v4", num_envs=3, seed=3, max_cycles=5
        ).rollout(12, break_when_any_done=False)
    assert (td == alone).all()


def test_seeds_of_copies_differ():
    td = PettingZooEnv("mpe2/simple_spread_v3", num_envs=4, seed=0).reset()
    assert td["agent", "observation"][:, 0, 2].unique().numel() == 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads what a process has loaded from /proc")
def test_worker_does_not_import_torch():
    env = PettingZooEnv("mpe2/simple_spread_v3", num_envs=2, workers=1, seed=0)
    env.rollout(2)
    (worker,) = env._workers._workers
    assert "libtorch" not in Path(f"/proc/{worker._process.pid}/maps").read_text()
    env.close()


@pytest.mark.parametrize(
    ("saved", "name"),
    [("lives", "LifeCycle"), ("own_random", "OwnRandom"), ("one_copy", "CopyPlan")],
)
def test_snapshots_with_old_module_names_can_be_unpickled(saved, name):
    found = unpickled(f"ctorchrl_marl.envs.pettingzoo.{saved}\n{name}\n.".encode())
    assert found.__name__ == name and found.__module__.startswith("torchrl_marl.envs.pettingzoo")
