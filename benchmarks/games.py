"""Agreement of equilibria, ratings and rankings with OpenSpiel's.

    pip install open_spiel cvxpy nashpy scipy
    python benchmarks/games.py --write --store

Reports the largest difference of each function over random games, and of NashConv for briefly
trained policies, evaluated on OpenSpiel's own states. ``--store`` writes OpenSpiel's results for a
few games as test data.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import itertools
import json
import tempfile
import time
import unittest.mock
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from tensordict import TensorDict

import torchrl_marl
from torchrl_marl import games
from torchrl_marl.collectors import TeamPolicy
from torchrl_marl.envs.toy import Kuhn, Leduc
from torchrl_marl.envs.toy.leduc import information_sets, seen
from torchrl_marl.modules import make_actor
from torchrl_marl.training import cross_play

STORED = 6
FOLDER = Path(__file__).parent.parent / "test" / "games"


def draw(rng: np.random.Generator, antisymmetric: bool = False) -> np.ndarray:
    """A payoff matrix: every second one of few whole numbers, with many ties."""
    rows, columns = rng.integers(2, 8, 2)
    columns = rows if antisymmetric else columns
    payoff = rng.normal(size=(rows, columns))
    if rng.random() < 0.5:
        payoff = rng.integers(-4, 5, (rows, columns)).astype(float)
    return payoff - payoff.T if antisymmetric else payoff


def nash_average(rng: np.random.Generator) -> tuple[Any, Any]:
    from open_spiel.python.algorithms import nash_averaging

    # Its solver's own tolerance leaves the fourth digit open.
    problem = nash_averaging.cp.Problem
    exact = {f"tol_{tolerance}": 1e-15 for tolerance in ("gap_abs", "gap_rel", "feas")}
    solve = functools.partialmethod(problem.solve, solver="CLARABEL", **exact)
    tight = type("Problem", (problem,), {"solve": solve})
    payoff = draw(rng, antisymmetric=True)
    with unittest.mock.patch.object(nash_averaging.cp, "Problem", tight), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the answer may be inaccurate
        found = nash_averaging._max_entropy_symmetric_nash(payoff, eps=0.0)
    return {"payoff": payoff}, found.ravel()


def nash(rng: np.random.Generator) -> tuple[Any, Any]:
    """Games of normal numbers have one equilibrium."""
    from open_spiel.python.algorithms.matrix_nash import lemke_howson_solve

    payoff = rng.normal(size=rng.integers(2, 8, 2))
    for row, column in lemke_howson_solve(payoff, -payoff):
        # It mixes up the columns in some of its answers.
        if (payoff @ column).max() - (row @ payoff).min() < 1e-9:
            return {"payoff": payoff}, np.concatenate([row, column, [row @ payoff @ column]])
    return nash(rng)


def alpha_rank(rng: np.random.Generator) -> tuple[Any, Any]:
    from open_spiel.python.egt import alpharank

    n = rng.integers(2, 8)
    payoff, alpha = rng.normal(size=(n, n)), float(rng.choice([0.1, 1.0, 3.0]))
    found = alpharank.compute([payoff], m=20, alpha=alpha, use_local_selection_model=False)[2]
    return {"payoff": payoff, "alpha": alpha, "population": 20}, found


def elo(rng: np.random.Generator) -> tuple[Any, Any]:
    from open_spiel.python.algorithms.elo import compute_ratings_from_matrices

    n = rng.integers(2, 8)
    wins, draws = rng.integers(1, 30, (n, n)), np.triu(rng.integers(0, 10, (n, n)), 1)
    np.fill_diagonal(wins, 0)
    draws = draws + draws.T
    options = {"smoothing_factor": 0.0, "max_iterations": 10**6, "convergence_delta": 1e-14}
    found = compute_ratings_from_matrices(wins, draws, **options)
    return {"wins": wins, "draws": draws}, found - found.mean()


def exploitability(rng: np.random.Generator) -> tuple[Any, Any]:
    import pyspiel
    from open_spiel.python import policy
    from open_spiel.python.algorithms import exploitability

    payoff = draw(rng)
    row, column = (rng.dirichlet(np.ones(size)) for size in payoff.shape)
    game = pyspiel.create_matrix_game(payoff.tolist(), (-payoff).tolist())
    game = pyspiel.convert_to_turn_based(game)
    mixed = policy.TabularPolicy(game)
    for state, probabilities in zip(mixed.states, (row, column)):
        chosen = mixed.policy_for_key(state.information_state_string())
        chosen[:] = 0  # of as many actions as the larger side has
        chosen[: len(probabilities)] = probabilities
    found = exploitability.exploitability(game, mixed)
    return {"payoff": payoff, "row": row, "column": column}, np.array([found])


def kuhn_nash_conv(rng: np.random.Generator) -> tuple[Any, Any]:
    """Kuhn poker: bets by player, card and place, uniform in [0, 1]."""
    import pyspiel
    from open_spiel.python import policy
    from open_spiel.python.algorithms import exploitability

    game, bets = pyspiel.load_game("kuhn_poker"), rng.random((2, 3, 2))
    mixed = policy.TabularPolicy(game)
    for player, places in enumerate((("", "pb"), ("p", "b"))):
        for card, place in itertools.product(range(3), range(2)):
            bet = bets[player, card, place]
            mixed.policy_for_key(f"{card}{places[place]}")[:] = [1 - bet, bet]
    return {"policy": bets}, np.array([exploitability.nash_conv(game, mixed)])


@functools.cache
def leduc_states() -> list[tuple[Any, int, int]]:
    """OpenSpiel's states of Leduc poker, with the player and the number of the information set."""
    import pyspiel
    from open_spiel.python import policy

    rows, places = information_sets()[0], Leduc(1).places
    observations = [seen(places, *rows[player].unbind(-1), player) for player in range(2)]
    found = []
    for state in policy.TabularPolicy(pyspiel.load_game("leduc_poker")).states:
        player = state.current_player()
        openspiel_observation = torch.tensor(state.information_state_tensor(player))
        [number] = (
            (observations[player] == openspiel_observation).all(-1).nonzero().flatten().tolist()
        )
        found.append((state, player, number))
    return found


