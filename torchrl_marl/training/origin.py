"""Origin of a run: the user that trained it, its settings and package versions."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from torchrl_marl.envs.config import EnvConfig
from torchrl_marl.envs.external_code import code_at, external_code
from torchrl_marl.envs.libraries import LIBRARIES
from torchrl_marl.errors import CheckpointError, ConfigError, TrustError
from torchrl_marl.runtime.trust import is_signed_by_user, signature
from torchrl_marl.settings import Reader, flatten, shown, to_yaml
from torchrl_marl.settings.layers import UNFIT, plain
from torchrl_marl.training.config import TrainConfig
from torchrl_marl.training.files import open_atomically
from torchrl_marl.version import __version__

__all__ = [
    "SIGNATURE",
    "Difference",
    "ExternalReference",
    "check_environment",
    "check_origin",
    "check_unchanged",
    "differences",
    "external_references",
    "in_words",
    "run_provenance",
    "settings_of",
    "sign_run",
    "signed_yaml",
    "warn_of_versions",
]

# Settings that may change when a run is resumed: for length, evaluation, logging ...
_RESUMABLE_SETTINGS = ("total_frames", "stop_at_return", "evaluation.", "checkpoint.", "logging.")
# ... and for devices, execution and placement.
_PLACEMENT_SETTINGS = ("device", "threads", "execution", "distributed.")
_SHARD_SETTINGS = ("distributed.collectors", "distributed.overlap")  # must not change
# Addresses and timeouts of external simulators.
_CONNECTION_SETTINGS = tuple(
    f"env.kwargs.{name}"
    for name in ("host", "port", "token_file", "tls_", "grace", "idle_timeout", "patience", "max_")
)
_MAX_DIFFERENCES = 5  # largest number of differences in a message
_ABSENT: Any = object()


class Difference(NamedTuple):
    """A setting with a value that differs from the value in a checkpoint."""

    key: str
    """Dotted name of the setting."""
    before: Any
    """Value in the checkpoint."""
    now: Any
    """Current value."""


def run_provenance(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings of a run and the package versions, to be stored in a checkpoint.

    Args:
        config (TrainConfig): config of the run.

    Examples:
        >>> found = run_provenance(TrainConfig(seed=3))
        >>> found["settings"]["seed"], sorted(found["versions"])[:3]
        (3, ['tensordict', 'torch', 'torchrl'])
    """
    settings = plain(dataclasses.asdict(config))
    return {
        "settings": None if settings is UNFIT else settings,
        "versions": _package_versions(config.env.library),
    }


def settings_of(state: Mapping[str, Any], path: Path) -> TrainConfig | None:
    """Returns the settings in a checkpoint, or None if an old checkpoint has no settings.

    Args:
        state (mapping): content of the checkpoint.
        path (Path): file of the checkpoint.

    Raises:
        CheckpointError: this version does not know the settings.
    """
    record = state.get("made_by")
    settings = record.get("settings") if isinstance(record, Mapping) else None
    if not isinstance(settings, Mapping):
        return None
    try:
        return Reader(TrainConfig).read(settings, warn=False)  # type: ignore[no-any-return]
    except ConfigError as error:
        raise CheckpointError(
            f"checkpoint {str(path)!r} holds settings that do not fit this version: {error}"
        ) from None


def differences(before: TrainConfig, now: TrainConfig) -> list[Difference]:
    """Returns the settings that differ although they must not change when a run is resumed.

    Args:
        before (TrainConfig): settings of the run so far.
        now (TrainConfig): settings to resume with.
    """
    old, new = _flatten_config(before), _flatten_config(now)
    free = (
        *_RESUMABLE_SETTINGS,
        *_PLACEMENT_SETTINGS,
        *(_CONNECTION_SETTINGS if now.env.has_clients else ()),
    )
    found = []
    for key in {**old, **new}:
        one, other = old.get(key, _ABSENT), new.get(key, _ABSENT)
        fixed = key in _SHARD_SETTINGS or not key.startswith(free)
        if fixed and one != other and not (one in ({}, _ABSENT) and other in ({}, _ABSENT)):
            found.append(Difference(key, one, other))
    return found


def in_words(found: Sequence[Difference], path: Path, file: TrainConfig | None = None) -> str:
    """Describes the first few differences.

    Args:
        found (sequence of Difference): one or more differences.
        path (Path): ``config.yaml`` of the run.
        file (TrainConfig, optional): settings in that file, without overrides.
    """
    own = None if file is None else _flatten_config(file)
    words: list[str] = []
    for one in found[:_MAX_DIFFERENCES]:
        given = own is not None and own.get(one.key, _ABSENT) != one.now
        now = f"{_show_value(one.now)} is asked for" if given else f"is {_show_value(one.now)}"
        when = " when this run was made" * (not words)
        where = f" in {str(path)!r}" * (not given and not any(str(path) in own for own in words))
        words.append(f"{one.key} was {_show_value(one.before)}{when} and {now}{where}")
    more = len(found) - len(words)
    return ", ".join(words) + f", and {more} more differ" * bool(more)


