"""How Inductor calls tunegemm from the code it writes.

By itself it would call an operator through torch's dispatcher, which costs the host more than the product of
a small batch: one decode step of a model under torch.compile was 0.73 of torch's speed (H200, 16 tokens, two
layers of 8B shapes, 2026-11-21). Here it learns to call a function with an output of its own, as it calls
``extern_kernels.mm``.

Inductor has no public interface for this; where it is not as expected, its code calls the operators.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tunegemm.dispatch.dispatcher import Dispatcher

_NAME = "tunegemm_matmul"


def lower(serving: Callable[[], Dispatcher]) -> None:
    """Teach Inductor `tunegemm::mm` and `bmm`, once. Imports it: for a process that compiles."""
    with suppress(ImportError, AttributeError):
        _lower(serving)


def _lower(serving: Callable[[], Dispatcher]) -> None:
    inductor: Any = importlib.import_module("torch._inductor.select_algorithm")
    ir: Any = importlib.import_module("torch._inductor.ir")
    register: Any = importlib.import_module("torch._inductor.lowering").register_lowering
    graphs: Any = importlib.import_module("torch._inductor.virtualized").V
    if hasattr(inductor.extern_kernels, _NAME):
        return

    def multiply(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return serving().matmul(a, b, out)

    choice = inductor.ExternKernelChoice(multiply, name=_NAME)

    def lowered(a: Any, b: Any) -> Any:
        traced = [argument.meta["val"] for argument in graphs.graph.current_node.args]
        nodes = [
            ir.ExternKernel.require_exact_strides(ir.ExternKernel.realize_input(node), tensor.stride())
            for node, tensor in zip((a, b), traced, strict=True)
        ]
        size = [*nodes[0].get_size()[:-1], nodes[1].get_size()[-1]]
        layout = ir.FixedLayout(nodes[0].get_device(), nodes[0].get_dtype(), size)
        found = choice.bind(nodes, layout).output_node()
        return found[0] if isinstance(found, tuple) else found

    for operator in (torch.ops.tunegemm.mm.default, torch.ops.tunegemm.bmm.default):
        register(operator, type_promotion_kind=None)(lowered)
