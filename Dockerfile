# An image that runs both commands of the README. It is linted (hadolint), and a test compares it with the
# README. It has not been built yet, since no Docker daemon was available. To build and try it:
#
#     docker build -t torchrl_marl .
#     docker run --rm -it -v "$PWD/runs:/home/someone/runs" torchrl_marl           # torchrl-marl train
#     docker run --rm -it torchrl_marl torchrl-marl list
#     docker build -t torchrl_marl:test --target test . && docker run --rm torchrl_marl:test  # pytest
#
# PyTorch is the default build. For a much smaller CPU build, or another CUDA version, give the address from
# pytorch.org/get-started: --build-arg TORCH_INDEX=ADDRESS

FROM python:3.12-slim-bookworm AS system
# execution=compile needs a C++ compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 someone && install --directory --owner=1000 --group=1000 /home/someone/runs
USER 1000:1000
WORKDIR /home/someone
RUN python3 -m venv /home/someone/.venv
ENV PATH=/home/someone/.venv/bin:$PATH \
    VIRTUAL_ENV=/home/someone/.venv \
    MPLBACKEND=agg \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
ARG TORCH_INDEX=""
# hadolint ignore=DL3013
RUN pip install "torch>=2.11,<2.14" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}

# The README's second command: the tests, in a checkout.
FROM system AS test
COPY --chown=1000:1000 . /home/someone/checkout
WORKDIR /home/someone/checkout
RUN pip install -e '.[test]'
CMD ["pytest", "-n", "2"]

FROM system AS wheel
COPY --chown=1000:1000 . /home/someone/checkout
RUN pip wheel --no-deps --wheel-dir /home/someone/wheels /home/someone/checkout

# The README's first command: train. Last, so that it is the default target.
FROM system AS train
COPY --from=wheel /home/someone/wheels /home/someone/wheels
RUN pip install "$(ls /home/someone/wheels/torchrl_marl-*.whl)[vmas,plot]"
CMD ["torchrl-marl", "train"]
