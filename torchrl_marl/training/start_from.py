"""Start of a new run from the parameters of another run, a stored player or an exported folder."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchrl_marl.collectors.team import TeamPolicy
from torchrl_marl.errors import ConfigError, quoted
from torchrl_marl.learners.adam import start_adam
from torchrl_marl.learners.rows import make_member_view
from torchrl_marl.modules.players import tensors_of
from torchrl_marl.runtime.applications import import_application
from torchrl_marl.runtime.random_state import RandomState
from torchrl_marl.runtime.trust import refuse_links
from torchrl_marl.settings import shown
from torchrl_marl.training.checkpoint import explain_misfit, load_at, load_latest
from torchrl_marl.training.config import TrainConfig, last_stage, read_run_config
from torchrl_marl.training.leaves import Leaves, described, init_part_of, leaves_of, live_leaves
from torchrl_marl.training.messages import print_message
from torchrl_marl.training.origin import differences, settings_of
from torchrl_marl.training.pool import read_player
from torchrl_marl.training.run import refuse_population

if TYPE_CHECKING:
    from torchrl_marl.training.training import Training

__all__ = [
    "Loaded",
    "Source",
    "future_source",
    "load_parts",
    "read_source",
    "start_from",
]

_DEFAULT_PARTS = ("actor", "critic", "normalization")
_NETWORK_SETTING = re.compile(r"(?:learner|groups\.[^.]+)\.(actor|critic|mixer)\..+")


class Source(NamedTuple):
    """Parameters that a new run starts from."""

    name: str
    """Path, with ``@FRAMES`` for a run."""
    kind: str
    """``run``, ``player`` or ``export``."""
    leaves: Leaves
    """Dotted name -> tensor."""
    frames: int | None = None
    """Frames that the run was trained for."""
    config: TrainConfig | None = None
    """Settings of the run."""


class Loaded(NamedTuple):
    """The parts that were loaded from a source."""

    parts: list[str]
    """Parts of ``init``."""
    missing: list[str]
    """Parts that the run has and the source does not hold."""
    unused: list[str]
    """Networks of the source that have no counterpart in the run."""


# ----------------------------------------------------------------------------------------- reading


def read_source(source: str) -> Source:
    """Reads the parameters that ``init_from`` names; runs no code from the files.

    Args:
        source (str): run folder, with or without ``@FRAMES``; file of a stored player; or exported
            folder.

    Raises:
        CheckpointError: the path is none of these, is damaged, or has no such checkpoint.
        TrustError: the folder has links that lead out of it.
    """
    path, frames = _split_frames(source)
    if frames is None and path.is_file():
        players = read_player(path).items()
        found = {f"actors.{actor}.{x}": y for actor, own in players for x, y in own.items()}
        return Source(source, "player", found)
    exported = None if (path / "config.yaml").is_file() else _read_export(path)
    if exported is not None and frames is None:
        return Source(source, "export", exported)
    return _read_run(path, frames)


def _split_frames(given: str) -> tuple[Path, int | None]:
    """Splits a path and the frames behind its last ``@``."""
    found = re.fullmatch(r"(.+)@(\d+(?:_\d+)*)", given)
    if found is None or Path(given).exists():
        return Path(given), None
    return Path(found[1]), int(found[2])


def _read_export(path: Path) -> Leaves | None:
    """Returns the parameters in an exported folder; None if it is not an exported folder."""
    if not any(path.glob("*/interface.json")):
        return None
    refuse_links(path, "export folder")
    found: Leaves = import_application("export").read_parameters(path)
    return found


def _read_run(path: Path, frames: int | None) -> Source:
    path = last_stage(path)
    config = read_run_config(path)
    refuse_links(path)
    refuse_population(path, config)
    used, state = load_latest(path) if frames is None else load_at(path, frames)
    with explain_misfit(used):
        found = leaves_of(state["learners"])
    frames = state["collector"]["frames"]
    return Source(f"{path}@{frames}", "run", found, frames, settings_of(state, used) or config)


def future_source(name: str, learners: Sequence[Any]) -> Source:
    """Returns the source that new learners will be once they are trained, to compare shapes.

    Args:
        name (str): path of their run folder.
        learners (sequence of Learner): ordinary learners; their optimizers are started.
    """
    _initialize_optimizers(learners)
    return Source(name, "run", live_leaves(learners))


# ----------------------------------------------------------------------------------------- loading


@torch.no_grad()
def load_parts(learners: Sequence[Any], source: Source, init: Sequence[str] | None) -> Loaded:
    """Copies the parameters of a source into learners, in place.

    Target networks become copies of the networks that they follow.

    Args:
        learners (sequence of Learner): ordinary learners, without members.
        source (Source): the parameters, from :func:`read_source`.
        init (sequence of str, optional): parts to load; by default actor, critic and normalization,
            as far as the source holds them.

    Returns:
        Loaded: the parts, those that are missing, and networks that the learners do not have.

    Raises:
        ConfigError: a leaf does not fit; the message names all that do not.
    """
    parts = _DEFAULT_PARTS if init is None else tuple(init)
    if "optimizer" in parts:
        _initialize_optimizers(learners)
    own, write = _learner_leaves(learners, source)
    given = _with_wide_statistics(_rename_group(source.leaves, own), own)
    if source.kind == "export" and any(getattr(x, "observation_norms", ()) for x in learners):
        given = {name: x for name, x in given.items() if init_part_of(name) == "actor"}
    held = [part for part in parts if any(init_part_of(name) == part for name in given)]
    own = {name: x for name, x in own.items() if init_part_of(name) in held}
    _check_source_parts(source, held if own else [], init)
    given = {name: x for name, x in given.items() if init_part_of(name) in held}
    unused = _find_unused(given, own)
    given = {name: x for name, x in given.items() if _network_name(name) not in unused}
    _check_shapes(source, given, own, held)
    for name, x in own.items():
        x.copy_(given[name])
    write()
    for learner in learners:
        _copy_to_targets(getattr(learner, "updates", None))
    loaded = [part for part in held if part in {init_part_of(name) for name in own}]
    here = {init_part_of(name) for name in live_leaves(learners)}
    return Loaded(loaded, [x for x in parts if x in here and x not in held], unused)


def _copy_to_targets(updates: Any) -> None:
    pairs = zip(getattr(updates, "sources", ()), getattr(updates, "targets", ()))
    for network, target in pairs:
        target.copy_(network)


def _initialize_optimizers(learners: Iterable[Any]) -> None:
    for optimizer in (x for learner in learners for x in _optimizers(learner)):
        start_adam(optimizer, optimizer.parameters)


def _optimizers(learner: Any) -> Iterable[Any]:
    return getattr(learner, "optimizer_of", {}).values()


def _learner_leaves(learners: Sequence[Any], source: Source) -> tuple[Leaves, Callable[[], None]]:
    """Returns tensors of learners under the names of a source, and a function that writes them."""
    if source.kind == "run":
        return live_leaves(learners), _do_nothing
    policy = TeamPolicy(actor for learner in learners for actor in learner.actors.values())
    if source.kind == "export":
        team = import_application("export").TeamParameters(policy, source.leaves.keys())
        return team.leaves, team.put_back
    named = [actor for actor in policy.module if getattr(actor, "group", None) is not None]
    found = {f"actors.{a.group.name}.{x}": y for a in named for x, y in tensors_of(a).items()}
    return found, _do_nothing


def _do_nothing() -> None:
    """Does nothing: the tensors are those of the learners."""


def _rename_group(given: Leaves, own: Leaves) -> Leaves:
    """Renames the group of the source, if both have only one."""
    theirs, ours = _group_names(given), _group_names(own)
    if len(theirs) != 1 or len(ours) != 1 or theirs == ours:
        return given
    # A group's name is the second word, and follows "features" where a critic standardizes.
    named = re.compile(rf"(^\w+|\.features)\.{re.escape(theirs[0])}(?=\.)")
    return {named.sub(rf"\1.{ours[0]}", name): x for name, x in given.items()}


def _group_names(named: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(x.split(".")[1] for x in named if x.startswith("actors.")))


def _with_wide_statistics(given: Leaves, own: Leaves) -> Leaves:
    """Returns leaves with statistics in the learners' precision; up to 0.2 it was single."""
    return {
        name: x.to(own[name].dtype) if name in own and init_part_of(name) == "normalization" else x
        for name, x in given.items()
    }


