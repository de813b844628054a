"""The contract of every environment of the package, used by ``test_contract.py``."""

import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from operations import CountOperations
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    EnvBase,
    RewardSum,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from torchrl.envs.utils import check_marl_grouping, step_mdp

from torchrl_marl.envs import check_marl_env
from torchrl_marl.specs import TeamSpec
from torchrl_marl.specs.groups import is_lazy
from torchrl_marl.specs.stacking import pad_group

# Different from all other sizes, so that a first dimension of E is that of the envs.
E = 13
LIMIT = 4


@dataclass(frozen=True)
class Case:
    """An environment under the contract.

    ``make(num_envs, seed, max_steps)`` builds it. ``random_starts``: episodes start differently.
    ``agent_done``: agents have separate done flags. ``longest``: the largest number of steps of
    an episode. ``lazy``: groups are stacked lazily. ``saved``: it has snapshots. ``rows``:
    snapshots and resets are batched over envs.
    """

    make: Callable[[int, int, int | None], EnvBase]
    random_starts: bool = True
    agent_done: bool = False
    state: bool = True
    longest: int = 10**6
    lazy: bool = False
    saved: bool = True
    rows: bool = True


def base_of(env: EnvBase) -> EnvBase:
    """The environment without its transforms, which has the snapshots."""
    return env.base_env if isinstance(env, TransformedEnv) else env


def leaves(td: TensorDictBase, path: tuple = ()) -> Iterator[tuple[tuple, torch.Tensor]]:
    """All tensors; those of a lazily stacked group per agent, since shapes may differ."""
    if is_lazy(td):
        for i, member in enumerate(td.unbind(td.stack_dim)):
            yield from leaves(member, (*path, i))
        return
    for key, x in td.items():
        if isinstance(x, TensorDictBase):
            yield from leaves(x, (*path, key))
        else:
            yield (*path, key), x


def read(td: TensorDictBase, key: tuple) -> torch.Tensor:
    """A leaf of a group, padded if the shapes of agents differ."""
    return pad_group(td.get(key[:-1])).get(key[-1])


def draw_actions(env: EnvBase, n: int, seed: int = 0) -> list[TensorDict]:
    """``n`` random joint actions; the global random state does not change."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [EnvBase.rand_action(env) for _ in range(n)]


def play(env: EnvBase, td: TensorDict, actions: list[TensorDict]) -> Iterator[TensorDict]:
    """Transitions, with the data after the reset of finished envs as ``"following"``."""
    for action in actions:
        transition, td = env.step_and_maybe_reset(td.clone(recurse=False).update(action))
        yield transition.clone().set("following", td.clone())


def asking_reset(env: EnvBase, td: TensorDict, envs: list[int]) -> TensorDict:
    """A copy of ``td`` with the reset flags of some envs."""
    reset = torch.zeros(*env.batch_size, 1, dtype=torch.bool)
    reset[envs] = True
    return td.clone().set("_reset", reset)


def reset_some(env: EnvBase, td: TensorDict, envs: list[int]) -> TensorDict:
    """Starts new episodes in some envs."""
    return env.reset(asking_reset(env, td, envs))


def start(env: EnvBase, n_steps: int = 2) -> TensorDict:
    """A reset and some steps."""
    td = env.reset()
    for action in draw_actions(env, n_steps, seed=7):
        td = step_mdp(env.step(td.update(action)))
    return td


def environment_rows(env: EnvBase) -> dict[str, torch.Tensor]:
    """Every tensor of the environment's state with one row per env."""
    snapshot = base_of(env).snapshot()
    state = snapshot["world"] if "world" in snapshot.keys() else snapshot["simulator"]
    leaves = [(k, x) for part in ("batched", "shared") for k, x in state[part].items()]
    return {k: x for k, x in leaves if x.shape[:1] == (E,)}


def assert_same(first: TensorDict, second: TensorDict) -> None:
    first, second = dict(leaves(first)), dict(leaves(second))
    assert set(first) == set(second)
    for key, x in first.items():
        assert torch.equal(x, second[key]), key


def rng_states() -> tuple:
    return torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()


