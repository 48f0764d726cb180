"""Tells Inductor how to call tunegemm from the code that it writes.

By default Inductor calls an operator through torch's dispatcher, which costs the host more than a product of
few rows: a decode step of a model under torch.compile ran at 0.73 of torch's speed (H200, 16 tokens, two
layers of 8B shapes, 2026-11-21). This module makes it call a function that writes to a given output, as it
calls ``extern_kernels.mm``. Inductor has no public interface for this. Where its internals are not as
expected, its code calls the operators.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from tunegemm.dispatch import api
from tunegemm.dispatch.forms import MATMUL, form_of

_NAME = "tunegemm_product"
#: What the sites begin with whose number of rows may change.
_ANY_ROWS = "any rows; "


def site_of(operands: Sequence[torch.Tensor], *form: object) -> str:
    """The facts that compiled code guarantees about traced operands. Empty if an extent or stride may change,
    except the number of rows: the first extent of `a`, and of every operand with as many rows."""
    rows = operands[0].shape[0]
    is_symbolic, places = type(rows) is not int, []
    for each in operands:
        shape = list(each.shape)
        if is_symbolic and shape and type(shape[0]) is not int and str(shape[0]) == str(rows):
            shape[0] = 0
        if any(type(extent) is not int for extent in (*shape, *each.stride())):
            return ""
        places.append(f"{each.device} {each.dtype} {tuple(shape)} {each.stride()}")
    return _ANY_ROWS * is_symbolic + "; ".join((*places, *map(str, form)))


class _Inductor:
    """The parts of Inductor that `lower` extends, imported late because the import takes seconds."""

    def __init__(self) -> None:
        self.select, self.ir, self.lowering, virtualized = (
            importlib.import_module(f"torch._inductor.{name}")
            for name in ("select_algorithm", "ir", "lowering", "virtualized")
        )
        self.graphs = virtualized.V

    def knows(self, name: str) -> bool:
        return hasattr(self.select.extern_kernels, name)

    def as_traced(self, node: Any, traced: Any) -> Any:
        """An operand in memory, with the strides that it had when it was traced."""
        realized = self.ir.ExternKernel.realize_input(node)
        return self.ir.ExternKernel.require_exact_strides(realized, traced.meta["val"].stride())

    def result(self, choice: Any, nodes: Sequence[Any], size: Sequence[Any], **words: Any) -> Any:
        """The node of a call that writes a dense result."""
        dtype = self.graphs.graph.current_node.meta["val"].dtype
        layout = self.ir.FixedLayout(nodes[0].get_device(), dtype, size)
        result = choice.bind(nodes, layout, **words).output_node()
        return result[0] if isinstance(result, tuple) else result

    def register(self, operator: Any, call: Callable[..., Any]) -> None:
        """Make Inductor lower an operator by calling a function."""
        by_operator = self.lowering.fallback_handler(operator, add_to_fallback_set=False)

        def lowered(*arguments: Any, **keywords: Any) -> Any:
            # C++ calls no Python functions, but operators.
            return (by_operator if self.graphs.graph.cpp_wrapper else call)(*arguments, **keywords)

        self.lowering.register_lowering(operator, type_promotion_kind=None)(lowered)
        self.lowering.add_needs_realized_inputs(operator)  # as for aten.mm


def lower() -> None:
    """Teach Inductor `tunegemm::mm`, `bmm` and `fused`, once. It imports Inductor, so only processes that
    compile call it."""
    with suppress(ImportError, AttributeError):
        inductor = _Inductor()
        if not inductor.knows(_NAME):
            _lower(inductor)


def _lower(inductor: _Inductor) -> None:
    # Inductor keeps code with these names and arguments on disk: see `ops.CALLS`.
    # vLLM keeps code by its records only, and code from before `any_rows` does not mention rows.
    def product(
        a: torch.Tensor, b: torch.Tensor, *, site: str, any_rows: bool = False, out: torch.Tensor
    ) -> torch.Tensor:
        return api.dispatcher.compiled((site, a.size(0)) if any_rows else site, plain, a, b, (), (), out)

    def fused_product(
        a: torch.Tensor, b: torch.Tensor, *operands: torch.Tensor, site: str, any_rows: bool = False,
        numbers: Sequence[float], epilogue: str, out_dtype: torch.dtype | None, accumulation: str,
        out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        form, place = form_of(MATMUL, epilogue, out_dtype, accumulation), (site, a.size(0))
        return api.dispatcher.compiled(place if any_rows else site, form, a, b, operands, numbers, out)

    plain = form_of(MATMUL, "")
    choice = inductor.select.ExternKernelChoice(product, name=_NAME)
    fused_choice = inductor.select.ExternKernelChoice(fused_product, name=f"{_NAME}_and_more")

    def called(
        choice: Any, operands: Sequence[Any], traced: Sequence[Any], columns: Any, **words: Any
    ) -> Any:
        nodes = [inductor.as_traced(node, source) for node, source in zip(operands, traced, strict=True)]
        site = site_of([argument.meta["val"] for argument in traced], *words.values())
        any_rows, size = site.startswith(_ANY_ROWS), [*nodes[0].get_size()[:-1], columns]
        return inductor.result(choice, nodes, size, site=site, any_rows=any_rows, **words)

    def plainly(a: Any, b: Any, *, records: str = "") -> Any:
        return called(choice, (a, b), inductor.graphs.graph.current_node.args, b.get_size()[-1])

    def fused(
        a: Any, b: Any, operands: Sequence[Any], numbers: Sequence[float], *asked: Any, records: str = ""
    ) -> Any:
        left, right, others, *_ = inductor.graphs.graph.current_node.args
        form = form_of(MATMUL, *asked)
        columns = b.get_size()[-1] // (2 if form.epilogue.gated else 1)
        return called(
            fused_choice, (a, b, *operands), (left, right, *others), columns, numbers=list(numbers),
            epilogue=form.text, out_dtype=form.out_dtype, accumulation=form.accumulation,
        )  # fmt: skip

    inductor.register(torch.ops.tunegemm.fused.default, fused)
    for operator in (torch.ops.tunegemm.mm.default, torch.ops.tunegemm.bmm.default):
        inductor.register(operator, plainly)


def lower_to_function(operator: Any, function: Callable[..., torch.Tensor], name: str, size: Any) -> None:
    """Teach Inductor, once, to call a function in place of an operator: the way through torch's dispatcher
    and back costs the host some 6 us.

    name: the function's name in Inductor's code. The function gets the operator's arguments and ``site=``,
    made by `site_of`. size: returns the result's size from Inductor's nodes for the tensors among the
    arguments, which are dense and come first.
    """
    with suppress(ImportError, AttributeError):
        inductor = _Inductor()
        if inductor.knows(name):
            return
        parameters = [argument.name for argument in operator._schema.arguments]
        choice = inductor.select.ExternKernelChoice(function, name=name, has_out_variant=False)

        def call(*arguments: Any) -> Any:
            nodes, values, others = [], [], {}
            traced = inductor.graphs.graph.current_node.args
            for key, argument, source in zip(parameters, arguments, traced, strict=True):
                if isinstance(argument, inductor.ir.TensorBox):
                    nodes.append(inductor.as_traced(argument, source))
                    values.append(source.meta["val"])
                else:
                    others[key] = argument
            others["site"] = site_of(values, name, *others.values())
            return inductor.result(choice, nodes, size(*nodes), **others)

        inductor.register(operator, call)
