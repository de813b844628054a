"""Level-based foraging and the robotic warehouse equal the original packages."""

import copy
import functools
import itertools

import numpy as np
import pytest
import torch
from support.tiers import first_tier_cases

from torchrl_marl.collectors import RolloutCollector
from torchrl_marl.envs import check_marl_env, make_env
from torchrl_marl.envs.foraging import LevelBasedForaging, Warehouse
from torchrl_marl.envs.foraging.moves import moving, set_order
from torchrl_marl.envs.foraging.names import TASKS, read_task
from torchrl_marl.errors import ConfigError

E = 3


def compare(env, td, seen, earned, done):
    """Asserts that a step equals the originals; returns the next root."""
    after = td["next"]
    assert torch.equal(after["agent", "observation"], torch.tensor(np.array(seen)))
    reward = torch.tensor(np.array(earned), dtype=torch.float64)
    torch.testing.assert_close(
        after["agent", "reward"].squeeze(-1), reward.float(), rtol=1e-6, atol=0
    )
    assert after["done"].flatten().tolist() == done
    return env.step_mdp(td)


# ------------------------------------------------------------ level-based foraging, side by side

LBF = {
    "lbf-8x8-2p-2f-coop": {},
    "lbf-10x10-3p-3f": {},
    "lbf-15x15-3p-5f": {},
    "lbf-2s-8x8-2p-2f-coop": {},
    "lbf-1s-7x7-4p-3f": {"penalty": 0.1, "observe_agent_levels": False},
    "lbf-3s-7x7-3p-4f": {"min_player_level": [1, 2, 2], "max_player_level": [3, 2, 5]},
    "lbf-5x5-4p-2f": {"max_food_level": [2, 4], "min_food_level": [1, 3], "penalty": 0.5},
    "lbf-5x5-5p-3f-coop": {"normalize_reward": False},
    "lbf-5x5-9p-1f-coop": {},
}


def foraging(name, **kwargs):
    """Original environments, and ours set to their states."""
    originals = pytest.importorskip("lbforaging.foraging")
    env = make_env(f"foraging/{name}", num_envs=E, seed=0, **kwargs)
    settings = {**read_task(name)[1], "min_player_level": 1, "max_player_level": 2}
    settings |= {"min_food_level": 1, "max_food_level": None, "max_episode_steps": 50, **kwargs}
    settings["sight"] = settings["sight"] or max(settings["field_size"])
    made = [originals.ForagingEnv(**settings) for _ in range(E)]
    seen = [one.reset(seed=i)[0] for i, one in enumerate(made)]
    td = env.reset()
    env.positions, env.levels = players(made), levels(made)
    n_foods, n_cells = env.n_foods, env.height * env.width
    fields = [one.field.flatten() for one in made]
    cells = [[*x.nonzero()[0], *[n_cells] * n_foods][:n_foods] for x in fields]
    env.foods = env._cell_coordinates(torch.tensor(np.array(cells)))
    grown = [[[*x, 0][i] for i in own] for x, own in zip(fields, cells)]
    env.food_levels = torch.tensor(np.array(grown)).long()
    env.total = env.food_levels.sum(1, keepdim=True)
    td.set(("agent", "observation"), env._observe()["agent"]["observation"])
    assert torch.equal(td["agent", "observation"], torch.tensor(np.array(seen)))
    return env, made, td


def players(made):
    return torch.tensor([[[int(x) for x in p.position] for p in one.players] for one in made])


def levels(made):
    return torch.tensor([[int(p.level) for p in one.players] for one in made])


def field(env):
    grid = torch.zeros(E, env.height + 1, env.width, dtype=torch.int64)
    for k in range(E):
        rows, columns = env.foods[k].unbind(-1)
        grid[k, rows, columns] += env.food_levels[k]
    return grid[:, :-1]


def hungry(one, rng):
    """Actions of players that mostly go to some food, and load it."""
    acts = []
    foods = np.argwhere(one.field)
    for player in one.players:
        apart = foods - np.array(player.position)
        apart = apart[np.abs(apart).sum(1).argmin()] if len(foods) and rng.random() < 0.8 else None
        if apart is None:
            acts.append(int(rng.integers(6)))
        elif np.abs(apart).sum() == 1:
            acts.append(5)
        else:
            vertical = abs(apart[0]) > abs(apart[1]) or (apart[0] and rng.random() < 0.3)
            acts.append(int(1 + (apart[0] > 0) if vertical else 3 + (apart[1] > 0)))
    return acts