def check_unchanged(before: TrainConfig, now: TrainConfig, file: TrainConfig, path: Path) -> None:
    """Refuses to resume a run if settings that must not change differ.

    Args:
        before (TrainConfig): settings of the run so far.
        now (TrainConfig): settings to resume with.
        file (TrainConfig): settings in the run's ``config.yaml``, without overrides.
        path (Path): path of ``config.yaml``.

    Raises:
        ConfigError: settings differ; the message names each one, both values, and the source of the
            new value.
    """
    found = differences(
        dataclasses.replace(before, folder=file.folder), now
    )  # the run may have been moved
    if not found:
        return
    (first, *others), own = found, _flatten_config(file)
    fix = "put those back"
    if not others and first.before is not _ABSENT:
        in_file = own.get(first.key, _ABSENT) == first.now
        fix = f"put {_show_value(first.before)} back" if in_file else f"leave {first.key} out"
    raise ConfigError(
        f"{in_words(found, path, file)}: a resumed run keeps its settings, except "
        "total_frames, stop_at_return, evaluation.*, checkpoint.*, logging.*, device, threads, "
        "execution and the placement of shards (distributed.*); start a new run to change it, "
        f"or {fix}."
    )


def warn_of_versions(state: Mapping[str, Any], path: Path) -> None:
    """Warns once if a checkpoint was made with other package versions.

    Args:
        state (mapping): content of the checkpoint.
        path (Path): file of the checkpoint.
    """
    record = state.get("made_by")
    before = record.get("versions") if isinstance(record, Mapping) else None
    if not isinstance(before, Mapping):
        return
    now = {name: _package_version(name) for name in before if isinstance(name, str)}
    other = [
        f"{name} {before[name]} (here {now[name]})" for name in now if now[name] != before[name]
    ]
    if other:
        warnings.warn(
            f"checkpoint {str(path)!r} was made with {', '.join(other)}; the run is resumed, but "
            "may differ from one with the same versions.",
            stacklevel=3,
        )


def _flatten_config(config: TrainConfig) -> dict[str, Any]:
    """Returns settings by dotted name; NaN is replaced by a value that equals itself."""
    found = flatten(dataclasses.asdict(config))
    plainly = {key: plain(value) for key, value in found.items()}
    return {key: "nan" if value != value else value for key, value in plainly.items()}


def _show_value(value: Any) -> str:
    return "not given" if value is _ABSENT else shown(value)


def _package_versions(library: str) -> dict[str, str | None]:
    """Returns the versions of the packages that affect a run, by name."""
    names = ["torchrl_marl", "torch", "torchrl", "tensordict"]
    simulator = library.partition(":")[0].partition(".")[0]
    if not _is_without_package(library, simulator) and _package_version(simulator) is not None:
        names.append(simulator)
    return {name: _package_version(name) for name in names}


def _is_without_package(library: str, simulator: str) -> bool:
    """Returns whether a library's environments run without a package of the same name."""
    record = LIBRARIES.find(library)
    if record is None or not record.adapter.startswith("torchrl_marl."):
        return simulator in ("own", "")
    return simulator not in record.packages


@functools.cache
def _package_version(name: str) -> str | None:
    if name == "torchrl_marl":
        return __version__
    try:
        return version(name)
    except (PackageNotFoundError, ValueError):
        return None


SIGNATURE = "world.signature"
"""File with the user's signatures of a run's environment and addresses."""
_SIGNATURE_PREFIX = "# signature "
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_FILE_ARGUMENTS = ("token_file", "tls_certificate", "tls_key")
_TRUST_HINT = (
    "if you trust it, add --trust (in Python: trust=True, or the context "
    "torchrl_marl.runtime.trust.trusting())"
)


class ExternalReference(NamedTuple):
    """External code, an address or a service that settings name."""

    key: str
    """Name of the setting; ``env`` for the code of an environment."""
    effect: str
    """Verb phrase for messages, such as ``import module``."""
    parts: tuple[bytes, ...]
    """Content that is signed."""

    @property
    def signature(self) -> str:
        """This user's signature of the content."""
        return signature(*self.parts)

    def is_signed(self, signatures: Iterable[str]) -> bool:
        """Returns whether one of the signatures is this user's, or everything is trusted."""
        return any(is_signed_by_user(one, *self.parts) for one in ["", *signatures])


