"""N-step returns end where environments are reset between two batches."""

import pytest
from torchrl.envs import VmasEnv

import torchrl_marl
from torchrl_marl.learners import TeamReplay


def broken_links(ring):
    """Counts the steps whose successor in the ring is not their next step, and all links."""
    n = ring.n_filled
    led_to = ring.leaf(("next", "agents", "observation"))[: n - 1]
    follows = ring.leaf(("agents", "observation"))[1:n]
    goes_on = ~ring.marks["ends"][: n - 1]
    return int((goes_on & (led_to != follows).flatten(2).any(-1)).sum()), int(goes_on.sum())


@pytest.mark.parametrize("resumed", [False, True], ids=["evaluated", "resumed"])
def test_no_n_step_return_crosses_episodes(tmp_path, monkeypatch, resumed):
    stores, extend = [], TeamReplay.extend

    def extend_seen(self, *args, **kwargs):
        stores.append(self)
        return extend(self, *args, **kwargs)

    monkeypatch.setattr(TeamReplay, "extend", extend_seen)

    def env():  # TorchRL's environment has no snapshot to restore
        return VmasEnv("balance", num_envs=4, max_steps=24, seed=0)

    for iteration in torchrl_marl.iterate(
        "vmas_balance_matd3",
        env=env(),
        learner={"learning_starts": 40, "minibatch_size": 16, "n_step": 3},
        evaluation={"episodes": 4, "every_frames": None if resumed else 40},
        total_frames=240,
        frames_per_batch=40,
        execution="eager",
        logging={"progress": False},
        folder=tmp_path / "run",
    ):
        if resumed and iteration.number == 3:
            break
    if resumed:
        torchrl_marl.resume(tmp_path / "run", env=env())
    broken, links = broken_links(stores[-1].ring)
    assert (broken, stores[-1].ring.n_filled) == (0, 60)
    assert links > 160  # of 4 x 59; the others are ends of episodes