@pytest.mark.parametrize("name", LBF)
def test_foraging_equals_the_original(name):
    env, made, td = foraging(name, **LBF[name])
    rng, earned, shared, over = np.random.default_rng(0), 0.0, 0, [False] * E
    for _ in range(50):
        acts = [[0] * env.n_agents if end else hungry(one, rng) for one, end in zip(made, over)]
        td["agent", "action"] = torch.tensor(acts)
        played = [one.step(own) for one, own in zip(made, acts)]
        seen, reward, done, _, _ = zip(*played)
        over = [bool(a or b) for a, b in zip(over, done)]
        td = compare(env, env.step(td), seen, reward, over)
        assert torch.equal(env.positions, players(made))
        assert torch.equal(field(env), torch.tensor(np.array([one.field for one in made])).long())
        gone = [bool(one.field.sum() == 0) for one in made]
        assert td["terminated"].flatten().tolist() == gone
        earned += np.maximum(reward, 0).sum()
        places = [[p.position for p in one.players] for one in made]
        shared += sum(len(set(own)) < len(own) for own in places)
    assert earned > 0.3
    assert env.steps.tolist() == [50] * E
    if name == "lbf-5x5-9p-1f-coop":
        assert shared  # a player may enter the cell of one that fails to leave it


def test_players_may_follow_and_swap_but_collisions_block():
    env = LevelBasedForaging(4, players=3, field_size=(5, 5), max_num_food=1, seed=0)
    td = env.reset()
    env.positions = torch.tensor([[[2, 1], [2, 2], [4, 4]]]).repeat(4, 1, 1)
    env.positions[3, 2] = torch.tensor([2, 4])
    env.foods, env.food_levels = torch.ones(4, 1, 2, dtype=torch.int64), torch.ones(4, 1).long()
    # Follow; swap; push; and two into one cell, behind which a third moves in.
    td["agent", "action"] = torch.tensor([[4, 4, 0], [4, 3, 0], [4, 0, 0], [4, 4, 3]])
    env.step(td)
    expected = [[[2, 2], [2, 3]], [[2, 2], [2, 1]], [[2, 1], [2, 2]], [[2, 2], [2, 2]]]
    assert env.positions[:, :2].tolist() == expected
    assert env.positions[:, 2].tolist() == [[4, 4]] * 3 + [[2, 4]]


def test_reward_of_food_is_shared_by_level():
    env = LevelBasedForaging(1, players=2, max_num_food=2, common_reward=False, seed=0)
    td = env.reset()
    env.positions = torch.tensor([[[1, 2], [3, 2]]])
    env.levels, env.total = torch.tensor([[1, 2]]), torch.tensor([[4]])
    env.foods, env.food_levels = torch.tensor([[[2, 2], [6, 6]]]), torch.tensor([[3, 1]])
    td["agent", "action"] = torch.tensor([[5, 5]])
    reward = env.step(td)["next", "agent", "reward"].flatten()
    torch.testing.assert_close(reward, torch.tensor([1 * 3 / (3 * 4), 2 * 3 / (3 * 4)]))


def counts(values, n):
    return torch.bincount(values.flatten(), minlength=n).double()


def assert_same_distribution(ours, theirs):
    """Two samples of counts are drawn from one distribution, by a chi-square test."""
    stats = pytest.importorskip("scipy.stats")
    kept = (ours + theirs) > 10
    assert stats.chi2_contingency(torch.stack([ours, theirs])[:, kept]).pvalue > 1e-4


