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

#: By the dispatch keys of a call those below ours, and whether their kernel is at one of the keys behind it;
#: and what computes the calls of these. A program has few of the former, and to ask torch would take longer.
_State: TypeAlias = tuple[dict[int, tuple[Any, bool]], Sequence[str], Callable[..., Any]]


class Replacements:
    """What is in front, by name. A recording hides the takeover, so torch computes the recorded products."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._layers: dict[str, tuple[Sequence[str], Sequence[str], Wrap]] = {}
        self._library: torch.library.Library | None = None
        self._fronts: dict[Any, _Front] = {}

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

    def leave(self) -> None:
        """Take the functions away if none serves. No other thread may multiply meanwhile, see `_install`."""
        if not self._layers and self._library is not None:
            self._library._destroy()
            self._library = None
            self._fronts.clear()

    def _install(self) -> None:
        layer = self._layers.get("recording") or self._layers.get("takeover")
        for operator, front in self._fronts.items():
            front.state = {}, (), operator.redispatch
        if layer is None:
            # Torch frees functions that are taken away; a thread on its way through one would crash.
            others = (each.name for each in threading.enumerate() if each is not threading.current_thread())
            if all(name.startswith("tunegemm-") for name in others):
                self.leave()
            return
        library = self._library = self._library or torch.library.Library("aten", "IMPL")
        operators, keys, wrap = layer
        places: dict[int, tuple[Any, bool]] = {}
        for name in operators:
            packet = getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                operator = getattr(packet, overload)
                state = places, keys, wrap(name, operator.redispatch)
                if operator in self._fronts:
                    self._fronts[operator].state = state
                else:
                    front = self._fronts[operator] = _Front(operator.redispatch, state)
                    library.impl(operator, front.call, _KEY, with_keyset=True)


class _Front:
    """The function in front of an overload's kernels."""

    def __init__(self, go_on: Callable[..., Any], state: _State) -> None:
        self.go_on, self.state = go_on, state

    def call(self, keyset: Any, *arguments: Any, **keywords: Any) -> Any:
        places, keys, serve = self.state
        place = places.get(keyset.raw_repr())
        if place is None:
            below = keyset & torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
            place = places[keyset.raw_repr()] = below, below.highestPriorityTypeId().name in keys
        below, is_ours = place
        return (serve if is_ours else self.go_on)(below, *arguments, **keywords)


# Where Dynamo runs a frame as it is, it looks at each frame within, and ours are called by ATen: it would
# compile all of dispatch, for seconds, and again for other shapes. A torch without these names does that.
with suppress(AttributeError, TypeError):
    _frames: Any = torch._C._dynamo.eval_frame
    _skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(_Front.call.__code__, _frames._FrameExecStrategy(_skip, _skip))
replacements = Replacements()
os.register_at_fork(after_in_child=replacements.forget_lock)
