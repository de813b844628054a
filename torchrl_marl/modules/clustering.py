"""Clustering of agents by behavior, from transitions before training (SePS).

Shapes: M transitions, N agents, O observation features, A action features, L latent features,
K clusters.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_marl.errors import ConfigError, NonFiniteError

__all__ = ["cluster_agents"]

HIDDEN = 64
BATCH = 256
RESTARTS = 16


def cluster_agents(
    observation: Tensor,
    action: Tensor,
    next_observation: Tensor,
    reward: Tensor,
    n_clusters: int,
    *,
    mask: Tensor | None = None,
    observation_mask: Tensor | None = None,
    seed: int = 0,
    latent: int = 4,
    steps: int = 1000,
) -> tuple[int, ...]:
    """Returns the cluster of each agent; agents with the same dynamics and rewards share a cluster.

    An encoder maps each agent's index to a Gaussian over latents. A decoder predicts the next
    observation and the reward from the latent, the observation and the action. Encoder and decoder
    are trained on the evidence lower bound, which separates agents whose actions have different
    effects. Then k-means finds the clusters.

    Reference: Christianos et al., 2021, https://arxiv.org/abs/2102.07475.
    Differs from the paper: k-means compares the decoder's predictions for the same observations
    and actions, not the latent means, since two latents can stand for one behavior (z and -z
    often do). One decoder predicts the *change* of the observation and the reward. All data are
    standardized first.

    Args:
        observation (Tensor): observations of the agents.
        action (Tensor): actions of the agents; discrete actions one-hot.
        next_observation (Tensor): next observations of the agents.
        reward (Tensor): rewards of the agents.
        n_clusters (int): number K of clusters.
        mask (Tensor, optional): mask of living agents; other transitions are left out.
        observation_mask (Tensor, optional): mask of each agent's real features, without padding.
        seed (int): random seed; the global generators are not touched.
        latent (int): size L of the latent.
        steps (int): number of updates. Too few leave different agents in one cluster.

    Shapes:
        - observation, next_observation: ``[M, N, O]``; action: ``[M, N, A]``; reward:
          ``[M, N, 1]``; mask: ``[M, N]``; observation_mask: ``[N, O]``

    Raises:
        ConfigError: more clusters than agents, or an agent without a transition.
        NonFiniteError: NaN or infinity in a transition of a living agent.

    Examples:
        >>> observation = torch.randn(500, 4, 1, generator=torch.Generator().manual_seed(0))
        >>> push = torch.tensor([1.0, -1.0, 1.0, -1.0]).view(4, 1)  # effect of each agent's action
        >>> action = observation.flip(0)
        >>> cluster_agents(observation, action, observation + push * action,
        ...                torch.zeros(500, 4, 1), n_clusters=2, steps=300)
        (0, 1, 0, 1)
    """
    n_agents = observation.shape[1]
    real = None if observation_mask is None else observation_mask.cpu()
    if not 1 <= n_clusters <= n_agents:
        raise ConfigError(f"n_clusters is {n_clusters}, expected 1 to {n_agents}, the agents.")
    alive = observation.new_ones(observation.shape[:2], dtype=torch.bool) if mask is None else mask
    rows = {
        "observation": observation[alive],
        "action": action[alive],
        "next observation": next_observation[alive],
        "reward": reward[alive],
    }
    rows = {name: row.detach().cpu().float() for name, row in rows.items()}
    agent_of_row = torch.arange(n_agents, device=alive.device).expand_as(alive)[alive].cpu()
    decoder_input, target = _decoder_inputs_and_targets(
        rows, None if real is None else real[agent_of_row]
    )
    missing = sorted(set(range(n_agents)) - set(agent_of_row.unique().tolist()))
    if missing:
        raise ConfigError(
            f"agents {missing} lived in none of the {len(observation)} transitions, so their "
            "clusters cannot be found; raise clustering_frames."
        )
    generator = torch.Generator().manual_seed(seed)
    predicted = _train_and_predict(
        decoder_input, target, agent_of_row, real, n_agents, latent, steps, generator
    )
    return _renumber_clusters(_k_means(predicted, n_clusters, generator))


def _decoder_inputs_and_targets(
    rows: dict[str, Tensor], real: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the decoder's inputs and targets, standardized."""
    if real is not None:
        for name in ("observation", "next observation"):
            rows[name] = torch.where(real, rows[name], 0.0)
    for name, row in rows.items():
        if not bool(row.isfinite().all()):
            raise NonFiniteError(f"the {name} of a living agent holds NaN or infinity.")
    change = _standardize(rows["next observation"] - rows["observation"], real)
    decoder_input = torch.cat(
        [_standardize(rows["observation"], real), _standardize(rows["action"])], -1
    )
    return decoder_input, torch.cat([change, _standardize(rows["reward"])], -1)


def _standardize(rows: Tensor, real: Tensor | None = None) -> Tensor:
    """Standardizes each feature over the rows in which it is not padding; 0 at padding."""
    real = torch.ones_like(rows, dtype=torch.bool) if real is None else real
    count = real.sum(0).clamp(min=1)
    centered = torch.where(real, rows - torch.where(real, rows, 0.0).sum(0) / count, 0.0)
    deviation = (centered.square().sum(0) / count).sqrt()
    # A constant feature stays at 0; its rounding errors must not be scaled up.
    return torch.where(deviation > 1e-6, centered / deviation.clamp(min=1e-6), 0.0)