@pytest.mark.environments
@pytest.mark.parametrize("name", ["lbf-5x5-2p-3f", "lbf-6x6-3p-2f-coop", "lbf-5x5-4p-2f"])
def test_initial_states_are_distributed_as_in_the_original(name):
    originals, n = pytest.importorskip("lbforaging.foraging"), 4000
    settings = {**read_task(name)[1], "min_player_level": 1, "max_player_level": 2}
    if name == "lbf-5x5-4p-2f":
        settings |= {"min_player_level": [1, 3, 1, 1], "max_player_level": [1, 4, 2, 1]}
    env = LevelBasedForaging(n, **settings, seed=0)
    env.reset()
    settings |= {"min_food_level": 1, "max_food_level": None, "max_episode_steps": 50}
    settings["sight"] = 6
    one = originals.ForagingEnv(**settings)
    places, strong, grown, food = [], [], [], []
    one.reset(seed=0)
    for _ in range(n):
        for player in one.players:
            player.position = None  # or it would depend on the last episode
        one.reset()
        places.append([int(p.position[0] * env.width + p.position[1]) for p in one.players])
        strong.append([int(p.level) for p in one.players])
        cells = one.field.flatten().nonzero()[0]
        grown.append([*cells, *[env.height * env.width] * env.n_foods][: env.n_foods])
        food.append([int(one.field.sum()), int((one.field > 0).sum())])
    ours = env.positions[..., 0] * env.width + env.positions[..., 1]
    n_cells = env.height * env.width
    for i, j in ((0, 0), (0, 1), (1, 1)):  # of each player, and of two together
        both = [x[:, i] * n_cells + x[:, j] for x in (ours, torch.tensor(places))]
        assert_same_distribution(*(counts(x, n_cells**2) for x in both))
    for i in range(env.n_agents):
        own = env.levels[:, i], torch.tensor(strong)[:, i]
        assert_same_distribution(*(counts(x, 6) for x in own))
    places = env.foods[..., 0] * env.width + env.foods[..., 1]
    base = (n_cells + 1) ** torch.arange(env.n_foods)
    code = [(x * base).sum(1) for x in (places, torch.tensor(np.array(grown)))]
    assert_same_distribution(*(counts(x, (n_cells + 1) ** env.n_foods) for x in code))
    total, pieces = torch.tensor(food).unbind(1)
    assert_same_distribution(counts(env.total, 40), counts(total, 40))
    assert_same_distribution(counts((env.food_levels > 0).sum(1), 6), counts(pieces, 6))


# ----------------------------------------------------------------- robotic warehouse, side by side

RWARE = {
    "rware-tiny-2ag": {},
    "rware-tiny-4ag": {},
    "rware-small-4ag": {},
    "rware-2s-tiny-3ag-hard": {"normalised_coordinates": True},
    "rware-1x3-3h-4ag-6req-twostage": {},
    "rware-2x3-2h-4ag-9req-global": {},
}


class Draws:
    """Draws requests for the originals; our environment gets the same draws."""

    draw = 0.0

    def choice(self, candidates):
        return candidates[int(self.draw * len(candidates))]


def given(draws, num_envs, n_goals, device):
    return draws.expand(num_envs, n_goals)


def warehouses(name, **kwargs):
    originals = pytest.importorskip("rware.warehouse")
    env = make_env(f"foraging/{name}", num_envs=E, seed=0, **kwargs)
    settings = read_task(name)[1]
    reward = originals.RewardType[settings.pop("reward_type", "individual").upper()]
    settings |= {"msg_bits": 0, "max_inactivity_steps": None, "max_steps": 500, **kwargs}
    made = [originals.Warehouse(**settings, reward_type=reward) for _ in range(E)]
    for i, one in enumerate(made):
        one.reset(seed=i)
        one._np_random = Draws()
    td = env.reset()
    write(env, made)
    return env, made, td


def read(made):
    """The state of the originals, in our format."""
    state = {"cells": [], "heading": [], "carried": [], "delivers": [], "shelves": []}
    state["requested"] = []
    for one in made:
        width, n_shelves = one.grid_size[1], len(one.shelfs)
        state["cells"].append([int(a.y * width + a.x) for a in one.agents])
        state["heading"].append([a.dir.value for a in one.agents])
        loads = [a.carrying_shelf for a in one.agents]
        state["carried"].append([n_shelves if x is None else x.id - 1 for x in loads])
        state["delivers"].append([a.has_delivered for a in one.agents])
        state["shelves"].append([int(s.y * width + s.x) for s in one.shelfs])
        state["requested"].append([s in one.request_queue for s in one.shelfs])
    return {name: torch.tensor(values) for name, values in state.items()}


def write(env, made):
    for name, value in read(made).items():
        setattr(env, name, value)


