"""torch.compile's backend `tunegemm`: puts fused calls into Dynamo's graph and runs it, without Inductor."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tunegemm.dispatch.guards import deterministic, functorch_level
from tunegemm.errors import BadValueError
from tunegemm.layers import masks
from tunegemm.layers.fusion import fuse
from tunegemm.layers.graph import name_of

_log = logging.getLogger(__name__)


def tunegemm(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Serve a graph: ``torch.compile(model, backend="tunegemm")``.

    These become tunegemm's calls: gate and up with their activation, a layer with its activation and
    residual, the remaining linear layers, and products of matrices, batches and rows in groups. Attention
    runs without its mask if the graph computes a causal one from extents alone. Torch computes everything
    else, and nothing is compiled. Torch also computes graphs that train, and graphs under deterministic
    algorithms or within torch.func.

    Raises BadValueError for a mode or options of Inductor.
    """
    if mode not in (None, "default"):
        raise BadValueError(
            f"mode {mode!r} is Inductor's; call torch.compile(model, mode={mode!r}) in tunegemm.enable(), "
            "or leave mode out and capture the model with torch.cuda.graph"
        )
    if options:
        raise BadValueError(
            f"the backend tunegemm has no option {next(iter(options))!r}; only Dynamo's guard_filter_fn works"
        )
    count = prepare(graph)
    _log.info("%s", said(count))
    return graph.forward


tunegemm.fuses_layers = True  # type: ignore[attr-defined] # for layers that `patch` installed


#: Operators that run a part of the graph as it stands, such as regions that are compiled once for all layers.
_OF_PARTS = ("invoke_subgraph", "tag_activation_checkpoint", "cond")


def prepare(graph: torch.fx.GraphModule) -> Counter[str]:
    """Put tunegemm's calls into a graph. Returns how often each pattern matched."""
    # Tensors of a part that runs within torch.func have no memory of their own there.
    is_transformed = functorch_level() is not None or any(
        node.op == "call_function" and "functorch" in str(getattr(node.target, "__module__", ""))
        for node in graph.graph.nodes
    )
    if deterministic() or is_transformed:
        return Counter()
    count = fuse(graph.graph)
    for node in graph.graph.nodes:
        for name in (each.target for each in node.all_input_nodes if name_of(node) in _OF_PARTS):
            part = getattr(graph, str(name), None)
            count.update(prepare(part) if isinstance(part, torch.fx.GraphModule) else ())
    if dropped := masks.drop(graph.graph):
        count["causal mask"] = dropped
    if count:
        graph.recompile()
    return count


def said(count: Counter[str]) -> str:
    """A line about the fused parts of a graph."""
    if not count:
        return "tunegemm: no linear layer of this graph is served"
    words = ", ".join(f"{number} x {name}" for name, number in count.items())
    return f"tunegemm: {words}"
