"""Episodes of mpe2's simple_speaker_listener_v4, the same for all systems.

The environments are mpe2's own, stepped one by one without an adapter. This file needs only numpy
and mpe2, since both sides of ``speaker_listener.py`` use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

SPEAKER, LISTENER = "speaker_0", "listener_0"
Arrays = dict[str, np.ndarray]


class Episodes:
    """A fixed number of episodes, played side by side.

    Args:
        count (int): how many.
        seed (int): episode i starts with ``reset(seed=seed + i)``.
    """

    def __init__(self, count: int, seed: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from mpe2 import simple_speaker_listener_v4

            make = simple_speaker_listener_v4.parallel_env
            self.envs = [make(continuous_actions=True) for _ in range(count)]
        self.seed = seed

    def play(self, act: Callable[[Arrays], Arrays]) -> float:
        """The return of an agent: rewards summed over an episode, mean over episodes and agents.

        Args:
            act (callable): from what the agents see, ``{agent: [episodes, features]}``, to what
                they do; actions are brought into the environment's bounds, [0, 1].
        """
        observations = [env.reset(seed=self.seed + i)[0] for i, env in enumerate(self.envs)]
        total = 0.0
        while self.envs[0].agents:
            actions = act(
                {name: np.stack([x[name] for x in observations]) for name in (SPEAKER, LISTENER)}
            )
            actions = {name: np.clip(x, 0, 1).astype(np.float32) for name, x in actions.items()}
            for i, env in enumerate(self.envs):
                observations[i], rewards, *_ = env.step({name: x[i] for name, x in actions.items()})
                total += sum(rewards.values()) / len(rewards)
        return total / len(self.envs)


def random_actions(seed: int) -> Callable[[Arrays], Arrays]:
    """Uniform in the environment's bounds."""
    generator = np.random.default_rng(seed)

    def act(observations: Arrays) -> Arrays:
        n = len(observations[SPEAKER])
        return {SPEAKER: generator.random((n, 3)), LISTENER: generator.random((n, 5))}

    return act


def scripted_policy(observations: Arrays) -> Arrays:
    """The speaker names the goal; the listener waits until it hears that, and goes there.

    What the listener sees is its velocity, the three landmarks from where it is, and what was said
    a step before. Its force is the one that takes it to the goal soonest, or nearly so.
    """
    messages = np.eye(3)[observations[SPEAKER].argmax(1)]
    velocity, landmarks, heard_messages = np.split(observations[LISTENER], [2, 8], 1)
    directions = (heard_messages[:, :, None] * landmarks.reshape(-1, 3, 2)).sum(1)
    # A step moves it by 0.1 velocity, then leaves 3/4 of that and adds half of the force.
    desired_velocity = np.where(
        heard_messages.any(1, keepdims=True), 6.5 * (directions - 0.1 * velocity), 0.0
    )
    force = np.clip((desired_velocity - 0.75 * velocity) / 0.5, -1, 1)
    listener_actions = np.zeros((len(force), 5))
    listener_actions[:, [1, 3]], listener_actions[:, [2, 4]] = (
        np.maximum(-force, 0),
        np.maximum(force, 0),
    )
    return {SPEAKER: messages, LISTENER: listener_actions}