def busy(one, rng):
    """Actions of robots that mostly drive requested shelves to a goal."""
    acts = []
    for agent in one.agents:
        act = int(rng.choice(5, p=[0.05, 0.55, 0.15, 0.15, 0.1]))
        shelf = agent.carrying_shelf
        wanted = one.request_queue[agent.id % len(one.request_queue)]
        if rng.random() < 0.8 and (shelf is None or shelf in one.request_queue):
            goal = one.goals[agent.id % len(one.goals)]
            x, y = goal if shelf is not None else (wanted.x, wanted.y)
            across = 3 if agent.x < x else 2
            want = 1 if agent.y < y else 0 if agent.y > y else across
            if agent.x != x and rng.random() < 0.3:
                want = across
            act = 1 if agent.dir.value == want else int(rng.choice([1, 2, 2, 3]))
            act = 4 if shelf is None and (agent.x, agent.y) == (x, y) else act
        acts.append(act)
    return acts


@pytest.mark.parametrize("name", first_tier_cases({"rware-tiny-2ag"}, RWARE, "environments"))
def test_warehouse_equals_the_original(name, monkeypatch):
    env, made, td = warehouses(name, **RWARE[name])
    rng, delivered, rand = np.random.default_rng(0), 0.0, torch.rand
    for step in range(500):
        acts = [busy(one, rng) for one in made]
        draws = torch.tensor(rng.random((E, 1)), dtype=torch.float32)
        for one, draw in zip(made, draws.flatten()):
            one._np_random.draw = draw
        td["agent", "action"] = torch.tensor(acts)
        played = [one.step(own) for one, own in zip(made, acts)]
        seen, reward, done, _, _ = zip(*played)
        monkeypatch.setattr(torch, "rand", functools.partial(given, draws))
        td = env.step(td)
        monkeypatch.setattr(torch, "rand", rand)
        td = compare(env, td, seen, reward, list(done))
        for key, value in read(made).items():
            assert torch.equal(getattr(env, key), value), (step, key)
        delivered += float(np.sum(reward))
    assert delivered > 3
    assert td["truncated"].all() and not td["terminated"].any()


def crowd(one, rng):
    """Puts the robots into random cells of a corner, with random headings and loads."""
    height, width = one.grid_size
    cells = [(x, y) for x in range(min(4, width)) for y in range(min(5, height))]
    rng.shuffle(cells)
    directions = list(type(one.agents[0].dir))
    for shelf in one.shelfs:
        shelf.x, shelf.y = shelf.home
    for agent, (x, y) in zip(one.agents, cells):
        agent.x, agent.y, agent.dir = x, y, directions[rng.integers(4)]
        agent.carrying_shelf = None
    one._recalc_grid()
    for agent in one.agents:
        shelf = one.grid[1, agent.y, agent.x]
        if shelf and rng.random() < 0.4:
            agent.carrying_shelf = one.shelfs[shelf - 1]


def jams(n_agents, rounds):
    """Yields crowded robots, ours and the originals', with actions for a single step."""
    env, made, td = warehouses(f"rware-1x3-3h-{n_agents}ag-2req-indiv")
    rng = np.random.default_rng(n_agents)
    for one in made:
        for shelf in one.shelfs:
            shelf.home = shelf.x, shelf.y
    for _ in range(rounds):
        for one in made:
            crowd(one, rng)
        write(env, made)
        acts = rng.choice(5, p=[0.05, 0.8, 0.05, 0.05, 0.05], size=(E, n_agents))
        yield env, made, td, acts


def assert_moved_alike(n_agents, rounds):
    for env, made, td, acts in jams(n_agents, rounds):
        td["agent", "action"] = torch.tensor(acts)
        for one, own in zip(made, acts):
            one.step(own.tolist())
            one._cur_steps = 0
        env._step(td)
        for key, value in read(made).items():
            assert torch.equal(getattr(env, key), value), key


@pytest.mark.parametrize("n_agents", [2, 3, 4])
def test_crowded_robots_move_as_in_the_original(n_agents):
    assert_moved_alike(n_agents, 250)


