"""Modules whose forward gives the result of one of their layers as it is, by their source.

What a caller adds to such a result could be added in the layer's own kernel. Attention cannot be traced, and
one run of it says nothing of others. But a forward that ends with ``x = self.out(x)`` and ``return x`` does
so whatever it was given.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

from tunegemm.serve.torch.linear import TunedLinear, is_tuned, untuned


class End(NamedTuple):
    """Where the result of a layer is in what forward returns."""

    layer: str
    place: int | None
    """Its place in a tuple; None where it is returned alone."""


def end_of(module: Any) -> End | None:
    """How a module's forward ends; None where that is not with a patched layer, or cannot be seen."""
    cls: Any = type(module)
    if is_tuned(cls):
        cls = untuned(cls)  # which does the same
    method = inspect.getattr_static(cls, "forward", None)  # what torch.jit has there cannot be asked for
    if not isinstance(method, FunctionType) or hasattr(method, "__wrapped__") or "forward" in vars(module):
        return None
    end = _end_of(method)
    return end if end is not None and isinstance(module._modules.get(end.layer), TunedLinear) else None


@cache
def _end_of(function: Any) -> End | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError, IndexError, TypeError):
        return None
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return None
    *body, last = tree.body
    own, nodes = tree.args.args[0].arg, list(ast.walk(tree))
    is_simple = sum(isinstance(node, ast.Return) for node in nodes) == 1 and not any(
        isinstance(node, ast.Yield | ast.YieldFrom | ast.Global | ast.Nonlocal) for node in nodes
    )
    if not is_simple or not isinstance(last, ast.Return) or last.value is None:
        return None
    parts = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
    for index, part in enumerate(parts):
        layer = _called(own, _value_of(part, body))
        if layer and sum(_attribute(own, node) == layer for node in nodes) == 1:
            return End(layer, index if isinstance(last.value, ast.Tuple) else None)
    return None


def _value_of(part: ast.expr, body: list[ast.stmt]) -> ast.AST | None:
    """What is returned; of a name what it was set to in the last statement that speaks of it."""
    if not isinstance(part, ast.Name):
        return part
    for statement in reversed(body):
        if part.id in _names(statement):
            is_set = isinstance(statement, ast.Assign) and len(statement.targets) == 1
            target = statement.targets[0] if is_set else None  # type: ignore[attr-defined]
            return statement.value if isinstance(target, ast.Name) else None  # type: ignore[attr-defined]
    return None


def _names(node: ast.AST) -> Iterator[str]:
    return (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))


def _attribute(own: str, node: ast.AST) -> str:
    """The name of an attribute of self."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == own:
        return node.attr
    return ""


def _called(own: str, node: ast.AST | None) -> str:
    """The child that is called, with one thing."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return "" if isinstance(node.args[0], ast.Starred) else _attribute(own, node.func)
    return ""
