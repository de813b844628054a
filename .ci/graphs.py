"""Builds the compiled graphs that come with the package: those of the default recipe.

    python .ci/graphs.py

Run it after a change of the default recipe, of the capture or of torch; until then
``test/capture/test_shipped.py`` fails. It needs Linux and a processor with AVX-512. Each kind of
processor is built in a new process.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPES = ("vmas_balance_mappo",)  # with one thread


def build(kind: str) -> None:
    """Trains a batch of each recipe; compiled graphs are written into the package."""
    import torch
    import torch._inductor.config as inductor

    import torchrl_marl
    from torchrl_marl.capture import build, shipped, stored
    from torchrl_marl.training import background_compile

    vectors, _ = shipped.KINDS[kind]
    assert torch.backends.cpu.get_cpu_capability() == vectors, f"{kind} cannot be built here"
    folder = shipped.FOLDER / kind
    folder.mkdir(parents=True)
    # The compiler's code, for any processor of the kind instead of this one.
    build._FLAGS.update({"-march=native": f"-march={kind}", "-mavx512vnni": "", "-lgomp": ""})
    # Names of files in messages, without the folders of this machine.
    temporary = f"{tempfile.gettempdir()}/{tempfile.gettempprefix()}"
    names = {torch.__path__[0]: "torch", temporary: "graph_"}
    maps = [f"-ffile-prefix-map={old}={new}" for old, new in names.items()]
    command = build._compiler_command
    build._compiler_command = lambda *args, **options: [*command(*args, **options), *maps]
    inductor.cpp.simdlen = 512 if vectors == "AVX512" else 256
    stored._cache_folder, stored._describe_machine = lambda: folder, shipped.machine
    stored._find_shipped = lambda *_: None
    background_compile._is_shipped = lambda config: True  # no second process compiles
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as run:
            settings: dict[str, Any] = {"folder": f"{run}/run", "logging": {"progress": False}}
            next(iter(torchrl_marl.iterate(recipe, **settings)))


def main() -> None:
    """Builds the graphs of each kind of processor."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    kind = parser.parse_args().kind
    if kind is not None:
        return build(kind)
    import torchrl_marl
    from torchrl_marl.capture import shipped

    shutil.rmtree(shipped.FOLDER, ignore_errors=True)
    shipped.FOLDER.mkdir()
    recipes = Path(torchrl_marl.__file__).parent / "configs"
    for recipe in RECIPES:
        shutil.copy(recipes / f"{recipe}.yaml", shipped.FOLDER)
    for kind, (vectors, _) in shipped.KINDS.items():
        with tempfile.TemporaryDirectory() as cache:
            compiler_variables = {
                "TORCHINDUCTOR_CACHE_DIR": cache,
                "ATEN_CPU_CAPABILITY": vectors.lower(),
            }
            command = [sys.executable, __file__, "--kind", kind]
            subprocess.run(command, env=os.environ | compiler_variables, check=True)


if __name__ == "__main__":
    main()