@pytest.mark.environments
@pytest.mark.parametrize("n_agents", [5, 7, 10])
def test_larger_crowds_move_as_in_the_original_with_ties_by_index(n_agents, monkeypatch):
    """Ties are broken by index, since Python's set order is ours for up to four robots only."""
    views = pytest.importorskip("networkx.classes.coreviews")

    def by_number(self):
        return (n for n in self._atlas if self.NODE_OK(n))

    monkeypatch.setattr(views.FilterAtlas, "__iter__", by_number)
    monkeypatch.setattr(views.FilterAdjacency, "__iter__", by_number)
    monkeypatch.setattr(
        "torchrl_marl.envs.foraging.warehouse.set_order",
        lambda height, width: torch.zeros(height * width, 4, 4, dtype=torch.bool),
    )
    assert_moved_alike(n_agents, 400)


def move(here, target, headings):
    """Whether robots on a grid of 5 x 5 cells move."""
    none = torch.zeros(25, 4, 4, dtype=torch.bool)
    rows = (torch.tensor([x]) for x in (here, target, headings))
    return moving(*rows, none)[0].tolist()


def test_moves_of_chains_cycles_and_conflicts():
    assert move([0, 1, 2], [1, 2, 3], [3, 3, 3]) == [True] * 3  # a chain
    assert move([0, 1, 2], [1, 2, 2], [3, 3, 3]) == [False, False, True]  # behind one that stays
    assert move([0, 1], [1, 0], [3, 2]) == [False, False]  # no swap
    assert move([0, 1, 6, 5], [1, 6, 5, 0], [3, 1, 2, 0]) == [True] * 4  # a circle
    assert move([0, 1, 2], [1, 0, 1], [3, 2, 2]) == [False] * 3  # behind two that want to swap
    assert move([0, 2], [1, 1], [3, 2]) == [True, False]  # by number
    assert move([0, 2, 3], [1, 1, 2], [3, 2, 2]) == [False, True, True]  # the longer chain
    # Of equal chains the first; the third agent counts as early as the first, which wants its cell.
    assert move([7, 1, 12], [12, 11, 11], [1, 1, 2]) == [True, False, True]


def test_set_order_breaks_ties_only_in_a_moving_crowd():
    swapped = set_order(8, 8)
    cell, low, high = next(
        (cell, low, high)
        for cell, low, high in itertools.product([18, 27, 36], range(4), range(4))
        if low != high and swapped[cell, low, high]
    )
    step = torch.tensor([-8, 8, -1, 1])
    here = torch.tensor([[cell - step[low], cell - step[high], 0, 7]])
    target = torch.tensor([[cell, cell, 1, 6]])
    heading = torch.tensor([[low, high, 3, 2]])
    assert moving(here, target, heading, swapped)[0].tolist() == [False, True, True, True]
    target[0, 2:] = here[0, 2:]
    assert moving(here, target, heading, swapped)[0].tolist() == [True, False, True, True]


def test_new_requests_are_drawn_uniformly():
    env = Warehouse(6000, n_agents=1, request_queue_size=4, seed=0)
    td = env.reset()
    n_shelves = len(env.homes)
    env.cells, env.heading = torch.full((6000, 1), env.goals[0]), torch.zeros(6000, 1).long()
    env.carried = torch.full((6000, 1), 3)
    env.shelves = env.homes.repeat(6000, 1)
    env.shelves[:, 3] = env.goals[0]
    env.requested = torch.zeros(6000, n_shelves, dtype=torch.bool)
    env.requested[:, [1, 3, 5, 8]] = True
    td["agent", "action"] = torch.zeros(6000, 1).long()
    assert (env.step(td)["next", "agent", "reward"] == 1).all()
    assert (env.requested.sum(1) == 4).all() and env.requested[:, [1, 5, 8]].all()
    drawn = env.requested.sum(0).double()
    assert drawn[3] == 0
    drawn[[1, 3, 5, 8]] = 0
    expected = torch.full_like(drawn, 6000 / (n_shelves - 4))
    expected[[1, 3, 5, 8]] = 1
    chi = ((drawn - expected) ** 2 / expected)[expected > 1].sum()
    assert chi < 1.9 * (n_shelves - 5)


