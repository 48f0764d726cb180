"""The way through a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from tunegemm.serve.torch.layers.ends import end_of
from tunegemm.serve.torch.layers.modules import SharedLinear, forget, fuse_methods, share
from tunegemm.serve.torch.layers.recognise import Match, of_one_input
from tunegemm.serve.torch.layers.report import Line
from tunegemm.serve.torch.layers.steps import Step
from tunegemm.serve.torch.linear import TunedLinear, is_tuned


def lines_of(model: torch.nn.Module, *, fuse: bool) -> list[Line]:
    """What becomes of a patched model's layers: a line for each, or for each group of them.

    fuse: first fuses what is recognised in the model's modules.
    """
    lines: list[Line] = []
    if fuse:
        owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
        # Children first: what a parent adds to their results depends on what became of them.
        found = [list(_fuse_module(name, one, owners)) for name, one in reversed(list(model.named_modules()))]
        # Gate and up that cannot be one product are looked at twice, to the same effect.
        lines = list(dict.fromkeys(line for some in reversed(found) for line in some))
    said = {name for line in lines for name in _names_of(line)}
    for name, module in model.named_modules():
        if name not in said:
            lines += _alone(name, module)
    return lines


def unfuse(model: torch.nn.Module) -> None:
    """Parameters and methods are as they were; classes are the caller's to change."""
    for module in model.modules():
        forget(module)


def _fuse_module(name: str, module: torch.nn.Module, owners: Counter[int]) -> Iterator[Line]:
    children = {place: child for place, child in module._modules.items() if isinstance(child, TunedLinear)}
    if is_tuned(type(module)) or not (children or any(map(end_of, module.children()))):
        return
    tied = [place for place, child in children.items() if any(owners[id(p)] > 1 for p in child.parameters())]
    for match, step in fuse_methods(module) if not tied else ():
        yield _line_of(name, match, step)
    alone = {
        place: child for place, child in children.items() if type(child) is TunedLinear and place not in tied
    }
    for width in dict.fromkeys(child.in_features for child in alone.values()):
        names = [place for place, child in alone.items() if child.in_features == width]
        for group in of_one_input(module, names) if len(names) > 1 else ():
            shared = share([alone[place] for place in group])
            if isinstance(shared, str):
                yield Line(_named(name, group), "left", f"each is served by itself: {shared}")
            else:
                yield Line(_named(name, group), "fused", "one product of one input, the results as views")
    for place in tied:
        yield Line(_named(name, [place]), "left", "its weight is another module's, too; served by itself")


def _line_of(name: str, match: Match, step: Step | str) -> Line:
    if isinstance(step, str):
        return Line(_named(name, match.names), "left", f"each is served by itself: {step}")
    return Line(_named(name, match.names), "fused", step.says)


def _alone(name: str, module: torch.nn.Module) -> Iterator[Line]:
    if isinstance(module, torch.nn.MultiheadAttention):
        yield Line(name, "left", "torch computes its projections, as one product where it can")
    elif isinstance(module, SharedLinear):
        yield Line(name, "fused", "before, with others")
    elif isinstance(module, TunedLinear):
        yield Line(name, "served", "nothing was recognised that one kernel could do with it")
    elif isinstance(module, torch.nn.Linear) and not isinstance(module, TunedLinear):
        yield Line(name, "left", f"a {type(module).__name__} has ways of its own")


def _named(module: str, places: Sequence[str]) -> str:
    inner = places[0] if len(places) == 1 else "{" + ",".join(places) + "}"
    return f"{module}.{inner}" if module else inner


def _names_of(line: Line) -> list[str]:
    before, brace, inner = line.name.partition("{")
    return [before + place for place in inner.rstrip("}").split(",")] if brace else [line.name]
