"""What a forward that is only looked at changes of its module, so that it is noticed and undone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch

from tunegemm.serve.torch.autograd import PLAIN

#: What torch keeps in every module: of it, forward may change buffers.
_TORCHS = frozenset(vars(torch.nn.Module()))


class Look:
    """A module while it is looked at: its own tensors, but for parameters, are without memory."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._attributes, self._buffers = dict(module.__dict__), dict(module._buffers)
        own = [value for name, value in module.__dict__.items() if name not in _TORCHS]
        self._contents = [(one, one.copy()) for one in _containers(own, set())]
        self._random = torch.get_rng_state()
        self._stand_ins: list[torch.Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            places: tuple[dict[str, Any], ...] = (module.__dict__, module._buffers)
            for place in places:
                for name, value in place.items():
                    if type(value) in PLAIN:
                        place[name] = torch.empty_like(value, device="meta")
                        self._stand_ins.append(place[name])
        self._now = dict(module.__dict__)

    def set(self, name: str, value: Any) -> None:
        """An attribute is another while this lasts."""
        self._module.__dict__[name] = self._now[name] = value

    @property
    def has_changed(self) -> bool:
        """Whether forward did more than compute: attributes, what lies in lists and the like, or tensors."""
        now = self._module.__dict__
        return (
            now.keys() != self._now.keys()
            or any(now[name] is not value for name, value in self._now.items())
            or any(not _is_same(one, before) for one, before in self._contents)
            or any(tensor._version for tensor in self._stand_ins)
        )

    def undo(self) -> None:
        """All is as it was."""
        for now, before in (
            (self._module.__dict__, self._attributes), (self._module._buffers, self._buffers), *self._contents
        ):  # fmt: skip
            now.clear()
            (now.extend if isinstance(now, list | deque) else now.update)(before)
        torch.set_rng_state(self._random)


@contextmanager
def looking_at(module: torch.nn.Module) -> Iterator[Look]:
    """What forward does to the module, or draws at random on the CPU, is undone at the end."""
    look = Look(module)
    try:
        yield look
    finally:
        look.undo()


@contextmanager
def noting_reads(module: torch.nn.Module) -> Iterator[set[str]]:
    """The names of the module's attributes that are read meanwhile, or asked for; not of what torch keeps."""
    cls: Any = type(module)
    names: set[str] = set()

    def read(self: Any, name: str) -> Any:
        if self is module and not name.startswith("__") and name not in _TORCHS:
            names.add(name)
        return cls.__getattribute__(self, name)

    content = {"__getattribute__": read, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    module.__class__ = type(cls)(cls.__name__, (cls,), content)
    try:
        yield names
    finally:
        module.__class__ = cls


def _containers(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Those among the values, and within these."""
    for value in values:
        if isinstance(value, list | dict | set | deque) and id(value) not in seen:
            seen.add(id(value))
            yield value
            yield from _containers(value.values() if isinstance(value, dict) else value, seen)


def _is_same(one: Any, before: Any) -> bool:
    if len(one) != len(before):
        return False
    if isinstance(one, dict):
        return one.keys() == before.keys() and all(map(is_, one.values(), before.values()))
    return all(map(is_, one, before)) if isinstance(one, list | deque) else bool(one == before)