@pytest.mark.environments
def test_initial_warehouse_states_are_distributed_as_in_the_original():
    originals, n = pytest.importorskip("rware.warehouse"), 3000
    env = make_env("foraging/rware-1x3-1h-2ag-2req-indiv", num_envs=n, seed=0)
    env.reset()
    settings = read_task("rware-1x3-1h-2ag-2req-indiv")[1]
    settings |= {"msg_bits": 0, "max_inactivity_steps": None, "max_steps": 500}
    settings["reward_type"] = originals.RewardType.INDIVIDUAL
    one = originals.Warehouse(**settings)
    one.reset(seed=0)
    drawn = []
    for _ in range(n):
        one.reset()
        drawn.append(read([one]))
    theirs = {key: torch.cat([x[key] for x in drawn]) for key in drawn[0]}
    for i in range(2):
        own = [x[:, i] for x in (env.cells, theirs["cells"])]
        assert_same_distribution(*(counts(x, env.height * env.width) for x in own))
        own = [x[:, i] for x in (env.heading, theirs["heading"])]
        assert_same_distribution(*(counts(x, 4) for x in own))
    bits = 2 ** torch.arange(env.requested.shape[1])
    own = [(x * bits).sum(1) for x in (env.requested, theirs["requested"])]
    assert_same_distribution(*(counts(x, int(bits.sum()) + 1) for x in own))
    assert torch.equal(env.shelves, theirs["shelves"])


# ------------------------------------------------------------------------- as part of the package

BOTH = ["lbf-8x8-2p-2f", "rware-1x3-2h-4ag-7req-indiv"]


@pytest.mark.parametrize("name", first_tier_cases({"rware-tiny-4ag"}, TASKS, "environments"))
def test_tasks_pass_check_marl_env(name):
    check_marl_env(make_env(f"foraging/{name}", num_envs=2, max_steps=10, seed=0))


@pytest.mark.parametrize("name", BOTH)
def test_common_reward_is_the_sum_of_agent_rewards(name):
    rewards = []
    for common in (False, True):
        env = make_env(f"foraging/{name}", num_envs=256, seed=1, common_reward=common)
        torch.manual_seed(0)
        rewards.append(env.rollout(60, break_when_any_done=False)["next", "agent", "reward"])
    own, common = rewards
    assert own.sum() > 0
    torch.testing.assert_close(common, own.sum(2, keepdim=True).expand_as(own))


def act(td, n_actions):
    """Actions that look random, but depend on what all agents see."""
    seen = td["agent", "observation"]
    weights = torch.arange(1.0, seen[0].numel() + 1).sin().view(seen[0].shape)
    mixed = (seen * weights).sum((1, 2)).unsqueeze(1) * (7.0 + torch.arange(seen.shape[1]))
    return td.set(("agent", "action"), ((200 * mixed.sin()) % n_actions).long())


# No resets, and one candidate for each new request, since graphs draw other numbers.
@pytest.mark.parametrize("name", ["lbf-10x10-4p-8f", "rware-1x3-1h-6ag-3req-twostage"])
def test_graphs_equal_eager_bit_for_bit(name):
    batches = []
    for execution in ("eager", "trace"):
        env = make_env(f"foraging/{name}", num_envs=300, max_steps=60, seed=0)
        policy = functools.partial(act, n_actions=6 if name.startswith("lbf") else 5)
        collector = RolloutCollector(env, policy, frames_per_batch=300 * 20, execution=execution)
        batches.append([collector.rollout().clone() for _ in range(2)])
        assert collector.execution == execution
    assert batches[0][1]["next", "agent", "reward"].any()
    for eager, traced in zip(*batches):
        for key in [("next", "agent", "reward"), ("agent", "observation"), ("next", "done")]:
            assert torch.equal(eager[key], traced[key]), key


@pytest.mark.parametrize("name", BOTH)
def test_snapshots_resume_exactly_and_seeds_are_reproducible(name):
    env = make_env(f"foraging/{name}", num_envs=5, max_steps=7, seed=4)
    first = make_env(f"foraging/{name}", num_envs=5, max_steps=7, seed=4).rollout(
        20, break_when_any_done=False
    )
    torch.manual_seed(3)
    env.rollout(4)
    snapshot = copy.deepcopy(env.snapshot())
    acts = [env.rand_action(env.reset())["agent", "action"] for _ in range(20)]

    def play(env):
        env.restore(snapshot)
        td, found = env._to_tensordict(env._episode["given"]), []
        for act in acts:
            both = env.step_and_maybe_reset(td.set(("agent", "action"), act))
            td = both[1]
            found.append(both[0]["next", "agent"])
        return torch.stack([x["observation"] for x in found]), found[-1]["reward"]

    other = make_env(f"foraging/{name}", num_envs=5, max_steps=7, seed=9)
    other.reset()
    for a, b in zip(play(env), play(other)):
        assert torch.equal(a, b)
    again = make_env(f"foraging/{name}", num_envs=5, max_steps=7, seed=4)
    assert torch.equal(again.reset()["agent", "observation"], first["agent", "observation"][:, 0])