def _find_unused(given: Leaves, own: Leaves) -> list[str]:
    """Returns the networks of a source that the learners do not have at all, such as a critic."""
    here = {_network_name(name) for name in own}
    networks = (_network_name(name) for name in given if init_part_of(name) != "normalization")
    return list(dict.fromkeys(name for name in networks if name not in here))


def _network_name(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _check_source_parts(source: Source, held: list[str], init: Sequence[str] | None) -> None:
    """Refuses a source without a part that was asked for."""
    missing = [part for part in init or () if part not in held]
    if missing or not held:
        fix = f"use init={_format_list(held)}" if held else "start from a run of the same algorithm"
        what = " and ".join(missing) or "network of this run"
        raise ConfigError(f"init_from is {quoted(source.name)}, which holds no {what}; {fix}.")


def _check_shapes(source: Source, given: Leaves, own: Leaves, held: list[str]) -> None:
    """Refuses leaves that differ; names each of them."""
    faults, wrong, seen = [], set(), set()
    for name in {**own, **given}:
        here, there = own.get(name), given.get(name)
        if described(here) == described(there) or id(here) in seen:
            continue
        seen |= {id(here)} - {id(None)}
        wrong.add(init_part_of(name))
        faults.append(f"{name} is {described(there)} there and {described(here)} here")
    if not faults:
        return
    fits = [part for part in held if part not in wrong]
    leave = f"leave {' and '.join(sorted(map(str, wrong)))} out with init={_format_list(fits)}"
    fix = f"{leave}, or " if fits else ""
    if source.kind == "export":  # programs hold the weights of some networks transposed, unnamed
        fix = "start from the run that was exported, or "
    raise ConfigError(
        f"init_from is {quoted(source.name)}, which does not fit the networks of this run: "
        f"{', '.join(faults)}; {fix}use an environment and networks of equal shapes."
    )


def _format_list(parts: Iterable[str]) -> str:
    return f"[{','.join(parts)}]"


# ------------------------------------------------------------------------------------------- a run


def start_from(training: Training, source: Source) -> None:
    """Loads a source into a new run, and notes this in the summary; members all start from it.

    Args:
        training (Training): the run, before its first iteration.
        source (Source): the parameters, from :func:`read_source`.

    Raises:
        ConfigError: a leaf does not fit; the message names all that do not.
    """
    init = training.config.init
    if training.n_members == 1:
        found = load_parts(training.learners, source, init)
    else:
        found = _load_members(training, source)
    note = {"init_from": {"from": source.name, "frames": source.frames, "parts": found.parts}}
    for own in (training.run, *getattr(training.results, "members", ())):
        own.summary |= note
    if training.writes:
        _print_report(training, source, found)


def _load_members(training: Training, source: Source) -> Loaded:
    """Loads a source into each member of a population; other parts keep their initial values."""
    found, init = Loaded([], [], []), training.config.init
    if "optimizer" in (init or ()):
        _initialize_optimizers(training.learners)
    for i, config in enumerate(training.results.configs):
        with RandomState(config.seed, training.device).active():
            single_learners = training.results.alone(i)
        found = load_parts(single_learners, source, init)
        for many, one in zip(training.learners, single_learners):
            make_member_view(many, one).write(i)
            for shared, single in zip(_optimizers(many), _optimizers(one)):
                for p, q in zip(shared.parameters, single.parameters):
                    if shared.state.get(p) and single.state.get(q):
                        shared.state[p]["step"].copy_(single.state[q]["step"])
    return found


def _print_report(training: Training, source: Source, found: Loaded) -> None:
    """Prints the loaded and the missing parts, and settings of networks that differ."""
    message = f"starts from {source.name}: {', '.join(found.parts)}"
    message += f"; it holds no {' and no '.join(found.missing)}" if found.missing else ""
    message += f"; this run has no {', '.join(found.unused)}" if found.unused else ""
    print_message(message, is_warning=False)
    changed = list(_changed_network_settings(source.config, training.config, found.parts))
    if changed:
        print_message(
            f"of {source.name} and this run differ: {', '.join(changed)}; the loaded networks may "
            "compute something else here"
        )


def _changed_network_settings(
    before: TrainConfig | None, now: TrainConfig, parts: Sequence[str]
) -> Iterator[str]:
    """Yields settings of the loaded networks that differ although their shapes are equal."""
    if before is None:
        return
    for one in differences(dataclasses.replace(before, env=now.env), now):
        network = _NETWORK_SETTING.fullmatch(one.key)
        if network and ("actor" if network[1] == "actor" else "critic") in parts:
            yield f"{one.key} ({shown(one.before)} and {shown(one.now)})"
