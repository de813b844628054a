"""Capture of tensor functions as graphs: tracing, compilation and CUDA graphs."""

from typing import TYPE_CHECKING

from torchrl_marl._lazy import attach

if TYPE_CHECKING:
    from torchrl_marl.capture.cuda_graph import CudaGraph
    from torchrl_marl.capture.execution import check_execution
    from torchrl_marl.capture.program import Program, capture
    from torchrl_marl.capture.syncs import count_syncs, graph_syncs
    from torchrl_marl.capture.tracing import Trace, trace

__getattr__, __dir__, __all__ = attach(__name__)
