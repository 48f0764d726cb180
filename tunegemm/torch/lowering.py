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
from functools import cache
from typing import Any

import torch

from tunegemm.dispatch import api
from tunegemm.dispatch.forms import MATMUL, PLAIN, form_of

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


def lower() -> None:
    """Teach Inductor `tunegemm::mm`, `bmm` and `fused`, once. It imports Inductor, so only processes that
    compile call it."""
    operators = torch.ops.tunegemm
    for operator in (operators.mm.default, operators.bmm.default):
        lower_to_function(operator, _product, "tunegemm_product", writes=True)
    lower_to_function(operators.fused.default, _fused, "tunegemm_product_and_more", writes=True)


# Inductor keeps code with these names and arguments on disk: see `ops.CALLS`.
# vLLM keeps code by its records only, and code from before `any_rows` does not mention rows.
def _product(
    a: torch.Tensor, b: torch.Tensor, *, site: str, any_rows: bool = False, out: torch.Tensor
) -> torch.Tensor:
    place = (site, a.size(0)) if any_rows else site
    return api.dispatcher.compiled(place, PLAIN, a, b, (), (), out)


def _fused(
    a: torch.Tensor, b: torch.Tensor, *operands: torch.Tensor, site: str, any_rows: bool = False,
    numbers: Sequence[float], epilogue: str, out_dtype: torch.dtype | None = None,
    accumulation: str = "fast", out: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    form, place = form_of(MATMUL, epilogue, out_dtype, accumulation), (site, a.size(0))
    return api.dispatcher.compiled(place if any_rows else site, form, a, b, operands, numbers, out)


@cache
def _choice(function: Callable[..., torch.Tensor], name: str, writes: bool) -> Any:
    """What Inductor makes of a function: one for all operators that it computes."""
    select = importlib.import_module("torch._inductor.select_algorithm")
    return select.ExternKernelChoice(function, name=name, has_out_variant=writes)


@cache
def lower_to_function(
    operator: Any, function: Callable[..., torch.Tensor], name: str, *, writes: bool = False
) -> None:
    """Teach Inductor, once, to call a function in place of an operator: the way through torch's dispatcher
    and back costs the host some 6 us.

    name: the function's name in Inductor's code. The function gets the operator's tensors, then its other
    arguments by name, and ``site=``, made by `site_of`. It returns a dense result; writes: it gets this as
    ``out=``, and ``any_rows=``, whether the site leaves the number of rows open.
    """
    with suppress(ImportError, AttributeError):
        # Imported late because the import takes seconds.
        choice = _choice(function, name, writes)
        ir, lowering, virtualized = (
            importlib.import_module(f"torch._inductor.{each}") for each in ("ir", "lowering", "virtualized")
        )
        parameters = operator._schema.arguments
        graphs, by_operator = virtualized.V, lowering.fallback_handler(operator, add_to_fallback_set=False)

        def lowered(*arguments: Any, **keywords: Any) -> Any:
            if graphs.graph.cpp_wrapper:  # C++ calls no Python functions, but operators
                return by_operator(*arguments, **keywords)
            nodes, values, words = [], [], {}
            node = graphs.graph.current_node
            for parameter, argument, source in zip(parameters, arguments, node.args, strict=False):
                is_list = isinstance(parameter.type, torch.ListType) and "Tensor" in str(parameter.type)
                if not (is_list or isinstance(argument, ir.TensorBox)):
                    words[parameter.name] = argument
                    continue
                given, sources = (argument, source) if is_list else ([argument], [source])
                for each, traced in zip(given, sources, strict=True):
                    value = traced.meta["val"]
                    # In memory, with the strides that it had when it was traced.
                    realized = ir.ExternKernel.realize_input(each)
                    nodes.append(ir.ExternKernel.require_exact_strides(realized, value.stride()))
                    values.append(value)
            words["site"] = site = site_of(values, name, *words.values())
            if writes:
                words["any_rows"] = site.startswith(_ANY_ROWS)
            result = node.meta["val"]
            size = ir.convert_shape_to_inductor(result.shape)
            layout = ir.FixedLayout(nodes[0].get_device(), result.dtype, size)
            found = choice.bind(nodes, layout, **words).output_node()
            return found[0] if isinstance(found, tuple) else found

        lowering.register_lowering(operator, type_promotion_kind=None)(lowered)
        lowering.add_needs_realized_inputs(operator)  # as for aten.mm
