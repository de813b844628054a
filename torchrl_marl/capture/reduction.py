"""Choice of the smallest graph that gives a recorded step's results, to the bit."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

import torch.utils._pytree as pytree
from torch import Tensor, fx

from torchrl_marl.capture.batching import Groups, batch
from torchrl_marl.capture.chains import sum_chains
from torchrl_marl.capture.folding import fold_constants
from torchrl_marl.capture.simplify import simplify
from torchrl_marl.capture.writes import value_of

__all__ = [
    "batching_may_pay",
    "batching_pays",
    "batching_was_measured",
    "n_operations",
    "reduce_graph",
]

_LARGEST_PART = 0.6
# Of a batched graph, for each of its groups. Between 2.2 and 3.7 were measured on VMAS.
_PER_GROUP = 2.5
# Of all results, for each operation that batching saves. A batched graph keeps more results in
# memory; beyond the cache, this costs more than the instructions of many small operations.
_MOST_ELEMENTS = 15_000

_logger = logging.getLogger("torchrl_marl.capture")


def reduce_graph(
    module: fx.GraphModule,
    leaves: Sequence[Tensor],
    n_envs: int,
    is_equal: Callable[[fx.GraphModule], bool],
) -> fx.GraphModule:
    """Returns a smaller graph with the same results.

    The graph is simplified (:func:`~torchrl_marl.capture.simplify.simplify`). Then operations of
    the same kind are batched (:func:`~torchrl_marl.capture.batching.batch`), if that pays
    (:func:`batching_pays`). A graph without a rule for one of its operations is returned as it is.

    Args:
        module (GraphModule): recorded graph.
        leaves (sequence of Tensor): example inputs.
        n_envs (int): number of envs.
        is_equal (callable): ``is_equal(graph)`` returns whether a graph's results are those of the
            recorded graph, to the bit, in states that the simulator reaches.
    """
    fold_constants(module)
    simplified = _try_rewrite(lambda: simplify(module), is_equal)
    if simplified is None:
        return module
    if not batching_was_measured(leaves):
        return simplified
    groups = Groups(sum_chains(simplified))
    if not batching_may_pay(simplified, groups):
        return simplified
    batched = _try_rewrite(
        lambda: simplify(batch(groups, leaves, n_envs)),
        lambda graph: batching_pays(simplified, graph) and is_equal(graph),
    )
    return batched or simplified


def _try_rewrite(
    make: Callable[[], fx.GraphModule], is_good: Callable[[fx.GraphModule], bool]
) -> fx.GraphModule | None:
    """Returns a smaller graph; None if it is not good, or an operation has no rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.vmap warns of operations that it loops over
        try:
            graph = make()
            return graph if is_good(graph) else None
        except Exception as error:  # torch raises errors of many kinds for such operations
            _logger.debug("a graph is not made smaller: %s", error)
            return None


def batching_was_measured(leaves: Sequence[Tensor]) -> bool:
    """Returns whether batching was measured on the device of these inputs."""
    return all(x.device.type == "cpu" for x in leaves)


def batching_may_pay(simplified: fx.GraphModule, groups: Groups) -> bool:
    """Returns whether batching is worth a try, which takes seconds; making groups does not."""
    return _is_worthwhile(simplified, int(_PER_GROUP * len(groups)), _n_elements(simplified))


def batching_pays(simplified: fx.GraphModule, batched: fx.GraphModule) -> bool:
    """Returns whether a compiled step is faster, or not slower, on a CPU if it is batched.

    It is if so many operations are saved, and the results are so small, as in the scenarios of VMAS
    whose batched steps were faster (``benchmarks/smaller_graphs.py``).
    """
    return _is_worthwhile(simplified, n_operations(batched), _n_elements(batched))


def _is_worthwhile(simplified: fx.GraphModule, operations: int, elements: int) -> bool:
    before = n_operations(simplified)
    small = elements <= _MOST_ELEMENTS * (before - operations)
    return small and operations <= _LARGEST_PART * before


def _n_elements(module: fx.GraphModule) -> int:
    """Returns the number of elements of the results of all operations of a graph."""
    return sum(
        x.numel()
        for node in module.graph.nodes
        if node.op == "call_function"
        for x in pytree.tree_leaves(value_of(node))
        if isinstance(x, Tensor)
    )


def n_operations(module: fx.GraphModule) -> int:
    """Returns the number of operations of a graph, views included."""
    return sum(node.op == "call_function" for node in module.graph.nodes)
