"""What every environment of the package keeps to. Used by ``test_contract.py``, case by case."""

import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils._python_dispatch import TorchDispatchMode
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

from torchrl_marl.specs import TeamSpec
from torchrl_marl.stacking import is_lazy, pad_group

# Like no other size in any case, so that a first dim of E is the envs.
E = 13
LIMIT = 5


@dataclass(frozen=True)
class Case:
    """An environment under the contract.

    ``make(num_envs, seed, max_steps)`` builds it; ``random_starts`` tells that its episodes
    start differently, ``agent_done`` that agents end by themselves, ``longest`` the steps after
    which it ends whatever is done, ``lazy`` that its groups are stacked lazily; ``saved`` that
    it has snapshots, ``rows`` that these, and a reset, are of all envs at once.
    """

    make: Callable[[int, int, int | None], EnvBase]
    random_starts: bool = True
    agent_done: bool = False
    state: bool = True
    longest: int = 10**6
    lazy: bool = False
    saved: bool = True
    rows: bool = True


class CountOperations(TorchDispatchMode):
    """Counts tensor operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def base_of(env: EnvBase) -> EnvBase:
    """The environment itself, which has the snapshots, without its transforms."""
    return env.base_env if isinstance(env, TransformedEnv) else env


def leaves(td: TensorDictBase, path: tuple = ()) -> Iterator[tuple[tuple, torch.Tensor]]:
    """All tensors; of a lazily stacked group agent by agent, since they may differ in shape."""
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
    """A leaf of a group, padded where the agents' own differ in shape."""
    return pad_group(td.get(key[:-1])).get(key[-1])


