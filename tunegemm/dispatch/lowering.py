"""How Inductor calls tunegemm from the code it writes.

By itself it would call an operator through torch's dispatcher, which costs the host more than the product of
a small batch: one decode step of a model under torch.compile was 0.73 of torch's speed (H200, 16 tokens, two
layers of 8B shapes: benchmarks/results/h200/clients-before-lowering-2026-11-21.json). Here it learns to call
a function with an output of its own, as it calls ``extern_kernels.mm``.

Inductor has no public interface for this; where it is not as expected, its code calls the operators.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from tunegemm.dispatch.forms import MATMUL, form_of

if TYPE_CHECKING:
    from tunegemm.dispatch.dispatcher import Dispatcher

_NAME = "tunegemm_matmul"


def lower(serving: Callable[[], Dispatcher]) -> None:
    """Teach Inductor `tunegemm::mm`, `bmm` and `fused`, once. Imports it: for a process that compiles."""
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

    def multiply_and_more(
        a: torch.Tensor, b: torch.Tensor, *operands: torch.Tensor, numbers: Sequence[float], epilogue: str,
        out_dtype: torch.dtype | None, accumulation: str, out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        form = form_of(MATMUL, epilogue, out_dtype, accumulation)
        return serving().fused(form, a, b, operands, numbers, out)

    choice = inductor.ExternKernelChoice(multiply, name=_NAME)
    fused_choice = inductor.ExternKernelChoice(multiply_and_more, name=f"{_NAME}_and_more")

    def called(
        choice: Any, operands: Sequence[Any], traced: Sequence[Any], halves: bool, **words: Any
    ) -> Any:
        nodes = [
            ir.ExternKernel.require_exact_strides(
                ir.ExternKernel.realize_input(node), argument.meta["val"].stride()
            )
            for node, argument in zip(operands, traced, strict=True)
        ]
        columns = nodes[1].get_size()[-1]
        size = [*nodes[0].get_size()[:-1], columns // 2 if halves else columns]
        dtype = graphs.graph.current_node.meta["val"].dtype
        layout = ir.FixedLayout(nodes[0].get_device(), dtype, size)
        found = choice.bind(nodes, layout, **words).output_node()
        return found[0] if isinstance(found, tuple) else found

    def lowered(a: Any, b: Any) -> Any:
        return called(choice, (a, b), graphs.graph.current_node.args, False)

    def fused(
        a: Any, b: Any, operands: Sequence[Any], numbers: Sequence[float], epilogue: str,
        out_dtype: torch.dtype | None = None, accumulation: str = "fast",
    ) -> Any:  # fmt: skip
        left, right, others, *_ = graphs.graph.current_node.args
        halves = form_of(MATMUL, epilogue).epilogue.gated
        return called(
            fused_choice, (a, b, *operands), (left, right, *others), halves, numbers=list(numbers),
            epilogue=epilogue, out_dtype=out_dtype, accumulation=accumulation,
        )  # fmt: skip

    register(torch.ops.tunegemm.fused.default, type_promotion_kind=None)(fused)
    for operator in (torch.ops.tunegemm.mm.default, torch.ops.tunegemm.bmm.default):
        register(operator, type_promotion_kind=None)(lowered)
