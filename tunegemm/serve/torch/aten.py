"""Python functions in the place of ATen's kernels of matrix products.

`torch.library` puts them where kernels are: below autograd, autocast, functorch and torch.compile, so that
nothing is traced or run differently, and for all threads, that of the backward pass, too. Inductor's output
calls the same kernels (`extern_kernels.mm`). A `TorchDispatchMode` would make torch.compile fall back to
eager code; a `TorchFunctionMode` is one thread's, sees no backward pass, and costs every torch function.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tunegemm.errors import TunegemmError


@dataclass(frozen=True)
class Layer:
    """What one part of tunegemm puts in the place of which kernels."""

    operators: Sequence[str]
    """Names in ATen, each for all its overloads. What this torch does not have is passed over."""
    keys: Sequence[str]
    """``CPU``, ``CUDA``. What this build of torch does not have is passed over."""
    wrap: Callable[[str, Any], Callable[..., Any]]
    """Makes the function for an operator and its kernel. It is called with the operator's arguments after the
    dispatch keys, which ``kernel.call_boxed`` wants, too."""


class Replacements:
    """The layers, by name. A recording hides the takeover: its products are torch's."""

    _ORDER = ("recording", "takeover")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._layers: dict[str, Layer] = {}
        self._library: torch.library.Library | None = None

    def put(self, name: str, layer: Layer) -> None:
        """Raises TunegemmError when this torch cannot replace its kernels."""
        if not hasattr(torch.library, "get_kernel"):
            raise TunegemmError(
                f"torch {torch.__version__} cannot wrap its kernels (torch.library.get_kernel); update torch"
            )
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
        for name in layer.operators:
            packet = getattr(torch.ops.aten, name, None)
            for overload in packet.overloads() if packet is not None else ():
                operator = getattr(packet, overload)
                for key in layer.keys:
                    if key == "CUDA" and not torch.backends.cuda.is_built():
                        continue
                    try:
                        kernel = torch.library.get_kernel(operator, key)
                    except RuntimeError:  # this overload has none there
                        continue
                    with warnings.catch_warnings():
                        # torch warns of every kernel that is replaced, which is the intent.
                        warnings.filterwarnings("ignore", message=r"(?s).*[Oo]verrid")
                        self._library.impl(
                            operator, layer.wrap(name, kernel), key, with_keyset=True, allow_override=True
                        )


replacements = Replacements()
os.register_at_fork(after_in_child=replacements.forget_lock)
