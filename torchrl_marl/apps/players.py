"""Results of cross-play (payoffs, Nash averages and ratings) as text, CSV and plots.

Shapes: A players.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_marl.apps.console import align_columns
from torchrl_marl.apps.pictures.drawing import check_matplotlib, new_figure, save_figure
from torchrl_marl.errors import ConfigError
from torchrl_marl.games import Ratings, bradley_terry, nash_average
from torchrl_marl.training.crossplay import partner_score
from torchrl_marl.training.files import explain_write_errors, open_atomically
from torchrl_marl.training.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "Standing",
    "evenly",
    "format_mean",
    "heat_map",
    "rating_curve",
    "standing",
    "standing_text",
    "write_table",
]


_RESAMPLES = 400  # of the games, for the interval of the Nash average


class Standing(NamedTuple):
    """Ratings, win rates, payoffs and Nash average of opponents.

    Args:
        ratings (Ratings): ratings computed from the games won, ``[A]``.
        won (Tensor): win rate of the row's player, where a draw counts half, ``[A, A]``.
        earned (Tensor): payoff of the row's player: half the mean difference of the two returns,
            ``[A, A]``. In a zero-sum environment this is the player's return.
        weight (Tensor): weight of each player in the Nash average of the payoffs, ``[A]``.
        weight_interval (pair of Tensor, optional): bounds of the weight's 95 % interval, ``[A]``
            each: percentiles over resamples of the games; None if any entry is a single game.
    """

    ratings: Ratings
    won: Tensor
    earned: Tensor
    weight: Tensor
    weight_interval: tuple[Tensor, Tensor] | None = None


def standing(table: TensorDictBase) -> Standing | None:
    """Computes ratings, payoffs and Nash average of opponents.

    Returns None for partners, and for a single player, which has no opponent.

    Args:
        table (TensorDictBase): result of :func:`~torchrl_marl.training.cross_play` with the same
            players on both sides; each pair plays with both assignments of sides.

    Shapes:
        - table: ``[A, A]``

    Raises:
        ConfigError: the two sides have different numbers of players.
    """
    if table.shape[0] != table.shape[1]:
        raise ConfigError(
            f"the table has shape {list(table.shape)}, expected the same players on both sides."
        )
    wins, draws, games = (table[key].double() for key in ("wins", "draws", "games"))
    if len(table) < 2 or bool((draws == games).all()):
        return None
    # A player's wins: its wins as the row's player, and the losses of others against it.
    wins, draws = wins + (games - wins - draws).mT, draws + draws.mT
    won = (wins + draws / 2) / (games + games.mT)
    earned = (table["returns"] - table["returns"].mT) / 2
    weight, reach = nash_average(earned)[0], _nash_interval(table, earned)
    return Standing(bradley_terry(wins, draws), won, earned, weight, reach)


def _nash_interval(table: TensorDictBase, earned: Tensor) -> tuple[Tensor, Tensor] | None:
    """Returns the bounds of the Nash average's interval, ``[A]`` each.

    Each payoff is resampled from a normal distribution with the mean and standard error of its
    entry. The random seed is fixed.
    """
    error = table.get("error", None)
    if error is None:
        return None
    error = ((error**2 + error.mT**2).sqrt() / 2).fill_diagonal_(0.0)
    if not bool(error.isfinite().all()):
        return None
    random = torch.Generator().manual_seed(0)
    draws = torch.randn(_RESAMPLES, *earned.shape, dtype=torch.float64, generator=random)
    noise = (draws * error).triu()
    weights = torch.stack([nash_average(earned + own - own.mT)[0] for own in noise])
    low, high = weights.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    return low, high


PARTNERS = "return with"
"""Heading of the names where two players form a team."""


def standing_text(
    names: Sequence[str],
    table: TensorDictBase,
    ranking: Standing | None,
    heading: str = PARTNERS,
) -> str:
    """Formats the results of cross-play: opponents as a ranking, partners as a matrix.

    Args:
        names (sequence of str): names of the players.
        table (TensorDictBase): result of cross-play, ``[A, A]``.
        ranking (Standing, optional): standing of opponents.
        heading (str): heading of the column of names, for partners. By default a last line has the
            mean returns of self-play and cross-play, with intervals over the players.
    """
    if ranking is None:
        means = _partner_sentence(table["returns"]) if heading == PARTNERS else []
        return "\n\n".join([_matrix_text(names, table["returns"], heading), *means])
    low, high = ranking.ratings.interval()
    others = ~torch.eye(len(names), dtype=torch.bool)
    earned, won = (_masked_row_mean(values, others) for values in (ranking.earned, ranking.won))
    order = earned.argsort(descending=True).tolist()
    known = ranking.weight_interval
    rows = [["player", "earned", "Nash average", *["95 %"] * bool(known), "won", "rating", "95 %"]]
    for i in order:
        weight = [f"{ranking.weight[i]:.2f}"]
        weight += [] if known is None else [f"{known[0][i]:.2f} to {known[1][i]:.2f}"]
        rated = f"{ranking.ratings.rating[i]:+.0f}", f"{low[i]:+.0f} to {high[i]:+.0f}"
        rows.append([names[i], f"{earned[i]:+.3f}", *weight, f"{won[i]:.3f}", *rated])
    ranked, values = [names[i] for i in order], ranking.earned[order][:, order]
    return f"{align_columns(rows, slice(1, None))}\n\n{_matrix_text(ranked, values, 'earned from')}"


def _partner_sentence(returns: Tensor) -> list[str]:
    """Returns a sentence with the mean returns of self-play and cross-play; none for one player."""
    if len(returns) < 2:
        return []
    alone, others = (format_mean(one) for one in partner_score(returns))
    return [f"with itself {alone}, with others {others}"]


def format_mean(estimate: Estimate) -> str:
    """Formats a mean return with its 95 % interval, if it has one."""
    interval = f" ({estimate.low:.2f} to {estimate.high:.2f})" if estimate.has_interval else ""
    return f"{estimate.value:.2f}{interval}"


def _masked_row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of each row over the entries where the mask is True."""
    return torch.where(mask, values, 0.0).sum(1) / mask.sum(1)


