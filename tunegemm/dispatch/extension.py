"""The interface of dispatch for higher-level parts of this package and for other packages.

A product that dispatch has no form for, such as rows in groups, brings its own kernels and selection, mostly
as a `Family`, which decides which calls its kernels serve, and launches them. A `LaunchCache` keeps decisions
until records, policy or mode change. `loaded` and `compiled` return kernels that no record names, which are
compiled in the background if they do not ship.

Products of two matrices are calls of `api.dispatcher`: `product`, `fused`, `below_autograd`, `compiled`, and
`known`, which returns the decision for such a call. tests/dispatch/test_interface.py adds a family from
outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from tunegemm.choose.policies import Policy
from tunegemm.compile.artifacts import Artifact, Key
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api
from tunegemm.dispatch.forms import Form
from tunegemm.dispatch.guards import (
    PLAIN,
    capturing,
    check_of,
    current_device,
    data_ptr,
    dispatch_modes,
    grad_enabled,
    is_lazy,
    is_transformed,
)
from tunegemm.dispatch.planning import LOOK_SECONDS, MAX_PLANS
from tunegemm.dispatch.states import own
from tunegemm.errors import ArtifactError, TunegemmError, one_line
from tunegemm.generate.generator import Kernels
from tunegemm.generate.takes import NotTaken
from tunegemm.store import packs
from tunegemm.store.record import Record

#: Replacements of ATen's operators, beyond those of two matrices, that `tunegemm.enable` installs: functions
#: of torch's kernel, by the operator's name. Rooms add theirs when they are imported, by `take_over`.
operators: dict[str, Callable[[Any], Callable[..., Any]]] = {}


def take_over(name: str, compute: Callable[..., Any]) -> None:
    """Let `tunegemm.enable` compute an ATen operator by a function of its arguments, which returns None for
    calls that torch computes."""

    def replacing(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def serve(keyset: Any, *arguments: Any, **keywords: Any) -> Any:
            result = compute(*arguments, **keywords)
            return kernel(keyset, *arguments, **keywords) if result is None else result

        return serve

    operators[name] = replacing


#: Holds the operators `tunegemm::NAME`.
library = torch.library.Library("tunegemm", "DEF")


def define(
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    tags: tuple[torch.Tag, ...] = (),
    autograd: Callable[..., Any] | None = None,
) -> None:
    """Define an operator `tunegemm::NAME` by its schema, ``NAME(Tensor a, ...) -> Tensor``.

    Graphs of torch.compile and torch.export hold such operators and do not look inside. compute: computes it
    below autograd. fake: returns the result for tensors without memory. autograd: computes it from the
    dispatch keys and the arguments, with derivatives; if None, the operator has none.
    """
    name = schema.partition("(")[0]
    library.define(schema, tags=tags)
    library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tunegemm::{name}", fake, lib=library)
    if autograd is None:
        autograd = partial(without_derivative, getattr(torch.ops.tunegemm, name).default, compute)
    library.impl(name, autograd, "Autograd", with_keyset=True)


def without_derivative(
    operator: Any, compute: Callable[..., Any], keyset: Any, *arguments: Any, **keywords: Any
) -> Any:
    """Compute an operator of `define` below autograd; compute: as given there.

    As for operators of torch without derivatives, a tangent of an operand raises NotImplementedError, and so
    does the backward pass of the result if an operand requires a gradient.
    """
    operands = [each for each in arguments if isinstance(each, torch.Tensor)]
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in operands
    ):
        raise NotImplementedError(
            f"Trying to use forward AD with {operator.name()} that does not support it because it has not "
            "been implemented yet."
        )
    with torch._C._AutoDispatchBelowAutograd():
        redispatched = any(type(each) not in PLAIN or each.is_meta for each in operands)
        if redispatched or dispatch_modes() or is_transformed():
            below = keyset & torch._C._after_autograd_keyset
            result = operator.redispatch(below, *arguments, **keywords)
        else:  # saves the way through torch's dispatcher
            result = compute(*arguments, **keywords)
    return undifferentiable(operator.name(), result, *operands)


def undifferentiable(name: str, result: Any, *operands: torch.Tensor) -> Any:
    """The result, tensors that `name` computed without autograd; if an operand requires a gradient, their
    backward pass raises RuntimeError, as torch's operators without derivatives do.
    """
    if grad_enabled() and any(each.requires_grad for each in operands):
        message, number = f"derivative for {name} is not implemented", 1 + len(operands)
        fail = torch._C._functions.DelayedError(message, number)
        result = tree_map_only(torch.Tensor, lambda each: fail(each, *operands)[0], result)
    return result


#: Layouts of operands that one key keeps.
_MOST_ALIKE = 4


@dataclass(frozen=True, slots=True)
class Known:
    """The decision for a key and a layout of operands."""

    launch: Any
    """The owner's object, such as a function; None if torch computes such calls."""
    check: Callable[..., bool] | None = None
    """Checks that operands have this layout; None if the key determines it."""
    again: float = float("inf")
    """When to decide again, on the monotonic clock."""
    layout: tuple[Any, ...] = ()
    """The facts about the operands that `check` compares, except torch's modes and dispatch keys."""


