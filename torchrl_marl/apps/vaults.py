"""Reads vaults, the datasets of OG-MARL, as steps of whole episodes.

Shapes: V rows of a vault, T steps of a row, N agents, S steps of all episodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_marl.errors import DatasetError, MissingExtraError, quoted
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["is_vault", "read_vault"]

_METADATA_FILE = "metadata.json"
_REQUIRED_ARRAYS = ("observations", "actions", "rewards", "terminals")


def is_vault(folder: str | Path) -> bool:
    """Returns whether a folder holds a vault, as flashbax writes them.

    Examples:
        >>> is_vault("nowhere")
        False
    """
    return (Path(folder) / _METADATA_FILE).is_file() and (Path(folder) / "manifest.ocdbt").is_file()


def read_vault(folder: str | Path, team: TeamSpec) -> TensorDictBase:
    """Reads the whole episodes of a vault, in the layout of an environment's batches, ``[S]``.

    A vault has no observation after the last step of an episode. Its place is taken by the one
    before, so that the value after a time limit is slightly wrong. Steps after the last end of an
    episode are left out.

    Args:
        folder (str or Path): folder of the vault, such as ``2s3z.vlt/Good``.
        team (TeamSpec): the groups of the environment; it has one group.

    Keys:
        - writes: observation, action, masks, state; reward and done flags under ``"next"``

    Raises:
        MissingExtraError: tensorstore is not installed.
        DatasetError: several groups, no whole episode, or entries that are missing or do not fit
            the group.

    Reference: Formanek et al., 2023, https://arxiv.org/abs/2302.00521 (OG-MARL).
    """
    folder = Path(folder)
    if len(team.groups) != 1:
        raise DatasetError(
            f"vault {quoted(str(folder))} has one group of agents, but the environment has "
            f"{len(team.groups)}; use an environment of one group, or env.group_map."
        )
    (group,) = team.groups.values()
    found = _read_arrays(folder)
    missing = [name for name in _REQUIRED_ARRAYS if name not in found]
    if missing:
        raise DatasetError(
            f"vault {quoted(str(folder))} has no {missing[0]!r}, expected "
            f"{', '.join(_REQUIRED_ARRAYS)}; it has {', '.join(sorted(found))}."
        )
    steps = torch.cat([_episode_steps(row, group, team) for row in _iterate_rows(found)])
    if not len(steps):
        raise DatasetError(
            f"vault {quoted(str(folder))} has no whole episode: no step in which 'terminals' or "
            "'truncations' are set for all agents; download it again."
        )
    return steps


def _read_arrays(folder: Path) -> dict[str, Tensor]:
    """Returns the entries of a vault by dotted name, ``[V, T, ...]``."""
    try:
        import tensorstore
    except ImportError:
        raise MissingExtraError("tensorstore", "vault") from None
    base = f"file://{folder.absolute()}"

    def opened(name: str) -> Any:
        store = {"driver": "ocdbt", "base": base, "path": name}
        return tensorstore.open({"driver": "zarr", "kvstore": store}).result()

    try:
        about = json.loads((folder / _METADATA_FILE).read_text(encoding="utf-8"))
        length = int(opened("vault_index").read().result()[0])
        names = list(_array_names(about["structure_shape"]))
        return {
            name: torch.as_tensor(opened(f"{name}.")[:, :length].read().result()) for name in names
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise DatasetError(
            f"vault {quoted(str(folder))} cannot be read ({why}); download it again."
        ) from error


def _array_names(structure: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for name, value in structure.items():
        if isinstance(value, Mapping):
            yield from _array_names(value, f"{at}{name}.")
        else:
            yield f"{at}{name}"


def _iterate_rows(found: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for i in range(len(found["actions"])):
        yield {name: value[i] for name, value in found.items()}


def _episode_steps(row: Mapping[str, Tensor], group: GroupSpec, team: TeamSpec) -> TensorDictBase:
    """Returns the steps of a row up to the last end of an episode, ``[S]``."""
    over = row["terminals"].bool().reshape(len(row["actions"]), -1)
    cut = row.get("truncations", torch.zeros_like(over)).bool().reshape(over.shape)
    terminated, done = over.all(-1, keepdim=True), (over | cut).all(-1, keepdim=True)
    ends = done.flatten().nonzero().flatten()
    n_steps = int(ends[-1]) + 1 if len(ends) else 0
    index = torch.arange(n_steps)
    after = torch.where(done[:n_steps, 0], index, (index + 1).clamp_max(max(0, n_steps - 1)))
    seen = _observed_steps(row, group, team)[:n_steps]
    steps, following = seen.clone(), seen[after]
    steps.set(group.action_key, _convert_action(row["actions"][:n_steps], group, "actions"))
    following.set(group.reward_key, row["rewards"][:n_steps].flatten(1).unsqueeze(-1).float())
    flags = {"terminated": terminated, "truncated": done & ~terminated, "done": done}
    for name, flag in flags.items():
        following.set(name, flag[:n_steps])
        steps.set(name, torch.zeros_like(flag[:n_steps]))
    return steps.set("next", following)


def _observed_steps(row: Mapping[str, Tensor], group: GroupSpec, team: TeamSpec) -> TensorDictBase:
    """Returns observations, masks and the state of each step, ``[T]``."""
    n_steps = len(row["actions"])
    seen = TensorDict({}, [n_steps])
    (key,) = group.observation_keys
    observed = row["observations"].float()
    if observed.shape[1:] != (group.n_agents, group.observation_dim):
        raise DatasetError(
            f"the vault has observations {list(observed.shape[1:])}, expected "
            f"[{group.n_agents}, {group.observation_dim}] as in the environment; use the "
            "environment in which it was recorded."
        )
    seen.set(key, observed)
    if group.mask_key is not None:
        seen.set(group.mask_key, torch.ones(n_steps, group.n_agents, dtype=torch.bool))
    if group.action_mask_key is not None and "infos.legals" in row:
        seen.set(group.action_mask_key, row["infos.legals"].bool())
    if team.state_spec is not None and "infos.state" in row:
        seen.set("state", row["infos.state"].float())
    return seen


def _convert_action(action: Tensor, group: GroupSpec, name: str) -> Tensor:
    """Returns actions in the shape and dtype of the environment's."""
    spec = group.action_spec
    if group.discrete and spec.shape[1:]:  # one-hot
        action = torch.nn.functional.one_hot(action.long(), group.n_actions)
    if action.shape[1:] != spec.shape:
        raise DatasetError(
            f"the vault has {name} {list(action.shape[1:])}, expected {list(spec.shape)} as in the "
            "environment; use the environment in which it was recorded."
        )
    return action.to(spec.dtype)
