"""Choice of the smallest graph that gives a recorded step's results, to the bit."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence

from torch import Tensor, fx

from torchrl_marl.capture.batching import batch, n_groups
from torchrl_marl.capture.folding import fold_constants
from torchrl_marl.capture.simplify import simplify

__all__ = ["batching_may_pay", "batching_pays", "may_batch", "n_operations", "reduce_graph"]

_LARGEST_PART = 0.3
# Of a batched graph, for each of its groups. Between 2.4 and 3.7 were measured on VMAS.
_FEWEST_OPERATIONS = 2

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
    simplified = _attempted(lambda: simplify(module), is_equal)
    if simplified is None:
        return module
    if not may_batch(leaves) or not batching_may_pay(simplified):
        return simplified
    batched = _attempted(
        lambda: simplify(batch(simplified, leaves, n_envs)),
        lambda graph: batching_pays(simplified, graph) and is_equal(graph),
    )
    return batched or simplified


def _attempted(
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


def may_batch(leaves: Sequence[Tensor]) -> bool:
    """Returns whether batching was measured on the device of these inputs."""
    return all(x.device.type == "cpu" for x in leaves)


def batching_may_pay(simplified: fx.GraphModule) -> bool:
    """Returns whether batching is worth a try, which takes seconds; counting groups does not."""
    least = _FEWEST_OPERATIONS * n_groups(simplified)
    return least <= _LARGEST_PART * n_operations(simplified)


def batching_pays(simplified: fx.GraphModule, batched: fx.GraphModule) -> bool:
    """Returns whether so many operations are saved that a compiled step is not slower on a CPU.

    Measured on VMAS: with 0.27 of the operations or fewer, steps were about as fast or faster; with
    0.34, a step of ``flocking`` was slower (``benchmarks/smaller_graphs.py``).
    """
    return n_operations(batched) <= _LARGEST_PART * n_operations(simplified)


def n_operations(module: fx.GraphModule) -> int:
    """Returns the number of operations of a graph, views included."""
    return sum(node.op == "call_function" for node in module.graph.nodes)
