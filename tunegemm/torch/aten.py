"""Python functions before ATen's kernels of matrix products.

`torch.library` puts them at the dispatch key ``BackendSelect``, which every call passes right above its
kernel and at which no product has a kernel of its own: below autograd, autocast, functorch and torch.compile,
so that nothing is traced or run differently, and for all threads, that of the backward pass, too. Inductor's
output passes it as well (`extern_kernels.mm`). What is below is looked up by torch at each call. So the
kernels that other libraries put in the place of ATen's (vLLM's batch invariance, FlagGems) may come and go
meanwhile: theirs is what a product falls back to, theirs are counted, and ours is in nobody's way.

A `TorchDispatchMode` would make torch.compile fall back to eager code; a `TorchFunctionMode` is one thread's,
sees no backward pass, and costs every torch function.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tunegemm.errors import TunegemmError

_KEY = "BackendSelect"


@dataclass(frozen=True)
class Layer:
    """What one part of tunegemm puts before which kernels."""

    operators: Sequence[str]
    """Names in ATen, each for all its overloads. What this torch does not have is passed over."""
    keys: Sequence[str]
    """``CPU``, ``CUDA``: products whose kernel is at another key are torch's."""
    wrap: Callable[[str, Any], Callable[..., Any]]
    """Makes the function for an operator and its kernel. It is called with the operator's arguments after the
    dispatch keys, which ``kernel.call_boxed`` wants, too."""


class _Below:
    """What would run without us, as it is at each call."""

    def __init__(self, operator: Any) -> None:
        self.call_boxed = operator.redispatch


class _Place(NamedTuple):
    """Where a call goes that has certain dispatch keys."""

    below: Any
    """The keys that are below ours."""
    is_ours: bool
    """Whether its kernel is at one of the layer's keys."""


class Replacements:
    """The layers, by name. A recording hides the takeover: its products are torch's."""

    _ORDER = ("recording", "takeover")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._layers: dict[str, Layer] = {}
        self._library: torch.library.Library | None = None

    def put(self, name: str, layer: Layer) -> None:
        """Raises TunegemmError when this torch cannot do it."""
        if not hasattr(torch._C.DispatchKeySet, "raw_repr"):
            raise TunegemmError(f"torch {torch.__version__} does not say which kernel is next; update torch")
        with self._lock:
            self._layers[name] = layer
            self._install()

    def remove(self, name: str) -> None:
        """Nothing happens when it is not there."""
        with self._lock:
            if self._layers.pop(name, None) is not None:
                self._install()

    def forget_lock(self) -> None:
        """After a fork: nobody holds the lock here."""
        self._lock = threading.RLock()

    def _install(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None
        layer = next((self._layers[name] for name in self._ORDER if name in self._layers), None)
        if layer is None:
            return
        self._library = torch.library.Library("aten", "IMPL")
        places: dict[int, _Place] = {}
        for name in layer.operators:
            packet = getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                operator = getattr(packet, overload)
                self._library.impl(operator, _before(name, operator, layer, places), _KEY, with_keyset=True)


def _before(name: str, operator: Any, layer: Layer, places: dict[int, _Place]) -> Callable[..., Any]:
    """The function that goes before the kernels of an overload. places: of this layer, by dispatch keys; of
    these a program has a few, and to look one up costs less than to ask torch."""
    serve, go_on = layer.wrap(name, _Below(operator)), operator.redispatch

    def find(keyset: Any) -> _Place:
        below = keyset & torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
        place = _Place(below, below.highestPriorityTypeId().name in layer.keys)
        places[keyset.raw_repr()] = place
        return place

    def before(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        below, is_ours = places.get(keyset.raw_repr()) or find(keyset)
        return (serve if is_ours else go_on)(below, *arguments, **keywords)

    return before


replacements = Replacements()
os.register_at_fork(after_in_child=replacements.forget_lock)
