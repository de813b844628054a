"""Runs that start from the parameters of another run, a stored player or an exported folder."""

import dataclasses
import json
import re

import pytest
import torch
from leagues import player_files
from leagues import train as train_league
from runs import assert_equal, assert_same_run, final_state, small_config
from tiers import later

import torchrl_marl
from torchrl_marl.apps.cli.main import main
from torchrl_marl.errors import CheckpointError, ConfigError
from torchrl_marl.recipes import load_config
from torchrl_marl.training.checkpoint import all_checkpoints, load_checkpoint
from torchrl_marl.training.config import read_run_config
from torchrl_marl.training.pool import read_player, networks_of
from torchrl_marl.training.start_from import part_of, read_source
from torchrl_marl.training.trainer import iterate, resume, start_training, train

NORMALIZED = {"learner": {"normalize_observations": True}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with checkpoints of 0, 80 and 160 frames."""
    folder = str(tmp_path_factory.mktemp("source") / "run")
    checkpoint = {"checkpoint": {"every_iterations": 1, "keep": 3}}
    return train(small_config(folder=folder, total_frames=160, **NORMALIZED, **checkpoint)).folder


def config_of(tmp_path, source, init=None, name="run", **overrides):
    options = {"init_from": str(source), "init": init, "folder": str(tmp_path / name)}
    return small_config(**{**NORMALIZED, "seed": 1, **options, **overrides})


def started(config):
    """The leaves of a run before its first iteration, and what its summary says."""
    training = start_training(config, None)
    try:
        state = {k: v for x in training.learners for k, v in x.state_dict().items()}
        leaves = {k: v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
        return leaves, training.run.summary["init_from"], training
    finally:
        training.close()


def saved(folder, index=-1):
    state = load_checkpoint(all_checkpoints(folder)[index])
    found = {k: v for x in state["learners"] for k, v in x.items()}
    return {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}


def equal_parts(one, other):
    """The parts with all leaves equal to the bit."""
    parts = {part_of(name) for name in one} - {None}
    same = {name for name in one if torch.equal(one[name], other[name])}
    return {p for p in parts if all(name in same for name in one if part_of(name) == p)}


@pytest.mark.parametrize(
    ("init", "parts"),
    [
        (None, {"actor", "critic", "normalization"}),
        (["actor"], {"actor"}),
        (["critic", "normalization"], {"critic", "normalization"}),
    ],
)
def test_parts_are_loaded_to_the_bit_and_the_rest_is_new(source, init, parts, tmp_path):
    leaves, noted, _ = started(config_of(tmp_path, source, init))
    assert equal_parts(leaves, saved(source)) == parts
    fresh = small_config(folder=str(tmp_path / "fresh"), seed=1, **NORMALIZED)
    training = start_training(fresh, None)
    training.close()
    new = {k: v for x in training.learners for k, v in x.state_dict().items() if k != "_extra_state"}
    assert equal_parts(leaves, new) == {"actor", "critic", "normalization"} - parts
    assert noted == {"from": f"{source}@160", "frames": 160, "parts": sorted(parts)}