def _train_and_predict(
    decoder_input: Tensor,
    target: Tensor,
    agent_of_row: Tensor,
    observation_mask: Tensor | None,
    n_agents: int,
    latent: int,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """Trains encoder and decoder; returns the decoder's predictions for each agent, ``[N, *]``."""
    # All agents start equal; noise as wide as the prior's would hide their differences for long.
    mean, log_std = torch.zeros(n_agents, latent), torch.full((n_agents, latent), -2.0)
    decoder = _make_decoder(
        [decoder_input.shape[1] + latent, HIDDEN, HIDDEN, target.shape[1]], generator
    )
    parameters = [p.requires_grad_() for p in (mean, log_std, *decoder)]
    optimizer = torch.optim.Adam(
        [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:], "lr": 3e-3}]
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    real = torch.ones(n_agents, target.shape[1], dtype=torch.bool)
    if observation_mask is not None:
        real[:, : observation_mask.shape[1]] = observation_mask
    per_agent = len(agent_of_row) / n_agents
    with torch.enable_grad():
        for _ in range(steps):
            rows = torch.randint(len(agent_of_row), (BATCH,), generator=generator)
            agent = agent_of_row[rows]
            noise = torch.randn(BATCH, latent, generator=generator)
            code = mean[agent] + log_std[agent].exp() * noise
            error = _decode(decoder, torch.cat([decoder_input[rows], code], -1)) - target[rows]
            likelihood = -0.5 * torch.where(real[agent], error, 0.0).square().sum(-1).mean()
            # The bound has one divergence per agent, and a likelihood per transition.
            divergence = 0.5 * (mean**2 + (2 * log_std).exp() - 2 * log_std - 1).sum(-1).mean()
            optimizer.zero_grad()
            (divergence / per_agent - likelihood).backward()
            optimizer.step()
            schedule.step()
        # The same observations and actions for all.
        rows = torch.randint(len(agent_of_row), (BATCH,), generator=generator)
        probe = decoder_input[rows].expand(n_agents, -1, -1)
        code = mean.unsqueeze(1).expand(-1, BATCH, -1)
        predicted = _decode(decoder, torch.cat([probe, code], -1))
    return torch.where(real.unsqueeze(1), predicted, 0.0).flatten(1).detach()


def _make_decoder(widths: list[int], generator: torch.Generator) -> list[Tensor]:
    """Returns weight, bias, weight, ... from ``generator``; modules use the global generator."""
    tensors: list[Tensor] = []
    for fan_in, fan_out in zip(widths, widths[1:]):
        tensors.append(torch.randn(fan_out, fan_in, generator=generator) / math.sqrt(fan_in))
        tensors.append(torch.zeros(fan_out))
    return tensors


def _decode(decoder: list[Tensor], rows: Tensor) -> Tensor:
    *hidden, weight, bias = decoder
    for w, b in zip(hidden[::2], hidden[1::2]):
        rows = torch.tanh(torch.nn.functional.linear(rows, w, b))
    return torch.nn.functional.linear(rows, weight, bias)


def _k_means(points: Tensor, n_clusters: int, generator: torch.Generator) -> list[int]:
    """Returns the cluster of each point, by the best of several k-means runs (k-means++).

    An empty cluster keeps its center.
    """
    lowest_cost, labels = math.inf, torch.zeros(len(points), dtype=torch.long)
    for _ in range(RESTARTS):
        centers = _sample_distant_centers(points, n_clusters, generator)
        for _ in range(100):
            nearest_center = torch.cdist(points, centers).argmin(1)
            members = torch.nn.functional.one_hot(nearest_center, n_clusters).to(points.dtype)
            count = members.sum(0).unsqueeze(-1)
            new_centers = torch.where(count > 0, members.mT @ points / count.clamp(min=1), centers)
            if torch.equal(new_centers, centers):
                break
            centers = new_centers
        cost = float((points - centers[nearest_center]).square().sum())
        if cost < lowest_cost:
            lowest_cost, labels = cost, nearest_center
    return labels.tolist()


def _sample_distant_centers(points: Tensor, n_clusters: int, generator: torch.Generator) -> Tensor:
    """Samples initial centers, in proportion to the squared distance from earlier ones."""
    chosen = [int(torch.randint(len(points), (1,), generator=generator))]
    while len(chosen) < n_clusters:
        weight = torch.cdist(points, points[chosen]).amin(1).square()
        weight = weight if float(weight.sum()) > 0 else torch.ones_like(weight)
        chosen.append(int(torch.multinomial(weight, 1, generator=generator)))
    return points[chosen]


def _renumber_clusters(labels: list[int]) -> tuple[int, ...]:
    """Renumbers clusters in order of first appearance: ``[2, 0, 2]`` becomes ``(0, 1, 0)``."""
    names: dict[int, int] = {}
    return tuple(names.setdefault(label, len(names)) for label in labels)
