"""Metadata of the package; tool settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(
    r'__version__ = "([^"]+)"', (HERE / "torchrl_marl" / "version.py").read_text(encoding="utf-8")
)[1]

# Address of the public repository, such as https://github.com/OWNER/NAME, once there is one.
ADDRESS = ""


def description(address: str) -> str:
    """Returns the README for a package index, where paths of the repository lead nowhere.

    Its links and pictures lead to the repository's address. Without one, only their text is left.
    """
    text = (HERE / "README.md").read_text(encoding="utf-8")
    if not address:
        text = re.sub(r'<img src="(?!http)[^>]*>\n*', "", text)
        return re.sub(r"\[([^\]]*)\]\((?!http)[^)]*\)", r"\1", text)
    files = f"{address}/blob/v{VERSION}/"
    text = re.sub(r'(<img src=")(?!http)([^"]*)"', rf'\1{files}\2?raw=true"', text)
    return re.sub(r"(\]\()(?!http)", rf"\1{files}", text)


EXTRAS = {
    "vmas": ["vmas>=1.5"],
    "pettingzoo": ["pettingzoo[classic,butterfly,sisl]>=1.26", "mpe2"],
    "jaxmarl": ["jaxmarl>=0.2", "six"],
    "mujoco": ["gymnasium-robotics>=1.4", "mujoco>=4.0"],
    "warp": ["gymnasium-robotics>=1.4", "mujoco-warp>=4.0"],
    "log": ["tensorboard", "wandb>=0.19.10", "mlflow"],
    "plot": ["matplotlib>=3.8"],
    "video": ["matplotlib>=3.8", "imageio-ffmpeg>=0.5"],
    "tune": ["optuna>=4"],
    "slurm": ["submitit>=1.5"],
    "completion": ["argcomplete>=3"],
    "vault": ["tensorstore>=0.1.60"],
    "ray": ["ray>=2.40"],
    "serve": ["msgpack>=1"],
    "export": ["onnx>=1.18", "onnxscript>=0.5", "onnxruntime>=1.20"],
}
SITE = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10", "mkdocstrings[python]>=0.27", "latex2mathml"]
# In a notebook TorchRL imports Ray, which complains where there are no widgets.
EXTRAS["docs"] = [*SITE, "jupyterlab", "nbconvert", "ipywidgets"]
EXTRAS["test"] = [
    *EXTRAS["vmas"],
    *EXTRAS["pettingzoo"],
    *EXTRAS["jaxmarl"],
    *EXTRAS["mujoco"],
    *EXTRAS["video"],
    *EXTRAS["export"],
    *EXTRAS["tune"],
    *EXTRAS["ray"],
    *EXTRAS["slurm"],
    *EXTRAS["completion"],
    *EXTRAS["vault"],
    *EXTRAS["serve"],
    *SITE,
    "lbforaging",
    "rware",
    "magent2",
    "open-spiel",
    "pytest>=8",
    "pytest-xdist",
    "scipy",
    "hypothesis",
    "ipykernel",
    "ipywidgets",
    "nbclient",
    "nbformat",
    "mypy",
    "ruff",
    "tensorboard",
]
EXTRAS["all"] = sorted({requirement for extra in EXTRAS.values() for requirement in extra})
# It pins another MuJoCo than the extra mujoco, so it is installed alone.
EXTRAS["mjlab"] = ["mjlab>=1.6,<1.7"]

setup(
    name="torchrl_marl",
    version=VERSION,
    description="Multi-agent reinforcement learning on TorchRL: one batched tensor program.",
    long_description=description(ADDRESS),
    long_description_content_type="text/markdown",
    url=ADDRESS or None,
    license="MIT",
    license_files=["LICENSE"],
    keywords="multi-agent reinforcement learning, MARL, PyTorch, TorchRL, MAPPO, VMAS",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["torchrl_marl", "torchrl_marl.*"]),
    package_data={
        "torchrl_marl": [
            "configs/*.yaml",
            "capture/graph_runtime.h",
            "capture/graphs/*.yaml",
            "capture/graphs/*/*/*",
            "apps/suites/*.yaml",
            "apps/reports/*.yaml",
            "apps/reports/assets/*",
            "apps/external/protocol.md",
            "py.typed",
        ]
    },
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11,<2.14",
        "torchrl>=0.14,<0.15",
        "pyyaml>=6",
        "jinja2",
        "numpy",
        "tqdm",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["torchrl-marl = torchrl_marl.apps.cli.main:main"]},
)
