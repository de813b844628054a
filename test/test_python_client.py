"""The Python client: MessagePack, file size, old Python versions, and its page in the docs."""

import ast
import random
import re
import shutil
import subprocess
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torchrl_marl_client
from external import CLIENTS, echo_policy
from torchrl_marl_client import Client, numbers, pack, unpack

from torchrl_marl.apps.external.declaration import Declared
from torchrl_marl.apps.external.listener import Listener
from torchrl_marl.apps.external.server import ActionServer

pytestmark = pytest.mark.clients

FILE = CLIENTS / "torchrl_marl_client.py"
DOCS = Path(__file__).parents[1] / "docs"
SIZES = (0, 1, 15, 16, 31, 32, 255, 256, 65_535, 65_536)
INTS = (
    0,
    127,
    128,
    255,
    256,
    65_535,
    65_536,
    2**32,
    2**62,
    -1,
    -32,
    -33,
    -128,
    -129,
    -40_000,
    -(2**40),
)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 1.5, -2.25),
        *INTS,
        *("ä" * (n // 2) for n in SIZES),
        *(bytes(n) for n in SIZES),
        *(list(range(n)) for n in SIZES),
        *({str(i): i for i in range(n)} for n in SIZES),
        {"a": [{"b": [None, {"c": b"x"}]}], "d": {}},
    ],
    ids=lambda value: None,
)
def test_messagepack_agrees_with_msgpack(value):
    assert unpack(msgpack.packb(value)) == (value, len(msgpack.packb(value)))
    assert msgpack.unpackb(pack(value)) == value


def test_messagepack_agrees_with_msgpack_on_random_values():
    draw = random.Random(0)

    def value(depth):
        kind = draw.randrange(7 if depth else 5)
        if kind == 5:
            return [value(depth - 1) for _ in range(draw.randrange(20))]
        if kind == 6:
            return {str(draw.random()): value(depth - 1) for _ in range(draw.randrange(20))}
        return (
            None,
            draw.random(),
            draw.randrange(-(2**40), 2**40),
            "é" * draw.randrange(40),
            True,
        )[kind]

    for _ in range(300):
        one = value(3)
        assert unpack(msgpack.packb(one))[0] == one == msgpack.unpackb(pack(one))


def test_observations_are_packed_as_float32_bytes():
    expected = np.array([1.5, -2.0, 3.0], "<f4").tobytes()
    for seen in (
        [1.5, -2, 3],
        (1.5, -2.0, 3),
        expected,
        np.array([1.5, -2, 3]),
        np.float32([1.5, -2, 3]),
    ):
        assert numbers(seen) == expected
    assert msgpack.unpackb(pack({"x": np.float32(1.5), "y": np.int64(3)})) == {"x": 1.5, "y": 3}


def test_unknown_client_option_raises():
    with pytest.raises(TypeError, match="Client has no patients"):
        Client(patients=3)


@pytest.mark.parametrize(
    "wrong", [None, [None, 1.0], ["a", 1.0], "ab", 0.5, [[0.0]], [1e300], np.array(["a"])]
)
def test_wrong_numbers_name_the_agent_and_are_no_step(door, wrong):
    client = Client(port=door.port, agents={"walker": {"n": 2, "observation": 1, "action": 1}})
    seen = {"walker_0": [0.0], "walker_1": [0.0]}
    for act in (client.begin, client.step):
        with pytest.raises(TypeError, match=r"^'walker_1' has .*, expected a flat list of numbers"):
            act({**seen, "walker_1": wrong})
        assert set(act(seen)) == set(seen)
    client.close()


def test_wrong_arguments_of_a_step_raise():
    client = Client(agents={"walker": {"n": 1, "observation": 1, "action": 1}})
    with pytest.raises(TypeError, match="unexpected keyword argument 'reward'"):
        client.step({"walker_0": [0.0]}, reward={"walker_0": 1.0})
    with pytest.raises(TypeError, match="expected a dict of observations"):
        client.begin([[0.0]])
    with pytest.raises(TypeError, match="a list of terminated agents"):
        client.step({"walker_0": [0.0]}, terminated="walker_0")


def test_client_is_small_and_runs_on_old_python_versions():
    text = FILE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    for file in CLIENTS.glob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 9))
        imported = {
            name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for name in node.names
        }
        assert imported <= {
            "hmac",
            "os",
            "socket",
            "struct",
            "time",
            "argparse",
            "random",
            "threading",
        }


@pytest.fixture
def door():
    agents = {"walker": {"n": 2, "observation": 1, "action": 1}}
    opened = Listener(ActionServer(Declared.read(agents), echo_policy))
    yield opened
    opened.close()


def test_program_of_the_docs_page_runs(door):
    page = (DOCS / "environments" / "external.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```py\n(.*?)^```", page, re.M | re.S)
    exec(compile(program.replace("port=7777", f"port={door.port}"), "external.md", "exec"), {})
    assert door.server.counts["steps"] == 60 and door.server.counts["refused"] == 0


def old_python():
    """A Python 3.9 that runs, or None."""
    found = shutil.which("python3.9")
    runs = found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0
    return found if runs else None


@pytest.mark.skipif(old_python() is None, reason="there is no Python 3.9 here")
def test_client_runs_on_python_3_9(door):
    code = (
        "from torchrl_marl_client import Client\n"
        f"client = Client(port={door.port}, agents={door.server.declared.settings()['agents']})\n"
        "print(client.begin({'walker_0': [0.5], 'walker_1': [2]}))\n"
        "client.end({'walker_0': 1.0}, truncated=True)\n"
    )
    ran = subprocess.run(
        [old_python(), "-I", "-c", f"import sys; sys.path.insert(0, {str(CLIENTS)!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.stdout == "{'walker_0': [0.5], 'walker_1': [2.0]}\n", ran.stderr


def test_public_names_have_docstrings():
    for name in ("Client", "pack", "unpack", "numbers"):
        assert getattr(torchrl_marl_client, name).__doc__
    for name in ("begin", "step", "end", "close"):
        assert getattr(Client, name).__doc__
