"""`patch` serves the linear layers of an eager model, one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, overload

import torch

from tunegemm.describe.epilogue import GATE_OF
from tunegemm.dispatch import extension
from tunegemm.dispatch.forms import MATMUL, form_of
from tunegemm.errors import ProblemError, TunegemmWarning
from tunegemm.layers import mlp, sites
from tunegemm.torch.linear import TunedLinear, is_tuned, untuned

#: Numbers of rows that a line speaks of: of decoding, and of prompts.
ROWS = (1, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Line:
    """One layer of the model, or one MLP."""

    name: str
    """Its name within the model; empty for the model itself."""
    state: Literal["fused", "served", "left"]
    """fused: an MLP whose gate is recognised; served: a layer that calls `tunegemm.linear`; left: a layer
    that `patch` did not change."""
    why: str
    """The reason, with the numbers of rows that have a kernel here."""

    def __str__(self) -> str:
        return f"{self.state:6}  {self.name}: {self.why}"


@dataclass(frozen=True)
class Report:
    """What `patch` did, a line for each layer."""

    patched: int
    """How many linear layers call `tunegemm.linear` now and did not before."""
    lines: tuple[Line, ...]

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))

    def of(self, state: str) -> list[Line]:
        """The lines of one state: fused, served or left."""
        return [line for line in self.lines if line.state == state]


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
    ``self.down(self.act(self.gate(x)) * self.up(x))``; torch.jit.script cannot compile such a model.
    ``torch.compile(model, backend="tunegemm")`` fuses more, however a model is written.
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
        mlp.fuse(model)
    return Report(len(layers), tuple(lines_of(model))) if report else len(layers)


def unpatch(model: torch.nn.Module) -> int:
    """Undo `patch`. Returns how many layers it changed back.

    A class that a tool derived from the patched one, as FSDP2 and parametrizations do, is derived from
    `torch.nn.Linear` again. Raises ProblemError if `model` is not a module.
    """
    _check_model(model)
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


def lines_of(model: torch.nn.Module) -> Iterator[Line]:
    """A line for each linear layer of a patched model, and for each MLP whose forward was replaced."""
    known: dict[Hashable, str] = {}
    for name, module in model.named_modules():
        if isinstance(forward := vars(module).get("forward"), mlp.Forward):
            places = forward.places
            layer, gate = module._modules.get(places.gate), GATE_OF.get(places.activation(module)[0])
            rows = "no kernel"
            if isinstance(layer, torch.nn.Linear) and gate is not None:  # somebody may have replaced either
                weight = layer.weight
                (n, k), gpu = weight.shape, extension.gpu_of(weight.device)
                facts = partial(sites.chosen, ns=(n, n), k=k, dtype=weight.dtype, gpu=gpu)
                serves = partial(facts, gate=gate, bias=layer.bias is not None)
                rows = _said(weight, serves)
            yield Line(
                name, "fused", f"{places.gate}, {places.up} and their gate form a known pattern: {rows}"
            )
        elif is_tuned(type(module)):
            assert isinstance(module, torch.nn.Linear)
            weight, has_bias = module.weight, module.bias is not None
            kind = tuple(weight.shape), weight.dtype, weight.device, has_bias
            if kind not in known:
                form, right = form_of(MATMUL, "bias_n" if has_bias else ""), weight.detach().t()
                known[kind] = _said(weight, partial(extension.serves_by, form, weight=right))
            yield Line(name, "served", f"calls tunegemm.linear: {known[kind]}")
        elif isinstance(module, torch.nn.MultiheadAttention):
            yield Line(name, "left", "torch computes its projections in one product if possible")
        elif isinstance(module, torch.nn.Linear):
            yield Line(name, "left", f"{type(module).__name__} is a subclass with its own forward")


def _said(weight: torch.Tensor, serves: Callable[[int], object]) -> str:
    """The numbers of rows that a kernel serves here. serves: a true value if one serves so many."""
    if weight.device.type != extension.device_type():
        return f"no kernel on {weight.device.type}; move the model to a CUDA device"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunegemmWarning)  # the report says so itself
        rows = [each for each in ROWS if serves(each)]
    if not rows:
        return f"no kernel here is faster than torch at {', '.join(map(str, ROWS))} rows"
    return f"has a kernel here for {', '.join(map(str, rows))} rows"
