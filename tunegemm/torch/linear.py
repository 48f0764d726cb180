"""The layer that `patch` installs in place of a `torch.nn.Linear`, and classes derived from it."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

import torch
from torch.nn import functional as F  # torch.jit.script looks for it here, see `TunedLinear`

from tunegemm.dispatch import api
from tunegemm.dispatch.forms import LINEAR
from tunegemm.dispatch.guards import PLAIN, data_ptr, grad_enabled, tracing
from tunegemm.torch import functions

_is_compiling = torch.compiler.is_compiling
_torchs: Any = torch._C._nn.linear
_Linear = torch.nn.Linear  # which a tool may replace, too, for layers that are made from then on
_forward = _Linear.forward


def is_replaced() -> bool:
    """Whether a tool has put a function of its own in place of torch's, for all layers of the process, as
    counters of FLOPs and calibrations do."""
    return F.linear is not _torchs or _Linear.forward is not _forward


def _is_fused_later() -> bool:
    """Whether Dynamo traces for a backend that fuses layers: it looks for torch's operations."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        backend = dynamo.InstructionTranslator.current_tx().output.compiler_fn  # type: ignore[union-attr]
    except AttributeError:  # torch.export traces without Dynamo
        return False
    while (
        inner := getattr(backend, "_torchdynamo_orig_backend", getattr(backend, "compiler_fn", None))
    ) is not None:
        backend = inner
    return getattr(backend, "fuses_layers", False) is True


# For Dynamo a constant at trace time, as in `ops.records`; it traces anew for another backend.
_is_fused_later._dynamo_marked_constant = True  # type: ignore[attr-defined]


def module_node(layer: torch.nn.Linear, input: Any) -> Any:
    """The call of the module as a node of torch.fx, if its tracer does not look into linear layers; or None.

    Tools that rewrite graphs, such as FX quantisation, look for modules.
    """
    tracer = getattr(input, "tracer", None)
    if not isinstance(tracer, torch.fx.Tracer) or layer._forward_pre_hooks or layer._forward_hooks:
        return None  # hooks were traced already, and the node would run them again
    path = tracer.path_of_module(layer)
    if not tracer.is_leaf_module(torch.nn.Linear(1, 1, device="meta"), path):
        return None
    return tracer.create_proxy("call_module", path, (input,), {})


class _Standing(type):
    """The metaclass of `TunedLinear`, which tables of classes treat as the class that it replaces.

    Tools look up a layer's exact class (``type(layer) in mapping``: torch.ao.quantization, DeepSpeed's
    policies, tables of FLOPs) and silently skip missing classes. A class that a tool derives has separate
    entries.
    """

    def __eq__(cls, other: object) -> bool:
        return cls is other or (cls is TunedLinear and other is torch.nn.Linear)

    def __hash__(cls) -> int:
        return hash(torch.nn.Linear) if cls is TunedLinear else super().__hash__()


class TunedLinear(torch.nn.Linear, metaclass=_Standing):
    """A `torch.nn.Linear` that calls `tunegemm.linear`; `patch` installs it. It has no state of its own.

    Torch computes layers that train in eager code: autograd would call Python for them, which cost more than
    kernels saved (docs/decisions/0028).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if F.linear is not _torchs or _Linear.forward is not _forward:  # `is_replaced`, without the call
            return super().forward(input)
        if _is_compiling():
            linear = _torchs if _is_fused_later() else functions.linear
            return linear(input, self.weight, self.bias)
        weight: Any
        bias: torch.Tensor | None
        own = self.__dict__
        try:  # as attributes of the module the two cost the host a third of the call
            parameters = own["_parameters"]
            weight, bias = parameters["weight"], parameters["bias"]
            is_hidden = "weight" in own or "bias" in own
        except KeyError:  # another object provides them, such as a parametrization
            is_hidden = True
        if is_hidden:
            weight, bias = self.weight, self.bias
        if type(input) in PLAIN:
            quick = api.quick
            try:
                elements = quick.get(data_ptr(weight) + (bias is not None))
                if elements is not None and input.numel() in elements and monotonic() < quick.until:
                    return _torchs(input, weight, bias)
            except (AttributeError, RuntimeError, TypeError):  # the dispatcher finds out why
                pass
            if (
                grad_enabled()
                and not tracing()  # its checks need the same function in each mode
                and (input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
            ):
                return _torchs(input, weight, bias)
        elif (node := module_node(self, input)) is not None:
            return node
        if bias is None:
            return api.product(LINEAR, input, weight)
        return api.dispatcher.fused(functions.WITH_BIAS, input, weight, (bias,))


# torch.jit.script compiles its source.
TunedLinear.forward.__wrapped__ = torch.nn.Linear.forward  # type: ignore[attr-defined]


def is_tuned(cls: type) -> bool:
    """Whether a class is `TunedLinear`, or a tool derived it from that class at run time. A class that its
    module has under its name, or that a function's code defines, was written by somebody and does not count:
    a copy of it could not call ``super()``."""
    if cls is TunedLinear:
        return True
    written = "<locals>" in cls.__qualname__
    derived = not written and getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls
    return derived and any(is_tuned(base) for base in cls.__bases__)


def untuned(cls: type) -> type:
    """`torch.nn.Linear` for `TunedLinear`; for a derived class the same one, derived from `torch.nn.Linear`.

    A derived class is made anew on each call, because a tool may change the class of one layer, for example
    when it removes a parametrization.
    """
    if cls is TunedLinear:
        return torch.nn.Linear
    bases = tuple(untuned(base) if is_tuned(base) else base for base in cls.__bases__)
    content = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace(TunedLinear.__name__, torch.nn.Linear.__name__), bases, content)
