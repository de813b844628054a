"""Replay: prioritized sampling against plain torch, and our replay buffer against TorchRL's.

    python benchmarks/replay.py --write

Samples 128 and 1,024 of a million rows, and sets as many new priorities. Stores a batch of
60 envs x 100 steps of `balance`, and samples minibatches of one step and of three, uniformly and by
priority, eagerly and in a compiled graph.
"""

from __future__ import annotations

import argparse
import functools

import report

WAYS = (
    "torch.multinomial",
    "cumsum + searchsorted",
    "binary tree, numpy",
    "SumTree",
    "SumTree, captured",
)
N_ENVS, N_STEPS = 60, 100
KEYS = [
    ("agents", "observation"),
    ("agents", "action"),
    ("next", "agents", "observation"),
    ("next", "agents", "reward"),
    ("next", "terminated"),
]


# ------------------------------------------------------------------------ draws by priority


def measure_draws(args: argparse.Namespace) -> list[list[str]]:
    """A row for every size and way."""
    return [row for size in args.sizes for row in measure_size(size, args)]


def measure_size(size: int, args: argparse.Namespace) -> list[list[str]]:
    """The rows of one number of draws: us to draw, us to set new priorities."""
    import torch

    torch.manual_seed(0)
    values, new = torch.rand(args.rows, dtype=torch.float64), torch.rand(size).double()
    index = torch.randint(args.rows, (size,))
    draws, writes = _priority_methods(values, index, new)
    draw_timings = report.alternate(draws, args.rounds, seconds=args.seconds, warmup=3)
    set_ = report.alternate(writes, args.rounds, seconds=args.seconds, warmup=3)
    return [
        [
            f"{size:,}",
            name,
            f"{1e6 * draw_timings.median(name):.0f}",
            f"{1e6 * set_.median(name):.0f}" if name in writes else "",
            draw_timings.ratio_text(name, WAYS[0]),
            draw_timings.ratio_text(name, WAYS[1]),
            draw_timings.rounds(),
        ]
        for name in draws
    ]


def _priority_methods(values, index, new):
    """What draws, and what sets priorities, by name."""
    import torch

    from torchrl_marl.capture import capture
    from torchrl_marl.functional.sum_tree import SumTree

    size, capacity = len(index), len(values)

    def running_sum():
        ends = values.cumsum(0)
        return torch.searchsorted(ends, torch.rand(size, dtype=torch.float64) * ends[-1])

    tree = SumTree(capacity)
    tree.set(torch.arange(capacity), values)
    tensors = tree.tensors

    def uniform():
        return torch.rand(size, dtype=torch.float64)

    def write(index, new, tensors):
        tree.set(index, new)
        return tree.total + 0

    draw_program = capture(lambda x, tensors: tree.sample(x), uniform(), tensors, name="draws")
    update_program = capture(write, index, new, tensors, name="new priorities")
    sample, update = numpy_tree(values.numpy(), index.numpy(), new.numpy())
    draws = (
        lambda: torch.multinomial(values, size, replacement=True),
        running_sum,
        sample,
        lambda: tree.sample(uniform()),
        lambda: draw_program.flat([uniform(), *tensors]),
    )
    writes = {
        WAYS[0]: lambda: values.index_copy_(0, index, new),
        WAYS[2]: update,
        WAYS[3]: lambda: tree.set(index, new),
        WAYS[4]: lambda: update_program.flat([index, new, *tensors]),
    }
    return dict(zip(WAYS, draws)), writes


