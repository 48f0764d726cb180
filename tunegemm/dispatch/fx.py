"""Calls of tunegemm in functions that torch.fx traces become nodes of the graph, like torch's own calls.

A proxy is not a tensor, so torch's methods raise TypeError for it. Calls detect proxies by that error, which
costs calls with tensors nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Proxy

from tunegemm.errors import OperandError

# They raise TypeError for objects that are not tensors; a proxy's attributes would be proxies.
data_ptr = torch.Tensor.data_ptr
rank = torch.Tensor.dim
num_elements = torch.Tensor.numel


def check_tensors(**values: Any) -> None:
    """Raises OperandError, which names it, for a value that is not a tensor."""
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            raise OperandError(f"{name} is a {type(value).__name__}; give a tensor")


def refuse_proxies(values: Iterable[Any]) -> None:
    """Raises TypeError for a proxy; the called function then makes a node."""
    if any(isinstance(value, Proxy) for value in values):
        raise TypeError("a proxy of torch.fx is not a tensor")


def node_of(
    error: Exception,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    torchs: Callable[..., Any] | None = None,
) -> Any:
    """The call as a node of the traced graph.

    error: of the call. Without a proxy among the arguments, torch's function, if given, takes the arguments
    or raises its own error; otherwise `error` is raised again.
    """
    keywords = dict(keywords or {})
    values = (*arguments, *keywords.values(), *(keywords.get("operands") or ()))
    proxy = next((value for value in values if isinstance(value, Proxy)), None)
    if proxy is None and torchs is not None:
        return torchs(*arguments, **keywords)
    if proxy is None:
        raise error
    return proxy.tracer.create_proxy("call_function", function, tuple(arguments), keywords)
