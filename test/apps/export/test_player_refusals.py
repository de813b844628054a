"""An exported agent refuses invalid inputs, and untrusted programs that could run code."""

import copy
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from exported import team_policy
from torchrl.data import Categorical, Unbounded

from torchrl_marl import AgentSpec, TeamSpec
from torchrl_marl.apps.export import Player, export_agents
from torchrl_marl.apps.export.agent import agents_of, find_agents
from torchrl_marl.apps.export.check import InMemory
from torchrl_marl.apps.export.interface import sha256_of
from torchrl_marl.apps.export.player import PlayerError
from torchrl_marl.modules import MemoryConfig, RecurrentNetworkConfig, make_actor
from torchrl_marl.modules.config import DrawnCommunicationConfig

SEEN = np.array([0.5, -0.25, 1.0], np.float32)
WORD = np.arange(5, dtype=np.float32)
BAD_NUMBERS = [np.inf, -np.inf, np.nan, 1e300]


def policy_of(action_mask=False, **talk):
    """A policy of three agents with a memory, and with communication if it is given."""
    sizes = {} if talk.get("kind") == "bicnet" else {"message_size": 5}
    communication = DrawnCommunicationConfig(**{**sizes, **talk}) if talk else None
    config = RecurrentNetworkConfig(
        [8],
        memory=MemoryConfig("gru", size=4),
        **({} if communication is None else {"communication": communication}),
    )
    mask = {"action_mask": True} if action_mask else {}
    team = TeamSpec([AgentSpec("car", 3, Unbounded((3,)), Categorical(2), **mask)])
    return team_policy(team.groups.values(), make_actor, config=config)


def player_of(**settings):
    agents = agents_of(policy_of(**settings))
    return InMemory(agents["car_0"], seed=0)


def kept(player):
    """A copy of the state of a player, without its programs."""
    state = {name: value for name, value in vars(player).items() if name != "programs"}
    return copy.deepcopy(state)


