"""Films of environments: a small environment, frames of a file, a film with its episodes."""

import numpy as np
from PIL import Image

from torchrl_marl import TeamSpec
from torchrl_marl.apps.pictures.film import Film
from torchrl_marl.envs import VmasEnv
from torchrl_marl.training.evaluation import play


def balance(**kwargs):
    return VmasEnv("balance", num_envs=2, max_steps=6, seed=0, **kwargs)


def frames_of(path):
    with Image.open(path) as image:
        for i in range(image.n_frames):
            image.seek(i)
            yield np.asarray(image.convert("RGB"))


def film_of(env, policy=None, shown=1, **kwargs):
    """A film, and the episodes of the evaluation that it shows."""
    team = TeamSpec.from_env(env)
    film = Film(env, team, shown)
    settings = {"episodes": env.batch_size.numel(), "seed": 3, **kwargs}
    return film, play(env, policy, team, film=film, **settings)