def _matrix_text(names: Sequence[str], values: Tensor, heading: str) -> str:
    numbers = [str(i + 1) for i in range(values.shape[1])]
    rows = [[heading, *numbers]]
    for i, own in enumerate(values.tolist()):
        rows.append([f"{i + 1} {names[i]}", *(f"{x:.2f}" for x in own)])
    return align_columns(rows, slice(1, None))


def write_table(
    folder: Path, names: Sequence[str], table: TensorDictBase, ranking: Standing | None
) -> list[Path]:
    """Writes ``crossplay.csv`` with a row for each pair; for opponents, also ``ratings.csv``.

    Raises:
        WriteError: the disk is full, or the folder is read-only.
    """
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    head = ["player", "other", "games", "wins", "draws", "return_mean"]
    rows: list[list[Any]] = []
    for i, own in enumerate(names):
        for j, other in enumerate(names):
            entry = table[i, j]
            counts = [int(entry[key]) for key in ("games", "wins", "draws")]
            rows.append([own, other, *counts, float(entry["returns"])])
    paths = [_write_csv(folder / "crossplay.csv", head, rows)]
    if ranking is not None:
        low, high = ranking.ratings.interval()
        columns = [ranking.ratings.rating, ranking.ratings.error, low, high, ranking.weight]
        head = ["player", "rating", "error", "low", "high", "nash_average"]
        if ranking.weight_interval is not None:
            columns += ranking.weight_interval
            head += ["nash_low", "nash_high"]
        rated = [[name, *row] for name, row in zip(names, torch.stack(columns, 1).tolist())]
        paths.append(_write_csv(folder / "ratings.csv", head, rated))
    return paths