def openspiel_leduc_nash_conv(table: np.ndarray) -> float:
    """OpenSpiel's NashConv of probabilities by player, information set and action."""
    import pyspiel
    from open_spiel.python import policy
    from open_spiel.python.algorithms import exploitability

    game = pyspiel.load_game("leduc_poker")
    mixed = policy.TabularPolicy(game)
    for state, player, number in leduc_states():
        mixed.policy_for_key(state.information_state_string())[:] = table[player, number]
    return exploitability.nash_conv(game, mixed)


def leduc_nash_conv(rng: np.random.Generator) -> tuple[Any, Any]:
    """Leduc poker: actions uniform among those that are legal."""
    table = rng.random((2, 468, 3)) * Leduc(1).game.legal.numpy()
    table /= table.sum(-1, keepdims=True)
    return {"policy": table}, np.array([openspiel_leduc_nash_conv(table)])


OURS: dict[str, Callable[..., torch.Tensor]] = {
    "nash_average": lambda **given: games.nash_average(**given)[0],
    "nash": lambda **given: torch.cat([x.reshape(-1) for x in games.nash(**given)]),
    "alpha_rank": games.alpha_rank,
    "elo": lambda **given: games.bradley_terry(**given, prior=0.0).rating,
    "exploitability": lambda **given: games.exploitability(**given).view(1),
    "kuhn_nash_conv": lambda policy: torch.tensor([Kuhn(1).nash_conv(policy)], dtype=torch.float64),
    "leduc_nash_conv": lambda policy: torch.tensor(
        [Leduc(1).nash_conv(policy)], dtype=torch.float64
    ),
}
_THEIRS = (nash_average, nash, alpha_rank, elo, exploitability, kuhn_nash_conv, leduc_nash_conv)
THEIRS = {f.__name__: f for f in _THEIRS}


