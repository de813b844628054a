"""The C++ client, compiled and run against a server on a port."""

import hashlib
import hmac
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from torchrl_marl.apps.external.declaration import Declared
from torchrl_marl.apps.external.listener import Listener
from torchrl_marl.apps.external.server import ActionServer

FOLDER = Path(__file__).parents[1] / "clients" / "cpp"
COMPILER = shutil.which("g++")

# A program that uses the header: hashes, every kind of message, and every kind of answer.
PROGRAM = r"""
#include "torchrl_marl_client.hpp"
#include <cmath>
#include <cstdio>
using namespace torchrl_marl;

int main(int, char** given) {
    const std::string what = given[1];
    if (what == "proof") {
        for (const char* text : {"", "abc", "The quick brown fox jumps over the lazy dog"})
            for (const auto& found : {sha256(text), hmac_sha256(std::string(100, 'k'), text)}) {
                for (unsigned char c : found) std::printf("%02x", c);
                std::puts("");
            }
        return 0;
    }
    try {
        const Kind cat = {"cat", 1, 2, 3, true, true}, mouse = {"mouse", 2, 1, 2};
        Client client("127.0.0.1", std::stoi(given[2]), {cat, mouse}, "pen");
        client.token = given[3];
        client.patience = 5;
        const Seen seen = {{"cat_0", {1.5f, -0.25f}}, {"mouse_0", {2}}, {"mouse_1", {3}}};
        Actions actions = client.begin(seen, {{"cat_0", {false, true, true}}});
        for (const auto& [agent, chosen] : actions) {
            std::printf("%s", agent.c_str());
            for (double x : chosen) std::printf(" %g", x);
            std::puts("");
        }
        if (what == "break") client.close();  // as a network does
        const Rewards rewards = {{"mouse_0", 0.5}, {"mouse_1", -1}};
        actions = client.step({{"mouse_0", {4}}}, rewards, {"mouse_1"});
        const auto version = static_cast<long long>(client.version);
        std::printf("%zu %g %lld\n", actions.size(), actions.at("mouse_0")[0], version);
        client.end({{"mouse_0", 0.125}}, true, {{"mouse_0", {5}}});
        if (what == "wrong") client.begin({{"mouse_7", {4}}});
    } catch (const std::runtime_error& error) {
        std::puts(error.what());
    }
}
"""
AGENTS = {
    "cat": {"n": 1, "observation": 2, "action": {"n_actions": 3, "mask": True}},
    "mouse": {"n": 2, "observation": 1, "action": 2},
}
pytestmark = [pytest.mark.clients, pytest.mark.skipif(COMPILER is None, reason="there is no g++")]


def compiled(source, program):
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{FOLDER}"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(program)], check=True)
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "says.cpp").write_text(PROGRAM, encoding="utf-8")
    return compiled(folder / "says.cpp", folder / "says")


def policy(td):
    """For cats the last legal action; for mice the observation and its square."""
    legal = td["cat", "action_mask"]
    td["cat", "action"] = torch.where(legal, torch.arange(3), -1).amax(-1)
    seen = td["mouse", "observation"]
    td["mouse", "action"] = torch.cat([seen, seen * seen], -1)
    return td


@pytest.fixture
def door():
    server = ActionServer(Declared.read(AGENTS), policy, token="secret")
    server.version = 2**40
    door = Listener(server)
    yield door
    door.close()


def said(program, *arguments):
    found = subprocess.run(
        [str(program), *map(str, arguments)], capture_output=True, text=True, timeout=30
    )
    return found.stdout.splitlines()


def test_hashes_equal_those_of_hashlib_and_hmac(program):
    expected = []
    for text in (b"", b"abc", b"The quick brown fox jumps over the lazy dog"):
        expected += [
            hashlib.sha256(text).hexdigest(),
            hmac.new(b"k" * 100, text, "sha256").hexdigest(),
        ]
    assert said(program, "proof") == expected


@pytest.mark.parametrize("what", ["play", "break"])
def test_client_exchanges_observations_and_actions(program, door, what):
    lines = said(program, what, door.port, "secret")
    assert lines == ["cat_0 2", "mouse_0 2 4", "mouse_1 3 9", f"1 4 {2**40}"]
    counts = door.server.counts
    assert (counts["steps"], counts["reconnects"]) == (2, int(what == "break"))
    assert counts["truncated"] == counts["refused"] == 0


def test_client_raises_errors_of_the_server(program, door):
    assert "the token is wrong" in said(program, "play", door.port, "guess")[0]
    assert "'mouse_7' is not declared" in said(program, "wrong", door.port, "secret")[-1]


def test_example_program_finishes_its_episodes(door, tmp_path):
    example = compiled(FOLDER / "example.cpp", tmp_path / "example")
    server = ActionServer(None, lambda td: td.set(("walker", "action"), _towards(td)))
    own = Listener(server)
    try:
        lines = said(example, "127.0.0.1", own.port, 3)
    finally:
        own.close()
    assert [line.split()[:3] for line in lines] == [["episode", str(i), "return"] for i in range(3)]
    # An agent that does not move loses about 0.6 per step; moving to the middle takes a few.
    returns = [float(line.split()[3]) for line in lines]
    assert all(-4 <= x < -0.05 for x in returns), returns
    assert server.counts["steps"] == 3 * 25


def _towards(td):
    """Towards the center of all: a third of the summed offsets to the two others."""
    others = td["walker", "observation"][..., 2:].unflatten(-1, (2, 2)).sum(-2) / 3
    return (others / 0.15).clamp(-1, 1)