def external_references(config: TrainConfig) -> list[ExternalReference]:
    """Returns the external code, clusters, addresses and services that settings name."""
    found = []
    code = external_code(config.env)
    if code is not None:
        found.append(_named_environment(code))
    for one in config.callbacks:
        place = one.rpartition(":")[0]
        if place != "<object>":  # given by the caller
            found.append(_named_callback(code_at(place)))
    at = config.distributed
    if at.backend == "ray" and at.address is not None:
        found.append(
            _named_address("distributed.address", at.address, "connect to the Ray cluster")
        )
    if config.env.has_clients:
        host = config.env.kwargs.get("host")
        if host is not None and host not in _LOCAL_HOSTS:
            found.append(_named_address("env.kwargs.host", host, "listen at"))
        for name in _FILE_ARGUMENTS:
            if file := config.env.kwargs.get(name):
                found.append(_named_address(f"env.kwargs.{name}", file, f"read the {name} from"))
    services = {"wandb": True, "mlflow": "MLFLOW_TRACKING_URI" in os.environ}
    for name in config.logging.backends:
        if services.get(name):
            found.append(_named_address("logging.backends", name, "send its metrics to"))
    return found


def check_environment(folder: Path, env: EnvConfig, trust: bool = False) -> None:
    """Refuses to import the environment of another user's run.

    Runs that this user trained on this machine are accepted, unless the module has moved. Within
    :func:`torchrl_marl.runtime.trust.trusting`, all runs are accepted.

    Args:
        folder (Path): folder of the run.
        env (EnvConfig): settings of the run's environment.
        trust (bool): whether the user trusts the run.

    Raises:
        TrustError: the run is another user's; the message names the module.
    """
    code = external_code(env)
    if code is not None and not trust:
        _refuse_unsigned([_named_environment(code)], folder / "config.yaml", f"run {str(folder)!r}")


def check_origin(
    file: Path,
    config: TrainConfig,
    *,
    overridden: Collection[str] = (),
    own_env: bool = False,
    only: str = "",
) -> None:
    """Refuses external code, addresses and services in the settings of another user's run.

    Args:
        file (Path): file with the settings: the ``config.yaml`` of a run, or a copy of it.
        config (TrainConfig): settings in the file, with the user's overrides.

    Keyword Args:
        overridden (collection of str): dotted names of the settings that the user overrides.
        own_env (bool): whether the user passes an environment.
        only (str): prefix of the names of the settings to check.

    Raises:
        TrustError: a setting is refused; the message names it and its effect.
    """
    own = (*overridden, *(["env"] if own_env or _environment_is_given(overridden) else ()))
    named = [one for one in external_references(config) if one.key.startswith(only)]
    named = [one for one in named if one.key not in own]
    what = f"run {str(file.parent)!r}" if file.name == "config.yaml" else f"recipe {str(file)!r}"
    _refuse_unsigned(named, file, what)


def _environment_is_given(overridden: Collection[str]) -> bool:
    """Returns whether the user's overrides choose the environment."""
    return "env.library" in overridden or "env.name" in overridden


def sign_run(folder: Path, config: TrainConfig) -> None:
    """Writes this user's signatures of external code and addresses into a run's folder.

    Raises:
        WriteError: the disk is full, or the folder is read-only.
    """
    named = external_references(config)
    if named:
        with open_atomically(folder / SIGNATURE) as file:
            file.write("\n".join(one.signature for one in named))


def signed_yaml(config: TrainConfig) -> str:
    """Returns settings as YAML, with signatures of external code and addresses as comments."""
    lines = (f"{_SIGNATURE_PREFIX}{one.signature}\n" for one in external_references(config))
    return to_yaml(config) + "".join(lines)


def _refuse_unsigned(named: Iterable[ExternalReference], file: Path, what: str) -> None:
    given = _read_signatures(file)
    for one in named:
        if one.is_signed(given):
            continue
        if one.key == "env":
            raise TrustError(
                f"{what} would {one.effect} and run its code, but was not trained by you on "
                f"this machine with that code; {_TRUST_HINT}."
            )
        raise TrustError(
            f"{what} would {one.effect} ({one.key}), but was not trained by you on this machine "
            f"with this setting; give {one.key}=... yourself, or, {_TRUST_HINT}."
        )


def _read_signatures(file: Path) -> list[str]:
    """Returns the signatures in a settings file, and in the signature file next to it."""
    found = []
    for path, prefix in ((file.parent / SIGNATURE, ""), (file, _SIGNATURE_PREFIX)):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return found


def _named_environment(code: str) -> ExternalReference:
    return ExternalReference("env", f"import {code}", (b"world of a run", code.encode()))


def _named_callback(code: str) -> ExternalReference:
    return ExternalReference("callbacks", f"import {code}", (b"callback of a run", code.encode()))


def _named_address(key: str, value: object, effect: str) -> ExternalReference:
    parts = (b"address of a run", key.encode(), str(value).encode())
    return ExternalReference(key, f"{effect} {str(value)!r}", parts)