def numpy_tree(values, index, new):
    """The usual binary tree in an array; all draws, and all new values, level by level."""
    import numpy as np

    leaves = 1 << (len(values) - 1).bit_length()
    tree = np.zeros(2 * leaves)
    tree[leaves : leaves + len(values)] = values
    level = leaves
    while level > 1:
        level //= 2
        tree[level : 2 * level] = tree[2 * level : 4 * level].reshape(-1, 2).sum(1)

    def sample():
        remainder, node = np.random.rand(len(index)) * tree[1], np.ones(len(index), int)
        while node[0] < leaves:
            left = tree[2 * node]
            right = remainder >= left
            remainder = np.where(right, remainder - left, remainder)
            node = 2 * node + right
        return node - leaves

    def update():
        tree[index + leaves] = new
        node = np.unique((index + leaves) // 2)
        while node[0] >= 1:
            tree[node] = tree[2 * node] + tree[2 * node + 1]
            if node[0] == 1:
                break
            node = np.unique(node // 2)

    return sample, update


# -------------------------------------------------------------------------------- the store


def measure_store(args: argparse.Namespace) -> list[list[str]]:
    """A row for storing a batch, and one for each way to draw from a full store."""
    import torch

    torch.manual_seed(0)
    rows = []
    stores = _make_stores(args)
    batch = _batch()
    flat = batch.reshape(-1)
    timings = report.alternate(
        {
            name: functools.partial(store.extend, flat if "TorchRL" in name else batch)
            for name, store in stores.items()
        },
        args.rounds,
        seconds=args.seconds,
        warmup=2,
    )
    rows += _table_rows(f"store {len(flat):,} frames", timings)
    for size in args.sizes:
        for n_step in (1, 3):
            timings = report.alternate(
                _draw_methods(stores, size, n_step), args.rounds, seconds=args.seconds, warmup=3
            )
            rows += _table_rows(f"draw {size:,}, {report.count_of(n_step, 'step')}", timings)
    return rows


def _table_rows(heading: str, timings: report.Timings) -> list[list[str]]:
    names = list(timings.seconds)
    baseline = next(name for name in names if "TorchRL" in name)
    return [
        [
            heading,
            name,
            f"{1e6 * timings.median(name):,.0f}",
            timings.ratio_text(name, baseline),
            timings.rounds(),
        ]
        for name in names
    ]


def _batch():
    """Steps as `balance` gives them: three agents that see 16 numbers, all alive."""
    import torch
    from tensordict import TensorDict

    def observed():
        return torch.randn(N_ENVS, N_STEPS, 3, 16)

    done = torch.rand(N_ENVS, N_STEPS, 1) < 0.02
    step = {"observation": observed(), "action": torch.randn(N_ENVS, N_STEPS, 3, 2)}
    reward = torch.randn(N_ENVS, N_STEPS, 3, 1)
    next_step = {"agents": {"observation": observed(), "reward": reward}}
    source = {"agents": step, "next": {**next_step, "done": done, "terminated": done.clone()}}
    return TensorDict(source, [N_ENVS, N_STEPS])


def _make_stores(args):
    """Full stores of as many rows; TorchRL's draws uniformly, or by our sampler."""
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    from torchrl_marl.contrib import TreeSampler
    from torchrl_marl.learners import Priority, TeamReplay

    n_steps = args.rows // N_ENVS
    capacity = n_steps * N_ENVS
    sampler = TreeSampler(capacity, alpha=0.6, beta=0.4)
    stores = {
        "TorchRL's buffer": TensorDictReplayBuffer(storage=LazyTensorStorage(capacity)),
        "TorchRL's buffer, TreeSampler": TensorDictReplayBuffer(
            storage=LazyTensorStorage(capacity), sampler=sampler, priority_key="td_error"
        ),
        "TeamReplay": TeamReplay(n_steps, N_ENVS, KEYS),
        "TeamReplay, prioritized": TeamReplay(n_steps, N_ENVS, KEYS, Priority()),
    }
    batch = _batch()
    for _ in range(-(-n_steps // N_STEPS)):
        for name, store in stores.items():
            store.extend(batch.reshape(-1) if "TorchRL" in name else batch)
    return stores


def _draw_methods(stores, size: int, n_step: int):
    """What draws a minibatch, by name; TorchRL's buffer of single steps only."""
    draws = {name: functools.partial(_draw, stores[name], size) for name in list(stores)[:2]}
    for name in list(stores)[2:]:
        store = stores[name]
        draws[name] = functools.partial(_read_minibatch, store, size, n_step)
        draws[f"{name}, captured"] = _captured_draw(store, size, n_step)
    return draws


def _draw(buffer, size: int):
    import torch

    found = buffer.sample(size)
    if "priority_weight" in found.keys():
        buffer.update_priority(found["index"], torch.rand(size))
    return found


def _read_minibatch(store, size: int, n_step: int):
    import torch

    data = store.look(store.rows(1, size)[0], n_step, 0.99)
    store.update_priority(data["index"], torch.rand(size))
    return data


def _captured_draw(store, size: int, n_step: int):
    import torch

    from torchrl_marl.capture import capture

    def update(rows, error, tensors):
        data = store.look(rows, n_step, 0.99)
        store.update_priority(data["index"], error)
        return dict(data.flatten_keys().items())

    tensors = store.tensors
    rows, error = store.rows(1, size)[0], torch.rand(size)
    program = capture(update, rows, error, tensors, name="drawing a minibatch")
    return lambda: program.flat([store.rows(1, size)[0], torch.rand(size), *tensors])


# ----------------------------------------------------------------------------- the report


def measure(args: argparse.Namespace) -> tuple[list[list[str]], list[list[str]]]:
    """The rows of both tables."""
    return measure_draws(args), measure_store(args)


def main() -> None:
    """Measures and reports."""
    parser = report.parser(__doc__, threads=(1,))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=8.0, help="time limit of one comparison")
    args = parser.parse_args()
    if args.quick:
        args.write = False
        args.rows, args.sizes, args.rounds = 12_000, [16], 2
    draws = ["drawn", "", "us to draw", "us to set", *(f"times {w}" for w in WAYS[:2]), "rounds"]
    store = ["", "", "us", "times TorchRL's buffer", "rounds"]
    sections = []
    for n, rows in report.for_each_number_of_threads(measure, args.threads, args).items():
        threads = report.count_of(n, "thread")
        sections += [
            (f"Draws by priority, {threads}", report.markdown_table(draws, rows[0])),
            (f"The store, {threads}", report.markdown_table(store, rows[1])),
        ]
    report.publish(
        "replay",
        "Replay",
        sections,
        {"rows": f"{args.rows:,}", "frames stored": f"{N_ENVS} envs x {N_STEPS} steps"},
        """All candidates of a table's part are timed in one process, in random order every round;
        microseconds are medians over the rounds, "times" is the median (and the quartiles) of the
        rounds' ratios: how many times faster than the baseline. Setting is new priorities for as
        many rows as are drawn; with the running sum made anew for each draw, and for
        torch.multinomial, it is writing them to an array. Drawing from a store is drawing rows and
        reading them with their next steps, and setting their priorities where it draws by
        priority. TorchRL's buffer reads single steps only, in the rows of three steps, too; its
        compiled sum tree does not load with this torch, so that it draws by priority with our
        sampler. Captured is the same in one compiled graph.""",
        write=args.write,
    )


if __name__ == "__main__":
    main()
