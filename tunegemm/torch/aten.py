"""Puts Python functions in front of ATen's kernels of matrix products.

`torch.library` registers them at the dispatch key ``BackendSelect``. Every call passes this key right above
its kernel, and no product has a kernel of its own there. The key is below autograd, autocast, functorch and
torch.compile, so tracing and execution stay the same. It holds for all threads, including the backward pass,
and Inductor's output passes it as well (`extern_kernels.mm`). Torch looks up the kernel below on each call.
So other libraries may replace ATen's kernels while ours are on (vLLM's batch invariance, FlagGems): products
fall back to theirs, and recordings count them.

A `TorchDispatchMode` would make torch.compile fall back to eager code. A `TorchFunctionMode` belongs to one
thread, does not see the backward pass, and slows down every torch function.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from tunegemm.errors import TunegemmError

_KEY = "BackendSelect"


#: Makes the function for an operator, from its name and a function that calls the kernel that would run
#: without us, as it is at each call. Both functions get the dispatch keys, then the operator's arguments.
Wrap: TypeAlias = Callable[[str, Callable[..., Any]], Callable[..., Any]]


class Replacements:
    """What is in front, by name. A recording hides the takeover, so torch computes the recorded products."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._layers: dict[str, tuple[Sequence[str], Sequence[str], Wrap]] = {}
        self._library: torch.library.Library | None = None

    def put(self, name: str, operators: Sequence[str], keys: Sequence[str], wrap: Wrap) -> None:
        """Put functions in front of operators. Raises TunegemmError if this torch cannot do it.

        operators: names in ATen, each for all its overloads; those that this torch lacks are skipped.
        keys: such as ``CUDA``; torch computes products whose kernel is at another key.
        """
        if not hasattr(torch._C.DispatchKeySet, "raw_repr"):
            raise TunegemmError(f"torch {torch.__version__} does not expose the next kernel; update torch")
        with self._lock:
            self._layers[name] = operators, keys, wrap
            self._install()

    def remove(self, name: str) -> None:
        """Does nothing if there is nothing by that name."""
        with self._lock:
            if self._layers.pop(name, None) is not None:
                self._install()

    def forget_lock(self) -> None:
        """Make a new lock after a fork: no thread of the child holds the old one."""
        self._lock = threading.RLock()

    def _install(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None
        layer = self._layers.get("recording") or self._layers.get("takeover")
        if layer is None:
            return
        self._library = torch.library.Library("aten", "IMPL")
        operators, keys, wrap = layer
        places: dict[int, tuple[Any, bool]] = {}
        for name in operators:
            packet = getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                operator = getattr(packet, overload)
                serve = wrap(name, operator.redispatch)
                before = _before(operator, serve, keys, places)
                self._library.impl(operator, before, _KEY, with_keyset=True)


def _before(
    operator: Any, serve: Callable[..., Any], keys: Sequence[str], places: dict[int, tuple[Any, bool]]
) -> Callable[..., Any]:
    """The function in front of an overload's kernels.

    places: by the dispatch keys of a call, those below ours, and whether their kernel is at one of `keys`.
    A program has few of these, and looking one up costs less than asking torch.
    """
    go_on = operator.redispatch

    def find(keyset: Any) -> tuple[Any, bool]:
        below = keyset & torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
        place = places[keyset.raw_repr()] = below, below.highestPriorityTypeId().name in keys
        return place

    def before(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        below, is_ours = places.get(keyset.raw_repr()) or find(keyset)
        return (serve if is_ours else go_on)(below, *arguments, **keywords)

    _hide_from_dynamo(before.__code__)
    return before


def _hide_from_dynamo(code: Any) -> None:
    """Let Dynamo compile neither a function nor what it calls. Where Dynamo runs a frame as it is, it looks
    at each frame within, and ours are called by ATen: it would compile all of dispatch, for seconds, and
    again for other shapes. A torch that has none of these names does that."""
    frames = torch._C._dynamo.eval_frame
    with suppress(AttributeError, TypeError):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


replacements = Replacements()
os.register_at_fork(after_in_child=replacements.forget_lock)