def equal(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state == other.bit_generator.state
    return bool(np.all(one == other))


def refused(player, message, call, *values, **named):
    before = kept(player)
    with pytest.raises(PlayerError, match=message) as caught:
        getattr(player, call)(*values, **named)
    assert "\n" not in str(caught.value)
    assert equal(kept(player), before)


class TestNumbers:
    @pytest.mark.parametrize("bad", BAD_NUMBERS)
    def test_non_finite_observation_raises_and_keeps_the_memory(self, bad):
        player, twin = player_of(), player_of()
        player.act(SEEN)
        twin.act(SEEN)
        found = "NaN" if np.isnan(bad) else "infinity"
        refused(player, f"'car_0': 'observation' holds {found}, expected finite numbers", "act",
                np.array([0.0, bad, 0.0]))  # fmt: skip
        assert (player.act(SEEN), player.parameters["logits"].tolist()) == (
            twin.act(SEEN), twin.parameters["logits"].tolist(),
        )  # fmt: skip

    @pytest.mark.parametrize("bad", BAD_NUMBERS)
    @pytest.mark.parametrize("talk", [{"rounds": 2}, {"delay": 1}])
    def test_non_finite_message_raises(self, talk, bad):
        player = player_of(kind="tarmac", **talk)
        refused(player, "'observation' holds", "speak", np.full(3, bad))
        player.speak(SEEN)
        good = np.arange(player.interface["communication"]["message_size"], dtype=np.float64)
        word = np.where(good == 2, bad, good)
        refused(player, "the message of 'car_1' holds", "hear", {"car_1": word})
        player.hear({"car_1": good})
        if "rounds" in talk:
            refused(player, "the message of 'car_2' holds", "act", inbox={"car_2": word})
            player.act(inbox={"car_2": good})
        else:
            player.act()
        assert np.isfinite(player.parameters["logits"]).all()

    @pytest.mark.parametrize("bad", BAD_NUMBERS)
    def test_non_finite_relayed_input_raises(self, bad):
        player = player_of(kind="bicnet", gate=True)
        for silent in (False, True):
            player.speak(SEEN)
            player._silent = silent
            handed = player.relay()
            refused(player, "'handed' holds", "relay", np.full(handed.shape, bad), back=True)
            refused(player, "has not relayed both ways", "act")
            refused(player, r"'handed' has shape \(2,\)", "relay", np.ones(2), back=True)
            player.relay(np.zeros(handed.shape), back=True)
            player.act()

    def test_non_finite_program_output_raises_and_keeps_the_state(self):
        player = player_of(kind="commnet", rounds=2)
        player.speak(SEEN)
        player.hear({})
        player.act()
        for program, call, values in [
            ("speak", "speak", (SEEN,)),
            ("hear_1", "hear", ({},)),
            ("act", "act", ()),
        ]:
            spoil_next(player, program)
            refused(player, f"of program '{program}' holds NaN or infinity", call,
                    *values)  # fmt: skip
            getattr(player, call)(*values)

    def test_input_and_output_arrays_are_copied(self):
        player, twin = player_of(kind="commnet", delay=1), player_of(kind="commnet", delay=1)
        word = WORD.copy()
        for one in (player, twin):
            one.speak(SEEN)
            one.act()
            one.hear({"car_1": word if one is player else WORD})
        word[:] = np.nan
        for one in (player, twin):
            one.speak(SEEN)
            one.act()
        assert (player.parameters["logits"] == twin.parameters["logits"]).all()
        relay = player_of(kind="bicnet", gate=True)
        relay.speak(SEEN)
        relay._silent = True
        relay.relay()[:] = np.nan
        relay.relay(back=True)
        relay.act()


def spoil_next(player, name):
    """Makes the next call of a program return infinity in its last output."""
    program = player.programs[name]

    class Spoiled:
        inputs = program.inputs

        def __call__(self, inputs):
            player.programs[name] = program
            outputs = program(inputs)
            last = list(outputs)[-1]
            return {**outputs, last: np.full_like(outputs[last], np.inf)}

    player.programs[name] = Spoiled()


class TestWhatIsNoArray:
    @pytest.mark.parametrize("value", [
        "hello", b"hello", object(), {1, 2, 3}, [[1.0], [2.0, 3.0], []], [1j, 0, 0],
        ["1", "2", "3"], [None, 1.0, 2.0, "x"], [10**400, 0, 0], torch.ones(3, requires_grad=True),
    ], ids=lambda value: type(value).__name__)  # fmt: skip
    def test_invalid_array_raises_one_sentence(self, value):
        expected = r"'observation' is a \w+, expected float32 \(3,\)\.$"
        refused(player_of(), expected, "act", value)
        player = player_of(kind="commnet")
        refused(player, expected, "speak", value)
        player.speak(SEEN)
        expected = r"the message of 'car_1' is a \w+, expected float32 \(5,\)\.$"
        refused(player, expected, "act", inbox={"car_1": value})

    def test_batch_of_observations_is_refused(self):
        refused(player_of(), r"'observation' has shape \(4, 3\), expected float32 \(3,\)", "act",
                np.ones((4, 3)))  # fmt: skip

    def test_inbox_must_be_a_mapping(self):
        player = player_of(kind="commnet")
        player.speak(SEEN)
        for inbox in ("hello", [WORD], WORD, 3):
            refused(player, "inbox is a .*, expected a mapping of agents", "act", inbox=inbox)
        player = player_of(kind="commnet", rounds=2)
        player.speak(SEEN)
        refused(player, "inbox is a str, expected", "hear", "hello")

    def test_observation_keys_must_be_strings(self):
        refused(player_of(), "there is no 'observation', expected", "act", {1: SEEN})

    @pytest.mark.parametrize("number", [1, 1.0, np.int8(1), True])
    def test_action_mask_accepts_any_number_type(self, number):
        player = player_of(action_mask=True)
        assert player.act([1, 2, 3], action_mask=[number, 0]) == 0


class TestLegalActions:
    def test_invalid_action_mask_raises(self):
        player = player_of(action_mask=True)
        message = "'action_mask' has no True entry, expected one; do not call act for a waiting"
        refused(player, message, "act", SEEN, action_mask=[False, False])
        refused(player, "'action_mask' holds numbers that bool cannot represent", "act", SEEN,
                action_mask=[0.5, 1])  # fmt: skip
        refused(player, "'action_mask' holds numbers that", "act", SEEN, action_mask=[np.nan, 1])
        refused(player, r"has shape \(3,\), expected bool \(2,\)", "act", SEEN, action_mask=[1] * 3)
        refused(player, "there is no 'action_mask', expected bool", "act", SEEN)
        assert player.act(SEEN, action_mask=[False, True]) == 1


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    agents = find_agents(policy_of(), "car_0")
    return export_agents(agents, tmp_path_factory.mktemp("exported"), "onnx")["car_0"]


class TestPrograms:
    """Programs in a folder that is not trusted."""

    @pytest.fixture
    def folder(self, tmp_path):
        agents = find_agents(policy_of(), "car_0")
        return export_agents(agents, tmp_path / "export", "pt2")["car_0"]

    @pytest.fixture
    def onnx(self, exported, tmp_path):
        return Path(shutil.copytree(exported, tmp_path / "onnx" / "car_0"))

    def test_pt2_is_loaded_only_if_trusted(self, folder, monkeypatch):
        with monkeypatch.context() as patched:
            patched.setattr(torch.export, "load", None)
            with pytest.raises(PlayerError, match=r"act.pt2' is not ONNX and could run code; exp"):
                Player(folder)
        assert Player(folder, trust=True).act(SEEN).shape == ()

    @pytest.mark.parametrize(
        "file", ["../elsewhere.onnx", "absolute", "link.onnx", "linked/a.onnx"]
    )
    def test_program_outside_the_folder_requires_trust(self, onnx, tmp_path, file):
        outside = tmp_path / "onnx" / "elsewhere.onnx"
        outside.write_bytes((onnx / "act.onnx").read_bytes())
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "a.onnx").write_bytes(outside.read_bytes())
        os.symlink(outside, onnx / "link.onnx")
        os.symlink(tmp_path / "folder", onnx / "linked")
        file = str(outside) if file == "absolute" else file
        change_program(onnx, file=file, sha256=sha256_of(outside))
        with pytest.raises(PlayerError, match="is outside its agent's folder; if you trust its"):
            Player(onnx)
        assert Player(onnx, trust=True).act(SEEN).shape == ()

    def test_program_behind_symlink_or_relative_path_is_loaded(self, onnx, tmp_path):
        os.symlink(onnx, tmp_path / "other")
        assert Player(tmp_path / "other").act(SEEN).shape == ()
        change_program(onnx, file="../car_0/act.onnx")
        assert Player(onnx).act(SEEN).shape == ()

    @pytest.mark.parametrize("change", [
        {"file": 3}, {"file": None}, {"file": "act\0.onnx"}, {"inputs": 3}, {"outputs": [3]},
    ])  # fmt: skip
    def test_invalid_program_entry_raises(self, onnx, change):
        change_program(onnx, **change)
        with pytest.raises(PlayerError, match="interface.json' is not a valid interface"):
            Player(onnx)

    def test_file_in_place_of_the_folder_raises(self, tmp_path):
        (tmp_path / "act.onnx").touch()
        for wrong in ("act.onnx", "none"):
            with pytest.raises(PlayerError, match="does not exist; give the folder of an exported"):
                Player(tmp_path / wrong)


def change_program(folder, **changes):
    path = folder / "interface.json"
    interface = json.loads(path.read_text())
    interface["programs"]["act"].update(changes)
    path.write_text(json.dumps(interface))
