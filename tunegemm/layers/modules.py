"""`patch`, which serves the linear layers of a model that nobody compiles, one by one."""

from __future__ import annotations

from typing import Literal, overload

import torch

from tunegemm.errors import ProblemError
from tunegemm.layers.report import Report, lines_of
from tunegemm.torch.linear import TunedLinear, is_tuned, untuned


@overload
def patch(model: torch.nn.Module, *, fuse: bool = ..., report: Literal[False] = ...) -> int: ...
@overload
def patch(model: torch.nn.Module, *, fuse: bool = ..., report: Literal[True]) -> Report: ...
def patch(model: torch.nn.Module, *, fuse: bool = False, report: bool = False) -> int | Report:
    """Lets a model's linear layers call `tunegemm.linear`; returns how many do now that did not before.

    This holds for layers whose class is `torch.nn.Linear` itself; subclasses keep their own forward. Only
    the class of a layer changes, to a subclass of `torch.nn.Linear`: parameters, their sharing, hooks,
    `state_dict`, copying and pickling stay as they are, and torch.jit.script compiles what it does of
    `torch.nn.Linear`. Patch before torch.compile: torch 2.11 does not notice that the class changed.

    fuse: an MLP whose class's forward is just ``self.down(self.act(self.gate(x)) * self.up(x))`` computes
    its gate by one kernel, where there is one. ``torch.compile(model, backend="tunegemm")`` fuses more,
    however a model is written.
    report: returns a `Report` in place of the number: a line for each layer, what became of it, and for how
    many rows there is a kernel.

    Raises ProblemError for what is not a module.
    """
    _check_model(model)
    layers = [module for module in model.modules() if type(module) is torch.nn.Linear]
    for layer in layers:
        layer.__class__ = TunedLinear
    if fuse:
        from tunegemm.layers import mlp

        mlp.fuse(model)
    return Report(len(layers), tuple(lines_of(model))) if report else len(layers)


def unpatch(model: torch.nn.Module) -> int:
    """Undoes `patch`; returns how many layers are torch's own again.

    A class that a tool derived meanwhile, as FSDP2 and parametrizations do, becomes one derived from
    `torch.nn.Linear`. Raises ProblemError for what is not a module.
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
