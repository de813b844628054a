"""Build of compiled graphs: the C++ code that Inductor generates becomes a library.

Torch builds a library for any model, on any machine: with a general runtime (5 s of the C++
compiler), precompiled headers (10 s, once) and test programs for the processor's vector
instructions (6 s, once). Graphs of this package need little of that.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

__all__ = ["RUNTIME", "quick_build", "reset_vector_choice"]

# What a graph needs at run time, as C++ code.
RUNTIME = Path(__file__).with_name("graph_runtime.h")

# Parts of the generated code. What stands before the kernels, and between them and the graph's
# function, is torch's general runtime.
_CODE = re.compile(
    r'.*^\} // extern "C"$(?P<kernels>.*?)^namespace torch::aot_inductor \{.*?'
    r"(?P<function>^void AOTInductorModel::run_impl\(.*)",
    re.DOTALL | re.MULTILINE,
)
_CHECKS = re.compile(
    r"^ *__check_inputs_outputs\(.*|.*static_cast<AOTInductorModelKernels&>.*", re.M
)
_OUTPUTS = re.compile(r"^ *outputs_info_\[(\d+)\]\.name", re.MULTILINE)

# Debug information and warnings are of no use here. With -O3, kernels compile for a fifth longer
# and are as fast.
_FLAGS = {"-g1": "", "-gline-tables-only": "", "-fno-omit-frame-pointer": "", "-Wall": ""}
_FLAGS["-O3"] = "-O2"


# The generated code and the interface of libraries change from version to version.
_TESTED = "2.13"


@contextlib.contextmanager
def quick_build() -> Iterator[None]:
    """Context in which Inductor's ahead-of-time compiler builds libraries quickly.

    The libraries compute the same values. Torch builds code that :data:`RUNTIME` does not know,
    and all code if its version was not tested.
    """
    if not torch.__version__.startswith(_TESTED):
        yield
        return
    from torch._inductor.codecache import AotCodeCompiler
    from torch._inductor.cpu_vec_isa import VecISA

    compiler: Any = AotCodeCompiler
    vectors: Any = VecISA
    theirs, tested = vars(compiler)["compile"], vectors.check_build
    with tempfile.TemporaryDirectory() as folder:
        compiler.compile = functools.partial(_build_library, Path(folder), compiler.compile)
        vectors.check_build = lambda isa, code: _compiler_accepts(isa.build_arch_flags())
        try:
            yield
        finally:
            compiler.compile, vectors.check_build = theirs, tested


def reset_vector_choice() -> None:
    """Makes torch choose the vector instructions again; outside of :func:`quick_build` by tests."""
    from torch._inductor import cpu_vec_isa

    kinds = [type(isa) for isa in cpu_vec_isa.supported_vec_isa_list]
    cached: list[Any] = [vars(one).get("__bool__") for kind in kinds for one in kind.__mro__]
    cached += [cpu_vec_isa.valid_vec_isa_list, vars(cpu_vec_isa.VecISA).get("_VecISA__bool__impl")]
    for one in cached:
        if hasattr(one, "cache_clear"):
            one.cache_clear()


@functools.cache
def _compiler_accepts(flags: str) -> bool:
    """Returns whether the C++ compiler accepts flags, on an empty program."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    command = [get_cpp_compiler(), *flags.split(), "-x", "c++", "-fsyntax-only", "-"]
    with contextlib.suppress(OSError):
        return not subprocess.run(command, input=b"", capture_output=True, check=False).returncode
    return False


def _build_library(
    folder: Path,
    theirs: Callable[..., Any],
    graph: Any,
    wrapper: str,
    kernels: str,
    operators: str | None,
    **more: Any,
) -> Any:
    """Builds a library in place of :meth:`AotCodeCompiler.compile`; returns its path."""
    from torch._inductor.exc import CppCompileError

    small = _with_own_runtime(wrapper)
    if small is not None and not graph.constants and more.get("device_type") == "cpu":
        with contextlib.suppress(CppCompileError):
            return _compile_and_link(folder, small, kernels, operators)
    return theirs(graph, wrapper, kernels, operators, **more)


def _with_own_runtime(wrapper: str) -> str | None:
    """Returns the code around the kernels with :data:`RUNTIME`; None if it is not as expected."""
    code = _CODE.match(wrapper)
    if code is None:
        return None
    outputs = len(_OUTPUTS.findall(wrapper))
    runtime = f"#define TORCHRL_MARL_OUTPUTS {outputs}\n{RUNTIME.read_text(encoding='utf-8')}"
    function = _CHECKS.sub("", code["function"])
    return f"{runtime}{code['kernels']}namespace torch::aot_inductor {{\n{function}"


def _compile_and_link(folder: Path, wrapper: str, kernels: str, operators: str | None) -> str:
    """Writes and compiles the two parts of the code at the same time, and links them."""
    sources = {"wrapper": wrapper, "kernels": kernels}
    for name, text in sources.items():
        (folder / f"{name}.cpp").write_text(text, encoding="utf-8")
    if operators:
        (folder / "graph.json").write_text(operators, encoding="utf-8")
    commands = [
        _compiler_command(
            folder, name, f"{name}.cpp", compile_only=True, min_optimize=name == "wrapper"
        )
        for name in sources
    ]
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(_run, commands))
    _run(_compiler_command(folder, "graph", *(f"{name}.o" for name in sources)))
    return str(folder / "graph.so")


def _compiler_command(folder: Path, name: str, *sources: str, **options: Any) -> list[str]:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    made = CppTorchDeviceOptions(
        vec_isa=pick_vec_isa(), device_type="cpu", aot_mode=True, **options
    )
    paths = [str(folder / one) for one in sources]
    builder = CppBuilder(name=name, sources=paths, output_dir=str(folder), BuildOption=made)
    return [flag for x in shlex.split(builder.get_command_line()) if (flag := _FLAGS.get(x, x))]


def _run(command: list[str]) -> None:
    from torch._inductor.exc import CppCompileError

    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CppCompileError(command, done.stdout + done.stderr)