class LaunchCache:
    """The launches of one family, by keys of its own and the layout of tensors, under a context's policy.

    The layout is compared in C: types, dispatch keys, dtypes, devices, shapes, strides and `requires_grad`,
    but no addresses. A `refresh`, another policy or another mode drops them; decisions for torch also expire
    when new records appear.
    """

    def __init__(self, *, of_products: bool = False) -> None:
        """of_products: whether it keeps decisions of `api.dispatcher`, and expires with them."""
        self.of_products = of_products

    def find(self, key: Hashable, *tensors: torch.Tensor) -> Known | None:
        """The decision; None if it must be made (again). The key determines the number of tensors."""
        planner = api.dispatcher.planner
        kept = planner.states[own()].launches.get(self)
        if kept is not None:
            for known in kept.get(key, ()):
                if known.check is not None and not known.check(*tensors):
                    continue
                if known.launch is not None:
                    return known
                now = time.monotonic()
                holds = now < planner.quick.until and now < known.again  # `min` would cost more
                return known if holds or _holds(known, tensors) else None
            if tensors and capturing(tensors[0].device):
                # torch captures with copies of operands, possibly made in other modes, and nothing can be
                # decided during a capture.
                layout = _layout(tensors)
                return next((known for known in kept.get(key, ()) if known.layout == layout), None)
        return None

    def keep(self, key: Hashable, launch: Any, *tensors: torch.Tensor, waits: bool = False) -> Known:
        """Keep a decision; launch: None if torch computes. waits: keep it only for some seconds, as while a
        kernel is being compiled."""
        if any(tensor.is_meta for tensor in tensors):  # torch has no check of them, nor can they be read
            return Known(None)
        check = check_of(tensors) if tensors else None
        again = time.monotonic() + LOOK_SECONDS if waits else float("inf")
        known = Known(launch, check, again, _layout(tensors))
        kept = api.dispatcher.planner.state.launches.setdefault(self, {})
        if len(kept) >= MAX_PLANS:
            kept.clear()
        others = [item for item in kept.get(key, ()) if item.check is not None and not item.check(*tensors)]
        kept[key] = (known, *others[: _MOST_ALIKE - 1])
        return known

    def clear(self) -> None:
        """Forget all decisions under this context's policy."""
        api.dispatcher.planner.state.launches.pop(self, None)


