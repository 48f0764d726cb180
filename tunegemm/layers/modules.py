"""`patch` serves the linear layers of an eager model, one by one."""

from __future__ import annotations

import warnings
from typing import Literal, overload

import torch

from tunegemm.errors import ProblemError, TunegemmWarning
from tunegemm.layers.report import Report, lines_of
from tunegemm.torch.linear import TunedLinear, is_tuned, untuned


@overload
def patch(model: torch.nn.Module, *, fuse: bool = ..., report: Literal[False] = ...) -> int: ...
@overload
def patch(model: torch.nn.Module, *, fuse: bool = ..., report: Literal[True]) -> Report: ...
def patch(model: torch.nn.Module, *, fuse: bool = False, report: bool = False) -> int | Report:
    """Make a model's linear layers call `tunegemm.linear`. Returns how many layers it changed.

    It changes layers whose class is `torch.nn.Linear`; subclasses keep their own forward. Only the class of a
    layer changes, to a subclass of `torch.nn.Linear`. Parameters, their sharing, hooks, `state_dict`,
    copying, pickling and torch.jit.script work as before. Patch before torch.compile: torch 2.11 does not
    notice that the class changed.

    fuse: also run gate and up in one kernel in MLPs whose class's forward is exactly
    ``self.down(self.act(self.gate(x)) * self.up(x))``. ``torch.compile(model, backend="tunegemm")`` fuses
    more, however a model is written.
    report: return a `Report` instead of the number, with a line for each layer: its state, and for how
    many rows there is a kernel.

    Warns if the model has no such layer. Raises ProblemError if `model` is not a module.
    """
    _check_model(model)
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for layer in layers:
        layer.__class__ = TunedLinear
    if not any(is_tuned(type(module)) for module in model.modules()):
        warnings.warn(
            f"patch() changed nothing: {type(model).__name__} has no layer whose class is torch.nn.Linear; "
            "tunegemm.enable() serves the products of any module",
            TunegemmWarning,
            stacklevel=2,
        )
    if fuse:
        from tunegemm.layers import mlp

        mlp.fuse(model)
    return Report(len(layers), tuple(lines_of(model))) if report else len(layers)


def unpatch(model: torch.nn.Module) -> int:
    """Undo `patch`. Returns how many layers it changed back.

    A class that a tool derived from the patched one, as FSDP2 and parametrizations do, is derived from
    `torch.nn.Linear` again. Raises ProblemError if `model` is not a module.
    """
    _check_model(model)
    from tunegemm.layers import mlp

    mlp.unfuse(model)
    modules = [module for module in model.modules() if is_tuned(type(module))]
    for module in modules:
        module.__class__ = untuned(type(module))
    return sum(isinstance(module, torch.nn.Linear) for module in modules)


def _check_model(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ProblemError(
            f"model {model!r:.40} is not a torch.nn.Module; give the model that has the layers"
        )
