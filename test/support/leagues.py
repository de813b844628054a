"""Small leagues on Kuhn poker and matching levers."""

import csv

import torchrl_marl
from torchrl_marl.training.pool import TABLE, stored_players

SMALL = {
    "total_frames": 512,
    "frames_per_batch": 64,
    "execution": "eager",
    "env": {"num_envs": 16},
    "learner": {
        "actor": {"num_cells": [8]},
        "critic": {"num_cells": [8]},
        "minibatch_size": 32,
        "num_epochs": 2,
    },
    "evaluation": {"episodes": 20},
    "checkpoint": {"every_iterations": 1, "keep": 100},
    "logging": {"progress": False},
}
LEAGUE = {"opponents": "pfsp", "snapshot_every": 128, "slots": 3}
EXPLOITED = {"exploiters": 2, "exploited": 0.5, "snapshot_every": 192, "snapshot_at": 0.95}


def settings_of(folder=None, league=None, **settings):
    league = {**LEAGUE, **(league or {})}
    return {"folder": None if folder is None else str(folder), "league": league} | SMALL | settings


def player_files(folder):
    return [player.path for player in stored_players(folder)]


def train(folder, league=None, recipe="toy_kuhn_ippo", **settings):
    return torchrl_marl.train(recipe, **settings_of(folder, league, **settings))


def players(folder):
    with (folder / TABLE).open(newline="") as file:
        return list(csv.DictReader(file))


def partners(folder, league=None, **settings):
    env = {"library": "toy", "name": "matching_levers", "num_envs": 16}
    league = {"opponents": "none", "partners": "uniform", **(league or {})}
    return train(folder, league, "toy_matrix_game_mappo", env=env, **settings)