def _write_csv(path: Path, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Path:
    with open_atomically(path, newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(rows)
    return path


def heat_map(
    names: Sequence[str],
    table: TensorDictBase,
    found: Standing | None,
    *,
    title: str = "",
    path: Path | None = None,
) -> Figure:
    """Plots the payoffs or returns of all pairs as a heat map.

    Args:
        names (sequence of str): names of the players.
        table (TensorDictBase): result of cross-play, ``[A, A]``.
        found (Standing, optional): standing of opponents; the labels then show the Nash average.

    Keyword Args:
        title (str): title of the plot, such as the environment's name.
        path (Path, optional): file to write.

    Raises:
        MissingExtraError: matplotlib is not installed.
        WriteError: the picture cannot be written.
    """
    check_matplotlib()
    values = table["returns"] if found is None else found.earned
    size = 2.5 + 0.7 * len(names)
    figure = new_figure(size + 1.5, size)
    axes = figure.add_subplot()
    options: dict[str, Any] = {"cmap": "viridis"}
    if found is not None:
        most = max(values.abs().max().item(), 1e-6)
        options = {"cmap": "RdBu", "vmin": -most, "vmax": most}
    image = axes.imshow(values.numpy(), **options)
    names = [name.encode(errors="backslashreplace").decode() for name in names]  # of any folders
    labels = names
    if found is not None:
        labels = [f"{name}  ({w:.2f})" for name, w in zip(names, found.weight.tolist())]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), labels)
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set_parse_math(False)
    for i, row in enumerate(values.tolist()):
        for j, value in enumerate(row):
            dark = sum(image.to_rgba(value)[:3]) < 1.4  # white is 3
            color = "white" if dark else "black"
            axes.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8.5, color=color)
    what = "earned by the row (its Nash average)" if found else "return, as rows of the table"
    figure.colorbar(image, label=what, shrink=0.8)
    axes.set_title(title)
    if path is not None:
        save_figure(figure, path)
    return figure


def evenly(players: Sequence[Any], n: int) -> list[Any]:
    """Returns at most n items of a list, evenly spaced, from the last one back to the first.

    Examples:
        >>> evenly(range(10), 4), evenly(range(10), 1)
        ([0, 3, 6, 9], [9])
    """
    if n >= len(players):
        return list(players)
    places = torch.linspace(len(players) - 1, 0, n).round().long().flip(0).tolist()
    return [players[i] for i in places]


def rating_curve(
    frames: Mapping[int, int], found: Standing | TensorDictBase, *, path: Path | None = None
) -> Path | Figure:
    """Plots the ratings or mean returns of a run's stored players over frames.

    Args:
        frames (mapping): index in the table -> frames at which that player was stored.
        found (Standing or TensorDictBase): a standing, whose ratings and intervals are plotted; or
            a table of partners or of asymmetric sides, whose mean returns are plotted.

    Keyword Args:
        path (Path, optional): file to write; the function then returns this path.

    Raises:
        MissingExtraError: matplotlib is not installed.
        WriteError: the picture cannot be written.
    """
    check_matplotlib()
    figure = new_figure(6, 3.6)
    axes = figure.add_subplot()
    order = sorted(frames, key=frames.__getitem__)
    x = [frames[i] for i in order]
    if isinstance(found, Standing):
        low, high = (bound[order] for bound in found.ratings.interval())
        axes.fill_between(x, low.tolist(), high.tolist(), alpha=0.25, linewidth=0)
        axes.plot(x, found.ratings.rating[order].tolist(), marker="o", markersize=3)
        axes.set_ylabel("rating (95 %)")
    else:
        others = ~torch.eye(len(found), dtype=torch.bool)
        mean = _masked_row_mean(found["returns"], others)
        axes.plot(x, mean[order].tolist(), marker="o", markersize=3)
        axes.set_ylabel("mean return, as rows of the table")
    axes.set_xlabel("frames")
    axes.grid(alpha=0.3)
    if path is None:
        return figure
    save_figure(figure, path)
    return path