def to_tensors(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.as_tensor(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}


def compare(name: str, n_games: int) -> tuple[list[str], list[dict[str, Any]]]:
    rng, worst, spent, cases = np.random.default_rng(0), 0.0, 0.0, []
    for i in range(n_games):
        arguments, theirs = THEIRS[name](rng)
        began = time.perf_counter()
        ours = OURS[name](**to_tensors(arguments)).numpy()
        spent += time.perf_counter() - began
        worst = max(worst, np.abs(ours - theirs).max())
        if i < STORED:
            plain = {
                k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in arguments.items()
            }
            cases.append({"given": plain, "answer": theirs.tolist()})
    return [name, str(n_games), f"{worst:.1e}", f"{spent / n_games * 1e3:.1f}"], cases


def probabilities_of_states(
    policy: Any, rows: list[tuple[torch.Tensor, list[int]]], seat: int
) -> torch.Tensor:
    """A trained actor's probabilities ``[states, A]`` where a player sees and may do this."""
    [joined] = policy
    acts, blank = joined.group.sources[seat], joined.group.sources[1 - seat]
    n_actions = acts.n_actions
    observed = torch.stack([observation_of_row for observation_of_row, _ in rows]).unsqueeze(1)
    legal = torch.stack([torch.tensor([a in may for a in range(n_actions)]) for _, may in rows])
    group = {
        "observation": observed,
        "mask": torch.ones(len(rows), 1, dtype=torch.bool),
        "action_mask": legal.unsqueeze(1),
    }
    if acts.action_mask_key is None:
        del group["action_mask"]
    data = TensorDict({g.name: TensorDict(dict(group), [len(rows), 1]) for g in (acts, blank)})
    data.batch_size = [len(rows)]
    with torch.no_grad():
        probs = joined.actor.get_dist(joined.group.gather(data)).probs
    return probs[:, seat].double()


RECIPES = {"kuhn": "toy_kuhn_ippo", "leduc": "toy_leduc_mappo"}


def train_and_compare(game: str, frames: int, seed: int) -> list[str]:
    """NashConv of a policy trained for some frames, ours and OpenSpiel's."""
    import pyspiel
    from open_spiel.python import policy
    from open_spiel.python.algorithms import exploitability

    openspiel_game = pyspiel.load_game(f"{game}_poker")
    with tempfile.TemporaryDirectory() as folder:
        options = {"folder": f"{folder}/run", "total_frames": frames, "seed": seed}
        quiet = {"progress": False}
        run = torchrl_marl.train(RECIPES[game], execution="eager", logging=quiet, **options)
    env = {"kuhn": Kuhn, "leduc": Leduc}[game](1)
    mixed = policy.TabularPolicy(openspiel_game)
    for seat in range(2):
        states = [state for state in mixed.states if state.current_player() == seat]
        observe = {"kuhn": kuhn_observation, "leduc": leduc_observation}[game]
        rows = [(observe(state, seat), state.legal_actions()) for state in states]
        for state, probabilities in zip(states, probabilities_of_states(run.policy, rows, seat)):
            mixed.policy_for_key(state.information_state_string())[:] = probabilities.tolist()
    ours, expected = env.nash_conv(run.policy), exploitability.nash_conv(openspiel_game, mixed)
    return [f"{game}, seed {seed}", f"{frames:,}", f"{ours:.7f}", f"{abs(ours - expected):.1e}"]


def leduc_observation(state: Any, seat: int) -> torch.Tensor:
    return torch.tensor(state.information_state_tensor(seat))


def kuhn_observation(state: Any, seat: int) -> torch.Tensor:
    """Own card, what was said, and the seat."""
    card, bets = state.information_state_string()[0], state.information_state_string()[1:]
    observation = torch.zeros(8)
    observation[[int(card), 3 + ("", "p", "b", "pb").index(bets)]], observation[7] = (
        1.0,
        float(seat),
    )
    return observation


def interval_coverage(draws: int) -> list[str]:
    """How often 95 % intervals hold the ratings of eight players of known strengths."""
    generator, n_games = torch.Generator().manual_seed(0), 40
    strengths = torch.linspace(-300, 300, 8, dtype=torch.float64)
    win_probability = 1 / (1 + 10 ** ((strengths - strengths.unsqueeze(1)) / 400))
    truth_in_interval = []
    for _ in range(draws):
        wins = torch.binomial(
            torch.full_like(win_probability, n_games), win_probability, generator=generator
        )
        wins = wins.triu(1) + (n_games - wins.triu(1)).mT.tril(-1)
        low, high = games.bradley_terry(wins).interval()
        truth_in_interval.append((low <= strengths) & (strengths <= high))
    share = torch.stack(truth_in_interval).double().mean().item()
    return ["8", str(n_games), str(draws), f"{100 * share:.1f} %"]


def time_kuhn_table(n_players: int, episodes: int) -> list[str]:
    """Seconds of a table of untrained players, 64-64 each, in 1,000 envs."""
    env = Kuhn(1000, seed=0)
    groups = env.team.groups.values()
    players = [TeamPolicy(make_actor(group) for group in groups) for _ in range(n_players)]
    began = time.perf_counter()
    table = cross_play(players, players, env, episodes)
    spent = time.perf_counter() - began
    return [f"{n_players} x {n_players}", f"{int(table['games'].sum()):,}", f"{spent:.1f}"]


HEADER = ("function", "games", "largest difference", "ms a game")
PLAYED = ("players", "games", "seconds")
TRAINED = ("game", "frames", "NashConv", "difference from OpenSpiel's")
COVERED = ("players", "games a pair", "draws", "strengths inside")


def main() -> None:
    """Compares and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", type=int, default=100, help="random games for each function")
    parser.add_argument("--quick", action="store_true", help="six games, as a smoke test")
    parser.add_argument("--store", action="store_true", help="write the data of the tests")
    parser.add_argument("--write", action="store_true", help="write the table to results")
    args = parser.parse_args()
    report.be_quiet()
    n_games = STORED if args.quick else args.games
    found = {name: compare(name, n_games) for name in OURS}
    rows = [row for row, _ in found.values()]
    torch.set_num_threads(1)
    played = [time_kuhn_table(4, 8)] if args.quick else [time_kuhn_table(16, 64)]
    lengths = {"kuhn": 16384, "leduc": 32768} if args.quick else {"kuhn": 65536, "leduc": 131072}
    seeds = range(1) if args.quick else range(3)
    learned = [train_and_compare(game, lengths[game], seed) for game in lengths for seed in seeds]
    report.publish(
        "games",
        "Equilibria, ratings and rankings against OpenSpiel's",
        [
            ("Largest difference over random games", report.markdown_table(HEADER, rows)),
            ("NashConv of trained policies", report.markdown_table(TRAINED, learned)),
            ("95 % intervals of ratings", report.markdown_table(COVERED, [interval_coverage(200)])),
            ("Cross-play in Kuhn poker", report.markdown_table(PLAYED, played)),
        ],
        {"OpenSpiel": importlib.metadata.version("open_spiel")},
        """Payoffs are normal, or whole numbers with many ties. nash_average: OpenSpiel's solver,
        its tolerances set to 1e-15, still lets payoffs pass the value by up to 5e-10; the largest
        differences are there. nash: of Lemke-Howson's answers the first that is an equilibrium
        to 1e-9. elo: Bradley-Terry ratings without smoothing or prior. kuhn_nash_conv: uniform bets
        by player, card and place; leduc_nash_conv: uniform weights of all legal actions. Trained
        policies: ours by one call of the policy, actions drawn; OpenSpiel's by its own walk
        through the game, with the actor's probabilities in each of its states. Cross-play: actors
        of 64-64 units, 1,000 games at once, one thread of torch.""",
        write=args.write and not args.quick,
    )
    if args.store:
        kept = {n: cases for n, (_, cases) in found.items() if not n.endswith("_nash_conv")}
        text = json.dumps(kept)
        (FOLDER / "openspiel.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
