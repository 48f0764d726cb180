"""The pass in Inductor, while `enable` is on: tunegemm's products, with Inductor's pointwise code around
them.

Inductor runs it over Dynamo's graph before it differentiates. The pass takes gates, layers with an
activation, and linear layers. Sums stay in the graph, where Inductor fuses them with the next operations.
"""

from __future__ import annotations

import sys
from typing import Any

from tunegemm.torch import takeover
from tunegemm.torch.start.after_import import AfterImport

CONFIG = "torch._inductor.config"


def install() -> None:
    """Set the pass now, or when the program imports Inductor, which takes seconds."""
    if CONFIG in sys.modules:
        set_pass()
    elif not any(getattr(finder, "name", "") == CONFIG for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport(CONFIG, set_pass))


def set_pass() -> None:
    from tunegemm.layers.graph_pass import Fusion

    config: Any = sys.modules[CONFIG]
    before = getattr(config, "pre_grad_custom_pass", None)
    if not isinstance(before, Fusion):
        config.pre_grad_custom_pass = Fusion(before)


def enable() -> takeover.Takeover:
    """Run tuned kernels for ATen's products of CUDA tensors from now on, where a record exists.

    This holds for the whole process: for ``torch.mm``, ``matmul``, ``@``, ``bmm``, ``einsum``, ``addmm``,
    ``baddbmm``, ``nn.Linear``, ``torch._scaled_mm``, ``torch.nn.functional.scaled_mm`` and ``_int_mm``, and,
    without a record, for ``torch.nn.functional.grouped_mm`` and ``torch._scaled_grouped_mm``. It works in
    eager code, under autograd (all three products) and autocast, in the output of torch.compile, and in CUDA
    graphs that are captured while it is on. A block ``with tunegemm.enable():`` ends by itself; `disable`
    ends a plain call. Blocks may nest. Every product that falls back to torch then costs one more look-up.
    Raises TunegemmError if this torch cannot replace its kernels.
    """
    install()
    return takeover.begin()