def draw_actions(env: EnvBase, n: int, seed: int = 0) -> list[TensorDict]:
    """``n`` joint actions, drawn without touching anybody's random state."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return [EnvBase.rand_action(env) for _ in range(n)]


def play(env: EnvBase, td: TensorDict, actions: list[TensorDict]) -> Iterator[TensorDict]:
    """Transitions, with what a reset of the envs that ended gave as ``"following"``."""
    for action in actions:
        transition, td = env.step_and_maybe_reset(td.clone(recurse=False).update(action))
        yield transition.clone().set("following", td.clone())


def asking_reset(env: EnvBase, td: TensorDict, envs: list[int]) -> TensorDict:
    """A copy of ``td`` that asks for new episodes in some envs."""
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


def world_rows(env: EnvBase) -> dict[str, torch.Tensor]:
    """Every tensor of the world's state that has one row an env."""
    snapshot = base_of(env).snapshot()
    world = snapshot["world"] if "world" in snapshot.keys() else snapshot["simulator"]
    leaves = [(k, x) for part in ("batched", "shared") for k, x in world[part].items()]
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
    """The contract; a subclass is parametrized with ``case``."""

    @pytest.fixture
    def env(self, case: Case) -> EnvBase:
        return case.make(E, 0, LIMIT)

    # ------------------------------------------------------------------- specs, keys, shapes

    def test_specs_are_kept(self, env):
        check_env_specs(env)
        check_env_specs(TransformedEnv(env, Compose(RewardSum(), StepCounter())))

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

    def test_torchrl_collects_it(self, env):
        collector = Collector(env, frames_per_batch=4 * E, total_frames=8 * E)
        assert [batch.shape for batch in collector] == [(E, 4), (E, 4)]
        collector.shutdown(close_env=False)

    # ---------------------------------------------------------------------------- life cycle

    def test_an_episode_ends_in_one_way(self, case, env):
        steps = torch.zeros(E, 1, dtype=torch.int64)
        begin = start(env, 0)
        limit = min(LIMIT, case.longest)
        for td in play(env, begin, draw_actions(env, 3 * LIMIT)):
            steps += 1
            after = td["next"]
            assert torch.equal(after["done"], after["terminated"] | after["truncated"])
            assert not (after["terminated"] & after["truncated"]).any()
            # A time limit is truncated, unless the world ended by itself in that step.
            expected = (steps == LIMIT) & ~after["terminated"]
            own_end = after["truncated"] & (steps < limit)
            assert torch.equal(after["truncated"] & ~own_end, expected)
            assert (steps <= limit).all()
            steps[after["done"]] = 0

    def test_agents_end_once_and_agree_with_the_episode(self, case, env):
        if not case.agent_done:
            pytest.skip("agents end together with the episode")
        groups = TeamSpec.from_env(env).groups.values()
        for td in play(env, start(env, 0), draw_actions(env, 4 * LIMIT)):
            after = td["next"]
            done = torch.cat([after[g.done_key] for g in groups], 1)
            terminated = torch.cat([after[g.terminated_key] for g in groups], 1)
            truncated = torch.cat([after[g.truncated_key] for g in groups], 1)
            before = torch.cat([td[g.done_key] for g in groups], 1)
            mask = torch.cat([after[g.mask_key] for g in groups], 1)
            assert torch.equal(done, terminated | truncated)
            assert not (terminated & truncated).any()
            assert (done | ~before).all()
            assert torch.equal(done.all(1), after["done"])
            assert (terminated.all(1) <= after["terminated"]).all()
            assert not mask[terminated.squeeze(-1)].any()
            running = ~after["done"].expand(-1, mask.shape[1])
            assert not (mask & done.squeeze(-1) & running).any()

    def test_nothing_is_earned_before_birth_and_after_the_end(self, case, env):
        team, begin = TeamSpec.from_env(env), start(env, 0)
        born = {
            name: torch.zeros(E, g.n_agents, dtype=torch.bool) for name, g in team.groups.items()
        }
        for td in play(env, begin, draw_actions(env, 4 * LIMIT)):
            for name, group in team.groups.items():
                lives = ~td[group.done_key].reshape(E, -1)
                if group.mask_key is not None:
                    born[name] |= td[group.mask_key]
                    lives = lives & (born[name] | group.in_turns)
                lives = lives.expand(E, group.n_agents)
                assert not td["next", name, "reward"].squeeze(-1)[~lives].any()
                born[name] &= ~td["next", "done"]

    def test_who_lives_at_a_time_limit_can_be_bootstrapped(self, case, env):
        groups = [g for g in TeamSpec.from_env(env).groups.values() if g.mask_key is not None]
        for td in play(env, start(env, 0), draw_actions(env, 2 * LIMIT)):
            for group in groups:
                after = td["next"]
                # Those that wait, too.
                lives = group.living(td) & ~after[group.terminated_key].squeeze(-1)
                at_limit = after["truncated"].expand_as(lives)
                assert after[group.mask_key][at_limit & lives].all()

    # ---------------------------------------------------------------------------------- seeds

    def test_a_seed_gives_the_same_rollout(self, case, env):
        actions = draw_actions(env, 2 * LIMIT)
        first = list(play(env, env.reset(), actions))
        torch.rand(3), np.random.rand(2), random.random()
        twin = case.make(E, 0, LIMIT)
        env.set_seed(0, static_seed=True)
        for a, b, c in zip(
            first, play(env, env.reset(), actions), play(twin, twin.reset(), actions)
        ):
            assert_same(a, b)
            assert_same(a, c)

    def test_another_seed_gives_another_rollout(self, case, env):
        if not case.random_starts:
            pytest.skip("nothing is drawn")
        other = case.make(E, 1, LIMIT)
        group = next(iter(env.group_map))
        first, second = (read(x.reset(), (group, "observation")) for x in (env, other))
        assert not torch.equal(first, second)

    def test_a_policy_of_its_seed_draws_other_numbers(self, case, env):
        base = base_of(env)
        own = getattr(base, "random_state", None) or getattr(base, "_random", None)
        if own is None:
            pytest.skip("it does not draw from torch")
        env.set_seed(0, static_seed=True)
        first = own.state_dict()["torch"]
        assert not torch.equal(first, torch.Generator().manual_seed(0).get_state())
        env.set_seed(0, static_seed=True)
        assert torch.equal(own.state_dict()["torch"], first)

    def test_envs_do_not_disturb_each_other(self, case, env):
        actions = draw_actions(env, 2 * LIMIT)
        alone = list(play(env, env.reset(), actions))
        first, second = case.make(E, 0, LIMIT), case.make(E, 5, LIMIT)
        before = rng_states()
        pair = zip(play(first, first.reset(), actions), play(second, second.reset(), actions))
        for expected, (found, _) in zip(alone, pair):
            assert_same(expected, found)
        reset_some(first, start(first), [1, 4])
        assert_same_rng(before, rng_states())

    # -------------------------------------------------------------------------- partial reset

    @pytest.mark.parametrize("envs", [[0], [2, 3, 9], list(range(1, E)), []])
    def test_a_partial_reset_starts_these_envs_only(self, case, env, envs):
        td = start(env, min(2, case.longest - 1))
        running = [i for i in range(E) if i not in envs]
        before = world_rows(env) if case.rows else {}
        after_reset = reset_some(env, td, envs)
        after = world_rows(env) if case.rows else {}
        assert set(before) <= set(after)
        for key, x in before.items():
            assert torch.equal(x[running], after[key][running]), key
        assert_same(td[running], after_reset[running])
        assert not after_reset["done"][envs].any()
        if case.random_starts and envs and before:
            assert any(not torch.equal(x[envs], after[key][envs]) for key, x in before.items())

    def test_every_env_counts_its_own_steps(self, case, env):
        n = min(2, case.longest - 1)
        begin = reset_some(env, start(env, n), [0, 5, 6])
        steps = torch.full((E, 1), n)
        steps[[0, 5, 6]] = 0
        for td in play(env, begin, draw_actions(env, 2 * LIMIT)):
            steps += 1
            at_limit = (steps == LIMIT) & ~td["next", "terminated"]
            assert (td["next", "truncated"] | ~at_limit).all()
            assert (steps <= LIMIT).all()
            steps[td["next", "done"]] = 0

    def test_a_reset_takes_as_many_operations_for_any_number_of_envs(self, case, env):
        if not case.rows:
            pytest.skip("its worlds begin one by one")
        td = start(env, min(2, case.longest - 1))
        reset_some(env, td, [0])
        snapshot = base_of(env).snapshot()
        counts = set()
        for envs in ([3], [3, 4, 8], list(range(1, E))):
            base_of(env).restore(snapshot)
            asked = asking_reset(env, td, envs)
            with CountOperations() as operations:
                env._reset(asked)
            counts.add(operations.count)
        assert len(counts) == 1, counts

    # ------------------------------------------------------------------------------- snapshot

    def test_a_snapshot_is_exact(self, case, env):
        if not case.saved:
            pytest.skip("its world cannot be saved")
        n = min(2, case.longest - 1)
        td = reset_some(env, start(env, n), [1, 2])
        file = io.BytesIO()
        torch.save(base_of(env).snapshot().to_dict(), file)
        file.seek(0)
        actions = draw_actions(env, 2 * LIMIT)
        expected = list(play(env, td.clone(), actions))
        saved = TensorDict(torch.load(file, weights_only=True))
        fresh = case.make(E, 3, LIMIT)
        for other in (env, fresh):
            base_of(other).restore(saved)
            for a, b in zip(expected, play(other, td.clone(), actions)):
                assert_same(a, b)

    def test_a_snapshot_of_another_size_is_refused(self, case, env):
        if not case.saved:
            pytest.skip("its world cannot be saved")
        other = case.make(E + 1, 0, LIMIT)
        env.reset(), other.reset()
        with pytest.raises(RuntimeError, match="size|does not fit"):
            base_of(env).restore(base_of(other).snapshot())
