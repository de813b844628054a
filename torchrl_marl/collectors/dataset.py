"""Reads and writes datasets of recorded steps.

Shapes: S steps of all episodes, N agents, A features of an action.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_marl.errors import DatasetError, WriteError, quoted
from torchrl_marl.specs import GroupSpec, TeamSpec

__all__ = ["Dataset", "check_new", "write_dataset"]

# The file with the description, the folder of the steps, and the version of the format.
_DESCRIPTION_FILE, _STEPS_FOLDER, _VERSION = "dataset.json", "storage", 1
# Largest rounding error of an action, relative to its range.
_ROUNDING = 1e-4
# With it, the folder is a checkpoint of TorchRL's LazyMemmapStorage.
_METADATA_FILE, _STORAGE_METADATA = "storage_metadata.json", {"metadata": {}, "is_pytree": False}


class Dataset:
    """Recorded steps of whole episodes, one episode after the other.

    The steps are a memory-mapped storage of TorchRL in ``FOLDER/storage``. ``FOLDER/dataset.json``
    describes them: environment, specs, source, and returns.

    Args:
        folder (Path): folder of the dataset.
        about (mapping): the description.
        steps (TensorDictBase): the steps, ``[S]``.

    Attributes:
        starts (Tensor): index of the first step of each episode.
        lengths (Tensor): number of steps of each episode.

    Examples:
        >>> import tempfile
        >>> from torchrl_marl.collectors.dataset import write_dataset
        >>> done = torch.tensor([[False], [True], [True]])
        >>> steps = TensorDict({"next": {"done": done}}, [3])
        >>> dataset = write_dataset(Path(tempfile.mkdtemp(), "data"), steps, {"source": "random"})
        >>> dataset.lengths.tolist(), Dataset.open(dataset.folder).about["source"]
        ([2, 1], 'random')
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], steps: TensorDictBase) -> None:
        self.folder, self.about, self.steps = folder, dict(about), steps
        done = steps.get(("next", "done"), None)
        if done is None:
            raise DatasetError(
                f"dataset {quoted(str(folder))} has no entry next.done, expected True in the last "
                "step of each episode; record it again, or add the entry."
            )
        ends = done.flatten().nonzero().flatten() + 1
        if not len(ends) or int(ends[-1]) != len(steps):
            raise DatasetError(
                f"dataset {quoted(str(folder))} does not end with the end of an episode; record it "
                "again."
            )
        self.starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        self.lengths = ends - self.starts

    @classmethod
    def open(cls, folder: str | Path) -> Dataset:
        """Opens a dataset. Nothing in its folder is executed, and nothing is written to it.

        Raises:
            DatasetError: the folder has no dataset, or a damaged one.
        """
        folder = Path(folder)
        if not (folder / _DESCRIPTION_FILE).is_file():
            raise DatasetError(
                f"{quoted(str(folder))} has no dataset (no {_DESCRIPTION_FILE}); record one by "
                "`torchrl-marl record`, or put it back."
            )
        try:
            about = json.loads((folder / _DESCRIPTION_FILE).read_text(encoding="utf-8"))
            version, n_steps, entries = about["version"], about["steps"], about["entries"]
            _check_sizes(folder / _STEPS_FOLDER)
            steps = TensorDict.load_memmap(folder / _STEPS_FOLDER, mode="r", allow_pickle=False)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise DatasetError(
                f"dataset {quoted(str(folder))} is damaged ({error}); record it again."
            ) from error
        if version != _VERSION:
            raise DatasetError(
                f"dataset {quoted(str(folder))} has version {version}, expected {_VERSION}; record "
                "it again, or read it by the version of torchrl_marl that wrote it."
            )
        if steps.batch_size != (n_steps,):
            raise DatasetError(
                f"dataset {quoted(str(folder))} has steps {list(steps.batch_size)}, expected "
                f"[{n_steps}] as {_DESCRIPTION_FILE} says; record it again."
            )
        found = _describe_entries(steps)
        if found != entries:
            key = min(key for key in {**found, **entries} if found.get(key) != entries.get(key))
            raise DatasetError(
                f"dataset {quoted(str(folder))} is damaged ({key} is {found.get(key, 'missing')}, "
                f"expected {entries.get(key, 'none')} as {_DESCRIPTION_FILE} says); record it "
                "again."
            )
        return cls(folder, about, steps)

    def __len__(self) -> int:
        """Returns the number of steps."""
        return len(self.steps)

    @property
    def n_episodes(self) -> int:
        """Number of episodes."""
        return len(self.lengths)

    @property
    def digest(self) -> str:
        """SHA-256 of the description, by which a resumed run recognizes the dataset."""
        text = json.dumps(self.about, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def check(self, team: TeamSpec) -> None:
        """Checks that a dataset has the same observations and actions as an environment.

        Args:
            team (TeamSpec): the groups of the environment.

        Raises:
            DatasetError: an entry is missing, has another shape, or an action is not one of the
                environment's; the message names it.
        """
        for group in team.groups.values():
            self._check_entries(group)
            for key in group.observation_keys:
                self._check_agents(group, key)
            widths = [self.steps.get(key)[0, 0].numel() for key in group.observation_keys]
            if sum(widths) != group.observation_dim:
                raise DatasetError(
                    f"dataset {quoted(str(self.folder))} has observations of {sum(widths)} "
                    f"numbers, expected {group.observation_dim} for group {group.name!r} of the "
                    "environment; record it in this environment."
                )
            self._check_agents(group, group.action_key)
            found, expected = self.steps.get(group.action_key).shape[1:], group.action_spec.shape
            if found != expected:
                raise DatasetError(
                    f"dataset {quoted(str(self.folder))} has {_format_key(group.action_key)} "
                    f"{list(found)}, expected {list(expected)} as in the environment; record it in "
                    "this environment."
                )
            self._check_actions(group)

    def _check_entries(self, group: GroupSpec) -> None:
        masks = [key for key in (group.mask_key, group.action_mask_key) if key is not None]
        seen = [*group.observation_keys, *masks]
        after = [*seen, group.reward_key, "terminated"]
        needed = [*seen, group.action_key, *(unravel_key(("next", key)) for key in after)]
        missing = next((key for key in needed if self.steps.get(key, None) is None), None)
        if missing is not None:
            raise DatasetError(
                f"dataset {quoted(str(self.folder))} has no entry {_format_key(missing)}, "
                f"expected one as in the environment, for group {group.name!r}; record it in this "
                "environment, or add the entry."
            )

    def _check_agents(self, group: GroupSpec, key: NestedKey) -> None:
        found = self.steps.get(key).shape[1:]
        if found[:1] != (group.n_agents,):
            raise DatasetError(
                f"dataset {quoted(str(self.folder))} has {_format_key(key)} {list(found)}, but "
                f"group {group.name!r} of the environment has {group.n_agents} agents; record it "
                "in this environment."
            )

    def _check_actions(self, group: GroupSpec) -> None:
        """Refuses options that the environment lacks, and numbers outside of its bounds."""
        acts = group.mask(self.steps)
        action = self.steps.get(group.action_key).reshape(*acts.shape, -1)
        low, high = (limit.to(action.device).expand_as(action) for limit in _action_limits(group))
        margin = _ROUNDING * (high - low).nan_to_num(posinf=0.0)
        inside = (action >= low - margin) & (action <= high + margin)
        wrong = (~inside & acts.unsqueeze(-1)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise DatasetError(
                f"dataset {quoted(str(self.folder))} has {_format_key(group.action_key)} "
                f"{action[at].item():g} of agent {group.agent_names[at[1]]} in step {at[0]}, "
                f"expected {low[at].item():g} to {high[at].item():g} as in the environment; record "
                "it in this environment."
            )


def _check_sizes(folder: Path) -> None:
    """Refuses files that do not have the size of their tensors; torch would enlarge them.

    Raises:
        ValueError: a file has another size; the message names it.
    """
    for meta in folder.rglob("meta.json"):
        entries = json.loads(meta.read_text(encoding="utf-8"))
        for name, entry in entries.items():
            if not isinstance(entry, dict) or "dtype" not in entry:
                continue
            dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
            expected = math.prod(entry["shape"]) * dtype.itemsize
            found = os.path.getsize(meta.with_name(f"{name}.memmap"))
            if found != expected:
                raise ValueError(f"{name}.memmap has {found} bytes, expected {expected}")


def _action_limits(group: GroupSpec) -> tuple[Tensor, Tensor]:
    """Returns the smallest and the largest value of each part of an action, ``[N, A]``."""
    if group.one_hot:
        return torch.zeros(1), torch.ones(1)
    if group.discrete:
        last = torch.tensor(group.action_dims).unsqueeze(-1) - 1.0
        return torch.zeros_like(last), last
    last = (torch.tensor(group.branches) - 1.0).expand(group.n_agents, -1)
    width = group.action_spec.shape[-1] - last.shape[-1]
    numbers = last.new_full((group.n_agents, width), math.inf)
    low, high = (-numbers, numbers) if group.action_bounds is None else group.action_bounds
    return torch.cat([torch.zeros_like(last), low], -1), torch.cat([last, high], -1)


def _format_key(key: NestedKey) -> str:
    return ".".join(key) if isinstance(key, tuple) else key


def check_new(folder: str | Path) -> Path:
    """Returns the folder of a new dataset.

    Raises:
        DatasetError: the folder exists.
        WriteError: a folder cannot be created there.
    """
    folder = Path(folder).expanduser()
    if folder.exists() or folder.is_symlink():
        raise DatasetError(
            f"{quoted(str(folder))} exists, expected a new folder for the dataset; choose another "
            "--out."
        )
    _make_part_folder(folder).rmdir()  # fails now, and not after the episodes
    return folder


def _make_part_folder(folder: Path) -> Path:
    """Returns a new hidden folder beside ``folder``, for its unfinished content."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise WriteError(
            f"{quoted(str(folder))} cannot be written ({error}); choose another --out."
        ) from error


def write_dataset(folder: str | Path, steps: TensorDictBase, about: Mapping[str, Any]) -> Dataset:
    """Writes steps of whole episodes to a new folder, and opens it.

    The folder appears only when it is complete.

    Args:
        folder (str or Path): the new folder.
        steps (TensorDictBase): steps of whole episodes, one episode after the other, ``[S]``.
        about (mapping): description of the steps, which must be valid JSON.

    Keys:
        - reads: all entries; ``("next", "done")`` is True in the last step of each episode

    Raises:
        DatasetError: the folder exists, or the steps are not of whole episodes.
        WriteError: the folder cannot be written, for example because the disk is full.

    Examples:
        >>> steps = TensorDict({"next": {"done": torch.tensor([[False], [True]])}}, [2])
        >>> dataset = write_dataset(Path(tempfile.mkdtemp(), "data"), steps, {"source": "mine"})
        >>> dataset.n_episodes, dataset.about["entries"]
        (1, {'next.done': '[1] bool'})
    """
    folder = check_new(folder)
    Dataset(folder, about, steps)  # refuses steps that are not of whole episodes
    whole = {"version": _VERSION, "steps": len(steps), **about, "entries": _describe_entries(steps)}
    part = _make_part_folder(folder)
    try:
        _write_files(part, steps, whole)
        part.chmod(0o755)
        os.rename(part, folder)
    except (OSError, RuntimeError) as error:
        raise WriteError(
            f"{quoted(str(folder))} cannot be written ({error}); make room, or choose another "
            "--out."
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Dataset.open(folder)


def _write_files(folder: Path, steps: TensorDictBase, about: Mapping[str, Any]) -> None:
    steps.memmap(folder / _STEPS_FOLDER)
    (folder / _STEPS_FOLDER / _METADATA_FILE).write_text(
        json.dumps(_STORAGE_METADATA | {"len": len(steps)})
    )
    text = json.dumps(about, indent=2, sort_keys=True)
    (folder / _DESCRIPTION_FILE).write_text(text + "\n", encoding="utf-8")


def _describe_entries(steps: TensorDictBase) -> dict[str, str]:
    """Returns the shape and dtype of each entry of a step."""
    return {
        ".".join(key if isinstance(key, tuple) else (key,)): f"{list(value.shape[1:])} "
        f"{str(value.dtype).removeprefix('torch.')}"
        for key, value in sorted(steps.items(True, True), key=str)
    }