@pytest.mark.parametrize("name", BOTH)
def test_scene_shows_all_entities(name):
    env = make_env(f"foraging/{name}", num_envs=2, seed=0)
    env.reset()
    shapes = env.scene(1)
    names = [shape.name for shape in shapes]
    assert len(set(names)) == len(names)
    assert names[: env.n_agents] == env.group_map["agent"]
    half = env.stage().half_size
    assert all(abs(s.x) < half[0] and abs(s.y) < half[1] for s in shapes if s.visible)


@pytest.mark.parametrize(
    "name, kwargs, words",
    [
        ("lbf-8x8-2p", {}, "unknown foraging task 'lbf-8x8-2p'; did you mean"),
        ("Foraging-grid-8x8-2p-2f-v3", {}, "which foraging lacks; install the original package"),
        ("lbf-8x8-2p-2f", {"sigth": 2}, "sight"),
        ("lbf-8x8-2p-2f", {"force_coop": "yes"}, "expected"),
        ("lbf-8x8-2p-2f", {"min_player_level": [1, 2, 3]}, "or a list of 2"),
        ("lbf-8x8-2p-2f", {"min_player_level": 3}, "expected at most"),
        ("lbf-8x8-2p-2f", {"min_food_level": 3}, "min_food_level is .*expected at most 2"),
        ("lbf-2x8-2p-2f", {}, "field_size is 2, expected 3 or more"),
        ("lbf-3x3-9p-1f", {}, "9 players do not fit"),
        ("lbf-8x8-2p-37f", {}, "max_num_food is 37, expected a whole number up to 36"),
        ("lbf-8x8-2p-2f", {"max_num_food": 2.5}, "max_num_food is 2.5, expected a whole number"),
        ("lbf-8x8-2p-2f", {"field_size": 5}, "field_size is 5, expected height and width"),
        ("rware-tiny-2ag", {"reward_type": "own"}, "expected one of individual"),
        ("rware-tiny-1ag-hard", {}, "request_queue_size is 0"),
        ("rware-1x4-2h-2ag-1req-indiv", {}, "expected an odd number"),
        ("rware-1x3-1h-60ag-1req-indiv", {}, "60 robots do not fit"),
    ],
)
def test_invalid_arguments_are_refused(name, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        make_env(f"foraging/{name}", num_envs=1, **kwargs)


def test_task_names_of_the_original_packages_are_accepted():
    for ours, theirs in (
        ("lbf-2s-8x8-2p-2f-coop", "Foraging-2s-8x8-2p-2f-coop-v3"),
        ("rware-small-4ag-easy", "rware-small-4ag-easy-v2"),
    ):
        assert read_task(ours) == read_task(theirs)


def test_arguments_match_the_registered_original_tasks():
    gymnasium = pytest.importorskip("gymnasium")
    pytest.importorskip("lbforaging")
    pytest.importorskip("rware")
    renamed = {"max_episode_steps", "max_steps", "msg_bits", "max_inactivity_steps", "reward_type"}
    fixed = {"min_player_level": 1, "max_player_level": 2, "min_food_level": 1}
    fixed |= {"max_food_level": None, "grid_observation": False, "penalty": 0.0}
    names = ["Foraging-8x8-2p-2f-coop-v3", "Foraging-15x15-3p-4f-v3", "Foraging-2s-9x9-4p-1f-v3"]
    names += ["rware-tiny-2ag-v2", "rware-small-5ag-hard-v2", "rware-large-3ag-easy-v2"]
    for name in names:
        theirs = dict(gymnasium.spec(name).kwargs)
        ours = {**(fixed if name.startswith("F") else {}), **read_task(name)[1]}
        if "sight" in ours and ours["sight"] is None:
            ours["sight"] = ours["field_size"][0]
        kept = theirs.keys() - renamed
        assert {key: ours[key] for key in kept} == {key: theirs[key] for key in kept}
