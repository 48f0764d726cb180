"""Calls of tunegemm in functions that torch.fx traces: they become nodes of the graph, as torch's own do.

A proxy is not a tensor, so that torch's methods raise TypeError for it; that is where calls find out, which
costs those with tensors nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Proxy

# They raise TypeError for what is not a tensor, where the attributes of a proxy are proxies.
data_ptr = torch.Tensor.data_ptr
rank = torch.Tensor.dim
num_elements = torch.Tensor.numel


def refuse_proxies(values: Iterable[Any]) -> None:
    """Raises TypeError for a proxy, which lets the function that was called make a node."""
    if any(isinstance(value, Proxy) for value in values):
        raise TypeError("a proxy of torch.fx is not a tensor")


def node_of(
    error: Exception,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    torchs: Callable[..., Any] | None = None,
) -> Any:
    """The call as a node of the graph that is being traced.

    error: what the call raised. Where no argument is a proxy, torch's function, if one is given, takes the
    arguments or says what is wrong with them; else that error is raised again.
    """
    keywords = dict(keywords or {})
    values = (*arguments, *keywords.values(), *(keywords.get("operands") or ()))
    proxy = next((value for value in values if isinstance(value, Proxy)), None)
    if proxy is None and torchs is not None:
        return torchs(*arguments, **keywords)
    if proxy is None:
        raise error
    return proxy.tracer.create_proxy("call_function", function, tuple(arguments), keywords)
