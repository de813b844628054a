"""Compiled graphs on disk: a cache of them, and those that come with the package.

The key of a graph is a hash of its operations, constants and input shapes, the compiler's options,
the versions of torch and of this package, and the processor. Loading a graph takes milliseconds and
does not import the compiler.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from torchrl_marl.version import __version__

__all__ = ["compile_stored"]

Run = Callable[..., Sequence[Tensor]]

_LIBRARY = "graph.so"
_OPERATORS = "graph.json"  # custom operators; torch looks for this file next to the library
_DESCRIPTION = "description.json"


def compile_stored(
    module: fx.GraphModule,
    leaves: Sequence[Tensor],
    options: Mapping[str, Any],
    compiling: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> tuple[Run, int]:
    """Compiles a graph for a CPU, or loads it from the package or from the cache.

    Args:
        module (GraphModule): graph of ATen operators; not modified.
        leaves (sequence of Tensor): its inputs; the code is valid for their shapes and strides.
        options (mapping): options of the compiler.
        compiling (callable, optional): returns a context for the compilation.

    Returns:
        callable, int: function from the inputs to the list of outputs, and number of kernels.
    """
    module, constants = _constants_as_inputs(module)
    inputs = [*leaves, *constants]
    stored = _find_shipped(module, inputs, constants, options)
    if stored is None:
        folder = _cache_folder() / _graph_key(
            module, inputs, constants, options, _describe_machine()
        )
        stored = _load_graph(folder)
    if stored is None:
        with compiling():
            _compile_graph(module, inputs, options, folder)
        stored = _load_graph(folder)
    if stored is None:
        raise OSError(f"the compiled graph {str(folder)!r} cannot be read")
    run, n_kernels = stored
    return lambda *leaves: run([*leaves, *constants]), n_kernels


def _find_shipped(
    module: fx.GraphModule,
    inputs: list[Tensor],
    constants: Sequence[Tensor],
    options: Mapping[str, Any],
) -> tuple[Run, int] | None:
    """Returns a graph that comes with the package, if it computes what the recorded one does."""
    from torchrl_marl.capture import shipped

    folder = shipped.folder(torch.get_num_threads())
    if folder is None or not folder.is_dir():
        return None
    stored = _read_graph(folder / _graph_key(module, inputs, constants, options, shipped.machine()))
    return stored if stored and shipped.outputs_agree(stored[0], module, inputs) else None


def _constants_as_inputs(module: fx.GraphModule) -> tuple[fx.GraphModule, list[Tensor]]:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    last = graph.find_nodes(op="placeholder")[-1]
    placed: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if name not in placed:
            with graph.inserting_after(last):
                last = placed[name] = graph.placeholder(f"constant_{len(placed)}")
        node.replace_all_uses_with(placed[name])
        graph.erase_node(node)
    for node in graph.find_nodes(op="placeholder"):
        node.meta.pop("val", None)  # only some graphs have it, and the inputs suffice
    return fx.GraphModule({}, graph), [getattr(module, name) for name in placed]


def _cache_folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    folder = cache_dir()
    # The default folder's name is predictable, so another user may have created it. A folder that
    # the user has chosen is trusted.
    if folder == default_cache_dir() and _belongs_to_other_user(folder):
        warnings.warn(
            f"compiled graphs are neither loaded from {folder!r} nor kept, since this folder "
            "belongs to another user; set TORCHINDUCTOR_CACHE_DIR to a folder that you own.",
            stacklevel=2,
        )
        own = tempfile.mkdtemp(prefix="torchinductor_")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = own  # for torch, and for child processes
    return Path(cache_dir()) / "torchrl_marl" / "graphs"


def _belongs_to_other_user(folder: str) -> bool:
    user = getattr(os, "getuid", None)  # Windows has none; each user has a temporary folder
    return user is not None and os.stat(folder).st_uid != user()


def _graph_key(
    module: fx.GraphModule,
    inputs: Sequence[Tensor],
    constants: Sequence[Tensor],
    options: Mapping[str, Any],
    machine: tuple,
) -> str:
    from torchrl_marl.capture.build import RUNTIME

    shapes = [(x.dtype, tuple(x.shape), x.stride(), x.device.type) for x in inputs]
    made_of = (module.code, shapes, sorted(options.items()), machine)
    key = hashlib.sha256(repr(made_of).encode() + RUNTIME.read_bytes())
    for x in constants:
        key.update(x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return key.hexdigest()


def _describe_machine() -> tuple:
    """Returns the versions, processor and number of threads for which code is compiled."""
    versions = torch.__version__, __version__
    threads = torch.get_num_threads()
    return (*versions, torch.version.git_version, platform.machine(), _processor(), threads)


def _processor() -> str:
    """Returns a description of the processor's instruction set."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()


def _compile_graph(
    module: fx.GraphModule, inputs: list[Tensor], options: Mapping[str, Any], folder: Path
) -> None:
    """Compiles a graph and writes it to its folder atomically."""
    import torch._inductor

    from torchrl_marl.capture.build import quick_build, reset_vector_choice

    before = _count_kernels()
    with warnings.catch_warnings(), contextlib.ExitStack() as building:
        warnings.simplefilter("ignore", FutureWarning)  # from torch's internal use of its pytrees
        building.enter_context(quick_build())
        try:
            path = torch._inductor.aot_compile(module, tuple(inputs), options=dict(options))
        except Exception as error:
            if not _is_compiler_error(error):
                raise
            building.close()  # the compiler does not know the processor's instructions after all
            reset_vector_choice()
            before = _count_kernels()
            path = torch._inductor.aot_compile(module, tuple(inputs), options=dict(options))
        _write_graph(Path(str(path)), _count_kernels() - before, folder)


def _is_compiler_error(error: Exception) -> bool:
    from torch._inductor.exc import CppCompileError

    return isinstance(getattr(error, "inner_exception", error), CppCompileError)


def _count_kernels() -> int:
    import torch._inductor.metrics as metrics

    return metrics.generated_kernel_count


def _write_graph(library: Path, n_kernels: int, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        whole = Path(made) / "whole"
        whole.mkdir()
        shutil.copy(library, whole / _LIBRARY)
        operators = library.with_suffix(".json")
        if operators.exists():
            shutil.copy(operators, whole / _OPERATORS)
        text = json.dumps({"kernels": n_kernels, "sha256": _digest(whole)})
        (whole / _DESCRIPTION).write_text(text, encoding="utf-8")
        with contextlib.suppress(OSError):  # another process has stored it in the meantime
            os.rename(whole, folder)


def _load_graph(folder: Path) -> tuple[Run, int] | None:
    """Returns a stored graph and its number of kernels, or None. A damaged graph is deleted."""
    stored = _read_graph(folder)
    if stored is None:
        shutil.rmtree(folder, ignore_errors=True)
    return stored


def _read_graph(folder: Path) -> tuple[Run, int] | None:
    """Returns a stored graph and its number of kernels; None if it is damaged or missing."""
    with contextlib.suppress(OSError, ValueError, KeyError, RuntimeError):
        description = json.loads((folder / _DESCRIPTION).read_text(encoding="utf-8"))
        if description["sha256"] == _digest(folder):
            runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / _LIBRARY), 1)
            return runner.run, int(description["kernels"])
    return None


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in (_LIBRARY, _OPERATORS):
        if (folder / name).exists():
            digest.update((folder / name).read_bytes())
    return digest.hexdigest()