def _layout(tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    return tuple((x.shape, x.stride(), x.dtype, x.device, is_lazy(x)) for x in tensors)


def _holds(known: Known, tensors: tuple[torch.Tensor, ...]) -> bool:
    """Whether torch still computes such calls; looks for new records if it is time."""
    if time.monotonic() > known.again:
        return False
    planner = api.dispatcher.planner
    state = planner.state
    return any(capturing(tensor.device) for tensor in tensors[:1]) or planner.look() is state


_kernels: dict[tuple[str, Any, int], Any] = {}


def compiled(family: str, key: Key) -> Artifact | None:
    """The object of a kernel that no record names: it ships, or is compiled in the background; None
    meanwhile. Raises ArtifactError if there will be none.
    """
    artifact = packs.find(key)
    if artifact is None:
        answer = api.dispatcher.planner.compiler.ask_for(family, key)
        if not answer.kernel:
            why = answer.failure or answer.refusal or "TUNEGEMM_COMPILE=0 forbids compiling it"
            raise ArtifactError(why)
    return artifact


def loaded(family: Kernels, config: Any, device: torch.device) -> Any:
    """A family's kernel of a configuration on a Hopper GPU, loaded once; None until it is compiled.

    Raises TunegemmError, OSError or RuntimeError if there is none.
    """
    name, index = family.name, device.index or 0
    kernel = _kernels.get((name, config, index))
    if kernel is None:
        if (reason := family.cannot_launch(device_of(device))) is not None:
            raise ArtifactError(reason)
        artifact = compiled(name, family.key_of(config))
        if artifact is None:
            return None
        assert family.kernel is not None
        with torch.cuda.device(index):
            kernel = _kernels[name, config, index] = family.kernel(config, artifact.path)
    return kernel


class Family:
    """A family whose kernels no record names: loads them and launches them, or warns why they cannot run."""

    of_tensors = False
    """Whether launches take tensors in place of their addresses."""

    def __init__(self, kernels: Kernels, what: str, otherwise: str) -> None:
        """what, otherwise: what the kernels compute, and what does so without them, as warnings say it."""
        self._kernels, self._what, self._otherwise = kernels, what, otherwise
        self.launches = LaunchCache()

    def kernel(self, config: Any, device: torch.device) -> tuple[Any, bool]:
        """The kernel of a configuration, None if there is none; and whether it is being compiled."""
        try:
            kernel = self.load(config, device)
        except (TunegemmError, OSError, RuntimeError) as error:
            self.missing(device, error)
            return None, False
        return kernel, kernel is None

    def load(self, config: Any, device: torch.device) -> Any:
        """As `loaded`, of this family."""
        return loaded(self._kernels, config, device)

    def missing(self, device: torch.device, error: Exception) -> None:
        """Warn that there are no kernels."""
        warn(f"kernels of {self._what} cannot run on {device}: {one_line(error)}; {self._otherwise}")

    def failed(self, device: torch.device, error: Exception) -> None:
        """Warn that a launch failed; raises the error while a CUDA graph is captured, which would keep
        another way than the one that its program measured."""
        if capturing(device):
            raise error
        text = f"a kernel of {self._what} failed to launch on {device} ({one_line(error)})"
        warn(f"{text}; {self._otherwise}")

    def launch(
        self,
        key: Hashable,
        tensors: Sequence[torch.Tensor],
        allocate: Callable[..., tuple[torch.Tensor, ...]],
        choose: Callable[..., tuple[Any, Callable[[Any], Any]] | None],
        *facts: Any,
    ) -> tuple[torch.Tensor, ...] | None:
        """Launch with the operands and the results; None if torch must compute them.

        The first operand's device is the current one meanwhile.
        allocate: makes the results, from the operands and the facts. It is not called for calls that torch
        computes, once that is decided.
        choose: decides once for operands of a key and a layout, from them, the results and the facts. It
        returns a configuration, and what makes the launch from its kernel; None if torch computes such calls.
        """
        device = tensors[0].device
        if device.type != device_type():
            return None
        if (device.index or 0) != current_device():
            with torch.cuda.device(device):
                return self.launch(key, tensors, allocate, choose, *facts)
        known = self.launches.find(key, *tensors)
        if known is None:
            known = self.decide(key, tensors, lambda: choose(*tensors, *allocate(*tensors, *facts), *facts))
        if known is None or known.launch is None:
            return None
        results = allocate(*tensors, *facts)
        try:
            given = (*tensors, *results)
            known.launch(*given if self.of_tensors else map(data_ptr, given))
        except NotTaken:
            return None
        except (RuntimeError, ValueError) as error:
            self.failed(device, error)
            self.launches.keep(key, None, *tensors)
            return None
        return results

    def decide(
        self,
        key: Hashable,
        tensors: Sequence[torch.Tensor],
        choose: Callable[[], tuple[Any, Callable[[Any], Any]] | None],
    ) -> Known | None:
        """Decide for operands of a key and a layout, and keep the decision; None if it cannot be made now.

        choose: as for `launch`, without arguments; what makes the launch may raise NotTaken.
        """
        device, launch, waits = tensors[0].device, None, False
        if device.type == device_type() and not is_off():
            if not may_load(device):
                self.falls_back(tensors, "is captured before it was computed once")
                return None
            if not any(map(is_lazy, tensors)) and (choice := choose()) is not None:
                kernel, waits = self.kernel(choice[0], device)
                try:
                    launch = None if kernel is None else choice[1](kernel)
                except NotTaken:
                    pass
                except (RuntimeError, ValueError) as error:
                    self.failed(device, error)
            if launch is None:
                self.falls_back(tensors, "has no kernel here")
        return self.launches.keep(key, launch, *tensors, waits=waits)

    def falls_back(self, tensors: Sequence[torch.Tensor], why: str) -> None:
        """Called when such calls fall back to torch. why: for example ``has no kernel here``."""


def device_of(device: torch.device) -> Device:
    """A GPU as launches may see it under the policy of this context."""
    return policy().device(find_device(f"cuda:{device.index or 0}"))


@cache
def gpu_of(device: torch.device) -> str:
    """The name of a GPU; empty for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU for which our kernels of groups and block scales are built."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def policy() -> Policy:
    """The policy of this context."""
    return api.dispatcher.planner.policy


def device_type() -> str:
    """torch's name of the devices whose products are served."""
    return api.dispatcher.planner.device_type


def is_off() -> bool:
    """Whether torch computes every product now."""
    return api.dispatcher.planner.is_off


def may_load(device: torch.device) -> bool:
    """Whether kernels may be loaded now: not while a CUDA graph is captured, nor in a child of a fork."""
    return not (torch.cuda._is_in_bad_fork() or capturing(device))


def allocation() -> Any:
    """Makes results, from (shape, strides, dtype), as fast as torch can."""
    return api.dispatcher.planner.allocate


def forget() -> None:
    """Make every call of a product decide again, as after a failed launch."""
    api.dispatcher.planner.state.forget_checks()


def warn(message: str | Callable[[], str], about: Hashable = None) -> None:
    """Warn that torch computes something, and why, unless already warned. about: see `Notices.warn`."""
    api.dispatcher.planner.notices.warn(message, about)


def observer() -> Callable[..., Any] | None:
    """During `tunegemm.record`, the function that records grouped calls and lets torch compute them."""
    return api.dispatcher.planner.observe_groups


def recorded(problem: Problem, device: torch.device) -> Record | None:
    """The record of a grouped product, or None."""
    return api.dispatcher.planner.recorded_groups(problem, device.index or 0)


def serves_by(form: Form, rows: int, weight: torch.Tensor) -> str:
    """The family of the kernel that serves so many dense rows times a weight (k, n) by `Dispatcher.fused`;
    empty if torch computes them."""
    a = torch.empty(rows, weight.shape[0], dtype=weight.dtype, device="meta")
    b = torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device="meta")
    result = api.dispatcher.planner.expected(form, a, b, weight.device.index or 0)
    return "" if result is None else result[2].candidate.family


def fingerprint(*, anywhere: bool = False) -> str:
    """A hash that changes with the served kernels; anywhere: equal on every host with the same records."""
    return api.dispatcher.planner.fingerprint(anywhere=anywhere)
