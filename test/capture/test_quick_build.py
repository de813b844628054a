"""The quick build of compiled graphs: few commands, a small runtime, the same values."""

import stat
import subprocess
from types import SimpleNamespace

import pytest
import torch

from torchrl_marl.capture import build, capture, inductor, stored

WRAPPER = """torch::stuff
} // extern "C"
extern "C" void kernel_0(float* x);
namespace torch::aot_inductor {
    outputs_info_[0].name = "output0";
    outputs_info_[1].name = "output1";
} // namespace torch::aot_inductor
void AOTInductorModel::run_impl(
) {
    __check_inputs_outputs(input_handles, output_handles);
    [[maybe_unused]] auto& kernels = static_cast<AOTInductorModelKernels&>(*this->kernels_.get());
    kernel_0(x);
}
"""


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Commands of the C++ compiler; torch may not run other commands."""
    from torch._inductor import cpp_builder
    from torch._inductor.cpu_vec_isa import VecISA

    def refuse(*_):
        raise AssertionError("torch builds a program")

    found, run = [], build._run
    monkeypatch.setattr(inductor, "_LARGE", 0)
    monkeypatch.setattr(stored, "_cache_folder", lambda: tmp_path)
    monkeypatch.setattr(cpp_builder, "_run_compile_cmd", refuse)
    monkeypatch.setattr(VecISA, "_probe_load", refuse)
    monkeypatch.setattr(build, "_run", lambda command: (found.append(command), run(command)))
    build.reset_vector_choice()
    yield found
    build.reset_vector_choice()


def step(x, y):
    y.add_(x.sum(0))
    return (x @ x.T).tanh() * torch.tensor([1.0, 2.0, 3.0]), torch.rand(2) + y


def values(run):
    torch.manual_seed(3)
    y = torch.ones(2)
    return *run(torch.arange(6.0).view(3, 2) / 9, y), y


@pytest.mark.compiled
def test_build_takes_two_compilations_and_a_link(commands):
    run = capture(step, torch.ones(3, 2), torch.ones(2), name="a test")
    names = [command[command.index("-o") + 1].rpartition("/")[2] for command in commands]
    assert sorted(names[:2]) == ["kernels.o", "wrapper.o"] and names[2:] == ["graph.so"]
    for x, y in zip(values(run), values(step)):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=5e-7)  # a compiled tanh differs


@pytest.mark.compiled
def test_instructions_unknown_to_the_compiler_are_not_used(commands, monkeypatch, tmp_path):
    from torch._inductor import config
    from torch._inductor.cpp_builder import get_cpp_compiler

    script = tmp_path / "g++"
    refuse = 'case "$1" in -mavx*) echo "unknown flag $1" >&2; exit 1;; esac; shift'
    script.write_text(
        f'#!/bin/bash\ncheck() {{ while [ $# -gt 0 ]; do {refuse}; done; }}\ncheck "$@"\n'
        f'exec {get_cpp_compiler()} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    build._compiler_accepts.cache_clear()
    with config.patch({"cpp.cxx": (str(script),)}):
        run = capture(step, torch.ones(3, 2), torch.ones(2), name="a test")
    build._compiler_accepts.cache_clear()
    assert len(commands) == 3
    assert not [flag for command in commands for flag in command if flag.startswith("-mavx")]
    for x, y in zip(values(run), values(step)):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=5e-7)


@pytest.mark.compiled
def test_failed_operation_raises_and_keeps_grad_mode(commands):
    function = capture(
        lambda x, y, i: (x.index_select(0, i) + 1, y.index_select(0, i) * 2),
        *(torch.ones(3, 2), torch.ones(3, 2), torch.tensor([0, 1])),
        name="a test",
    )
    with pytest.raises(RuntimeError):
        function(torch.ones(3, 2), torch.ones(3, 2), torch.tensor([0, 7]))
    assert torch.is_grad_enabled()
    assert function(torch.ones(3, 2), torch.ones(3, 2), torch.tensor([0, 2]))[1].tolist() == [
        [2.0, 2.0],
        [2.0, 2.0],
    ]


def test_runtime_of_torch_is_replaced():
    code = build._with_own_runtime(WRAPPER)
    assert code.startswith("#define TORCHRL_MARL_OUTPUTS 2\n") and "torch::stuff" not in code
    kept = ('extern "C" void kernel_0(float* x);', "kernel_0(x);", "::run_impl(\n) {")
    assert all(text in code for text in kept)
    assert "__check_inputs_outputs" not in code and "kernels_.get()" not in code


def test_unexpected_code_is_built_by_torch(tmp_path, monkeypatch):
    asked = []

    def theirs(*given, **_):
        asked.append(given[1])
        return "their library"

    def fails(*_):
        from torch._inductor.exc import CppCompileError

        raise CppCompileError(["g++"], "error: unknown construct")

    monkeypatch.setattr(build, "_compile_and_link", fails)
    plain, holding = SimpleNamespace(constants={}), SimpleNamespace(constants={"c": 1})
    for graph, wrapper in ((plain, "other"), (holding, WRAPPER), (plain, WRAPPER)):
        found = build._build_library(tmp_path, theirs, graph, wrapper, "", None, device_type="cpu")
        assert found == "their library"
    assert asked == ["other", WRAPPER, WRAPPER]


@pytest.mark.compiled
@pytest.mark.parametrize("wrapped", [False, True])
def test_failed_quick_build_falls_back_to_torch(tmp_path, monkeypatch, wrapped):
    from torch._inductor.exc import CppCompileError, InductorError

    tried = []

    def compile(module, inputs, options):
        from torch._inductor.cpu_vec_isa import VecISA

        tried.append(VecISA.check_build)
        if len(tried) == 1:
            error = CppCompileError(["g++"], "error: unknown instruction")
            raise InductorError(error, None) if wrapped else error
        (tmp_path / "theirs.so").write_bytes(b"library")
        return str(tmp_path / "theirs.so")

    monkeypatch.setattr(torch._inductor, "aot_compile", compile)
    stored._compile_graph(None, [], {}, tmp_path / "graphs" / "key")
    assert (tmp_path / "graphs" / "key" / "graph.so").read_bytes() == b"library"
    assert len(tried) == 2 and tried[0] is not tried[1]


def test_compiler_flags_are_tried_on_an_empty_program():
    assert build._compiler_accepts("-O1") and not build._compiler_accepts("-mno-such-instructions")


def test_missing_compiler_accepts_no_flags(monkeypatch):
    def run(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", run)
    assert not build._compiler_accepts("-O7")


def test_untested_torch_version_uses_its_own_build(monkeypatch):
    from torch._inductor.codecache import AotCodeCompiler

    theirs = vars(AotCodeCompiler)["compile"]
    with build.quick_build():
        assert vars(AotCodeCompiler)["compile"] is not theirs
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with build.quick_build():
        assert vars(AotCodeCompiler)["compile"] is theirs