def assert_same_rng(first: tuple, second: tuple) -> None:
    assert torch.equal(first[0], second[0])
    assert np.array_equal(first[1], second[1])
    assert first[2] == second[2]


class EnvContract:
    """The contract; a subclass has ``case`` as a parameter of its class.

    An environment is built once per case. ``check_marl_env`` compares it with a second instance.
    It checks specs, flags, masks, time limits, seeds, partial resets and actions of masked
    agents. The tests here cover the rest.
    """

    @pytest.fixture(scope="class")
    def built(self, case: Case) -> Iterator[EnvBase]:
        env = case.make(E, 0, LIMIT)
        yield env
        if not env.is_closed:
            env.close()

    @pytest.fixture
    def env(self, built: EnvBase) -> EnvBase:
        built.set_seed(0, static_seed=True)
        return built

    def test_check_marl_env_passes(self, case, env):
        report = check_marl_env(env, n_steps=LIMIT + 2, make=lambda: case.make(E, 0, LIMIT))
        assert "the process's random state" not in report
        assert "another seed gives the same play" not in report or not case.random_starts

    # ------------------------------------------------------------------- specs, keys, shapes

    def test_groups_have_their_keys(self, case, env):
        check_marl_grouping(env.group_map, [n for names in env.group_map.values() for n in names])
        team = TeamSpec.from_env(env)
        td = env.rollout(3, break_when_any_done=False)
        assert set(team.groups) == set(env.group_map)
        assert (team.state_spec is not None) == case.state
        if case.state:
            assert td["state"].shape == td["next", "state"].shape == (E, 3, *team.state_spec.shape)
        for name, group in team.groups.items():
            n = group.n_agents
            assert is_lazy(td[name]) == case.lazy
            assert read(td, group.action_key).shape[:3] == (E, 3, n)
            assert td["next", name, "reward"].shape == (E, 3, n, 1)
            assert group.agent_done == case.agent_done
            for key in group.observation_keys:
                assert read(td, key if len(key) == 2 else key[:2]).shape[:3] == (E, 3, n)
            if group.mask_key is not None:
                assert td[group.mask_key].shape == (E, 3, n)
            for key in ("done", "terminated", "truncated"):
                assert td["next", key].shape == (E, 3, 1)
                if case.agent_done:
                    assert td["next", name, key].shape == (E, 3, n, 1)

    def test_torchrl_specs_check_and_collector(self, case):
        env = case.make(E, 0, LIMIT)  # a new one, since a collector closes it at the end
        check_env_specs(TransformedEnv(env, Compose(RewardSum(), StepCounter())))
        collector = Collector(env, frames_per_batch=4 * E, total_frames=8 * E)
        assert [batch.shape for batch in collector] == [(E, 4), (E, 4)]
        collector.shutdown(close_env=False)

    # ---------------------------------------------------------------------------- life cycle

    def test_rewards_before_birth_and_after_the_end_are_zero(self, case, env):
        team, begin = TeamSpec.from_env(env), start(env, 0)
        born = {
            name: torch.zeros(E, g.n_agents, dtype=torch.bool) for name, g in team.groups.items()
        }
        for td in play(env, begin, draw_actions(env, 2 * LIMIT + 1)):
            for name, group in team.groups.items():
                lives = ~td[group.done_key].reshape(E, -1)
                if group.mask_key is not None:
                    born[name] |= td[group.mask_key]
                    lives = lives & (born[name] | group.in_turns)
                lives = lives.expand(E, group.n_agents)
                assert not td["next", name, "reward"].squeeze(-1)[~lives].any()
                born[name] &= ~td["next", "done"]

    def test_envs_reach_their_time_limits_independently(self, case, env):
        """Living agents, acting or waiting, are in the mask at the time limit."""
        n = min(2, case.longest - 1)
        groups = [g for g in TeamSpec.from_env(env).groups.values() if g.mask_key is not None]
        begin = reset_some(env, start(env, n), [0, 5, 6])
        steps = torch.full((E, 1), n)
        steps[[0, 5, 6]] = 0
        for td in play(env, begin, draw_actions(env, 2 * LIMIT)):
            steps += 1
            after = td["next"]
            at_limit = (steps == LIMIT) & ~after["terminated"]
            assert (after["truncated"] | ~at_limit).all()
            assert (steps <= min(LIMIT, case.longest)).all()
            for group in groups:
                lives = group.living(td) & ~after[group.terminated_key].squeeze(-1)
                assert after[group.mask_key][after["truncated"].expand_as(lives) & lives].all()
            steps[after["done"]] = 0

    # ---------------------------------------------------------------------------------- seeds

    def test_equal_seeds_give_equal_rollouts(self, case, env):
        """Independent of the global random state; another seed gives another start."""
        twin, actions = case.make(E, 0, LIMIT), draw_actions(env, LIMIT + 2)
        first = list(play(twin, twin.reset(), actions))
        torch.rand(3), np.random.rand(2), random.random()
        for a, b in zip(first, play(env, env.reset(), actions)):
            assert_same(a, b)
        if case.random_starts:
            twin.set_seed(0, static_seed=True)
            env.set_seed(1, static_seed=True)
            group = next(iter(env.group_map))
            one, other = (read(x.reset(), (group, "observation")) for x in (twin, env))
            assert not torch.equal(one, other)

    def test_random_state_differs_from_a_generator_with_the_same_seed(self, case, env):
        base = base_of(env)
        random_state = getattr(base, "random_state", None) or getattr(base, "_random", None)
        if random_state is None:
            pytest.skip("it does not draw from torch")
        first = random_state.state_dict()["torch"]
        assert not torch.equal(first, torch.Generator().manual_seed(0).get_state())
        env.set_seed(0, static_seed=True)
        assert torch.equal(random_state.state_dict()["torch"], first)

    # -------------------------------------------------------------------------- partial reset

    def test_partial_reset_changes_only_the_given_envs(self, case, env):
        for envs in ([0], [2, 3, 9], list(range(1, E)), []):
            td = start(env, min(2, case.longest - 1))
            running = [i for i in range(E) if i not in envs]
            before = environment_rows(env) if case.rows else {}
            rng_before = rng_states()
            after_reset = reset_some(env, td, envs)
            assert_same_rng(rng_before, rng_states())
            after = environment_rows(env) if case.rows else {}
            assert set(before) <= set(after)
            for key, x in before.items():
                assert torch.equal(x[running], after[key][running]), key
            assert_same(td[running], after_reset[running])
            assert not after_reset["done"][envs].any()
            if case.random_starts and envs and before:
                assert any(not torch.equal(x[envs], after[key][envs]) for key, x in before.items())

    def test_operations_of_a_reset_do_not_depend_on_the_envs(self, case, env):
        if not case.rows:
            pytest.skip("its environments begin one by one")
        td = start(env, min(2, case.longest - 1))
        reset_some(env, td, [0])
        snapshot = base_of(env).snapshot()
        counts = set()
        for envs in ([3], [3, 4, 8], list(range(1, E))):
            base_of(env).restore(snapshot)
            reset_input = asking_reset(env, td, envs)
            with CountOperations() as operations:
                env._reset(reset_input)
            counts.add(operations.count)
        assert len(counts) == 1, counts

    # ------------------------------------------------------------------------------- snapshot

    def test_restored_snapshot_continues_exactly(self, case, env):
        """Saved to a file; restored to itself and to a new instance, refused for another size."""
        if not case.saved:
            pytest.skip("its environment cannot be saved")
        n = min(2, case.longest - 1)
        td = reset_some(env, start(env, n), [1, 2])
        file = io.BytesIO()
        torch.save(base_of(env).snapshot().to_dict(), file)
        file.seek(0)
        actions = draw_actions(env, LIMIT + 1)
        expected = list(play(env, td.clone(), actions))
        saved = TensorDict(torch.load(file, weights_only=True))
        fresh = case.make(E, 3, LIMIT)
        for other in (env, fresh):
            base_of(other).restore(saved)
            for a, b in zip(expected, play(other, td.clone(), actions)):
                assert_same(a, b)
        with pytest.raises(RuntimeError, match="size|does not fit"):
            base_of(case.make(E + 1, 0, LIMIT)).restore(saved)
