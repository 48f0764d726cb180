"""Whose policy holds, and what is known under each.

A policy is its context's: that of a thread, or of an asyncio task, which chose it by ``with
tunegemm.policy(...)``. A context that chose none has the process's. Autograd's own threads have that of the
thread that called ``backward``: torch copies what is stashed in its thread-local state to them.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from tunegemm.choose.policies import FASTEST, Policy
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.launchers import Plan, Prepared
from tunegemm.generate.launching import AddressLaunch
from tunegemm.store.record import Record

#: Policies whose plans are kept beside those of the process's own.
MAX_POLICIES = 4

_STASHED = "tunegemm_policy"


@dataclass(frozen=True, slots=True)
class Recent:
    """A plan with a check of whether operands are what it was made for.

    The check compares types, dispatch keys (functorch, tracing, autocast, inference mode), dtypes, devices,
    shapes, strides and `requires_grad`.
    """

    check: Callable[..., bool]
    plan: Plan | None
    launch: AddressLaunch | None
    """The plan's `launch_at`; None where products are torch's."""
    torchs: Callable[..., Any] | None
    """Torch's one function of the call's tensors, where it has one: what computes products without a plan."""
    requires_grad: bool
    """Whether an operand requires grad: not for a launch alone in grad mode."""
    bumps_version: bool
    """Whether a given output counts its versions: it is not an inference tensor."""
    device_index: int
    """Which device must be the current one; -1 where there is but one."""


class Compiling(NamedTuple):
    """A kernel that a problem waits for."""

    kernel: str
    """Its name."""
    record: Record

    waiting: set[tuple[Any, ...]]
    """Keys of plans that fall back to torch until then."""
    launch: None = None
    """As in `Prepared`, which takes its place."""

    @property
    def ratio(self) -> float:
        """As in `Prepared`."""
        return self.record.ratio


class Composed:
    """In the place of a plan: no kernel computes the product as a whole, but a tuned one without the rest."""

    def __bool__(self) -> Literal[False]:
        return False


COMPOSED = Composed()


class State:
    """What is read from disk and made of it under one policy; replaced as a whole by `Planner.refresh`."""

    def __init__(self, policy: Policy = FASTEST, snapshot: Snapshot | None = None) -> None:
        self.policy = policy
        self.plans: dict[tuple[Any, ...], Plan | Composed | None] = {}
        self.recent: dict[Hashable, Recent] = {}
        """Calls without a key, by hints; `Recent.check` decides. First the address of `b` and the form's tag;
        then that, the elements of `a` and the strides of `b`: a weight's products alternate where batch sizes
        do, and those of its input's gradient are between them; then the key of the plan, which layers share.
        By the sites of compiled code, too, which need no check: there `torchs` takes ``out``."""
        self.launches: dict[Any, dict[Hashable, Any]] = {}
        """What rooms above keep, by their `extension.LaunchCache`."""
        self.snapshot = snapshot
        self.prepared: dict[tuple[Problem, int], Prepared | Compiling | None] = {}
        self.misses: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        """Ranges of rows at which nothing serves a weight, by `weight_of` and device; the same lists by what
        a call is but for its rows."""

    def make_room(self, most: int) -> None:
        """Forgets the older half of the plans, and of what they are made of, if there are so many."""
        for kept in (self.plans, self.prepared, self.misses):
            if len(kept) >= most:
                for key in list(itertools.islice(kept, len(kept) // 2 + 1)):
                    del kept[key]
                self.forget_checks()

    def wait_for(self, kernel: str, failed: Plan) -> None:
        """A launch failed whose kernel is compiled now: plans of the same kernel are torch's until then."""
        index = failed.device.index or 0
        for key, plan in list(self.plans.items()):
            if isinstance(plan, Plan) and plan.device == failed.device and _share_a_kernel(plan, failed):
                assert plan.problem is not None and plan.record is not None
                self.plans[key] = None
                self.wait(plan.problem, index, kernel, plan.record).add(key)
        self.forget_checks()

    def wait(self, problem: Problem, index: int, kernel: str, record: Record) -> set[tuple[Any, ...]]:
        """The keys of plans that wait for a kernel that is being compiled for a problem."""
        known = self.prepared.get((problem, index))
        waiting = known.waiting if isinstance(known, Compiling) else set()
        self.prepared[problem, index] = Compiling(kernel, record, waiting)
        return waiting

    def forget_missing(self, kernel: str) -> None:
        """Plans that fell back for want of a kernel are made again."""
        for place, one in list(self.prepared.items()):
            if isinstance(one, Compiling) and one.kernel == kernel:
                del self.prepared[place]
                for key in one.waiting:
                    if not self.plans.get(key, key):
                        del self.plans[key]
        self.forget_checks()

    def forget(self, problem: Problem) -> None:
        """Plans of a problem are made again; those that fell back to torch, too: they name no problem."""
        self.misses.clear()
        self.prepared = {place: one for place, one in self.prepared.items() if place[0] != problem}
        self.plans = {key: plan for key, plan in self.plans.items() if plan and plan.problem != problem}
        self.forget_checks()

    def forget_checks(self) -> None:
        """Every call makes a key again."""
        self.recent.clear()
        for cache, known in self.launches.items():
            if cache.of_products:
                known.clear()


def _share_a_kernel(plan: Plan, other: Plan) -> bool:
    """Or differ in dtypes and majors alone."""
    if plan.record is None or other.record is None:
        return False
    return plan.record.candidate.kernel == other.record.candidate.kernel


class Chosen:
    """A policy that contexts choose. Equal policies are one object, whose hash costs next to nothing."""

    __slots__ = ("policy",)

    def __init__(self, policy: Policy) -> None:
        self.policy = policy


chosen_of = functools.cache(Chosen)
_own: ContextVar[Chosen | None] = ContextVar("tunegemm_policy", default=None)
#: The policy of this context; None where it has none of its own.
own = _own.get
_lock = threading.RLock()
_choices = 0


def choose(policy: Policy) -> Chosen | None:
    """Gives this context a policy of its own; what it had before, for `restore`."""
    global _choices
    before = own()
    with _lock:
        _choices += 1
        for states in list(_every.values()):
            states.pop(None, None)  # from now on contexts without one ask in `States.__missing__`
    _set(chosen_of(policy))
    return before


def restore(before: Chosen | None) -> None:
    """Gives this context the policy back that it had before `choose`."""
    _set(before)
    forget_choice()


def forget_choice() -> None:
    """One of `choose` counts no longer."""
    global _choices
    with _lock:
        _choices -= 1


def _set(chosen: Chosen | None) -> None:
    _own.set(chosen)
    _keep(chosen)
    torch._C._stash_obj_in_tls(_STASHED, chosen)


def _keep(chosen: Chosen | None) -> None:
    """A reference for torch 2.11, whose thread-local state takes one that it was not given. Elsewhere it is
    one too many, of objects that live as long as the process in any case."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(chosen))


def _of_backward() -> Chosen | None:
    """The policy of the thread that called ``backward``, of which this is a part; None where it is none."""
    if torch._C._current_graph_task_id() == -1 or not torch._C._is_key_in_tls(_STASHED):
        return None
    stashed: Chosen | None = torch._C._get_obj_in_tls(_STASHED)
    _keep(stashed)
    return stashed


class States(dict[Chosen | None, State]):
    """The state of each policy: ``states[own()]`` is that of this context.

    That of None is the process's. It is not kept while some context has a policy of its own, so that such a
    look-up comes to `__missing__`, which knows a backward pass.
    """

    def __init__(self, policy: Policy = FASTEST) -> None:
        super().__init__()
        self.policy = policy
        """The process's."""
        _every[id(self)] = self

    def __missing__(self, key: Chosen | None) -> State:
        with _lock:
            if key is None:
                state = self[_of_backward() or chosen_of(self.policy)]
                if not _choices:
                    self[None] = state
                return state
            known = next(iter(self.values()), None)
            state = State(key.policy, None if known is None else known.snapshot)
            self.put(state)
            return state

    def put(self, state: State) -> None:
        """Takes the place of what was known under the state's policy."""
        with _lock:
            self.pop(None, None)
            self[chosen_of(state.policy)] = state
            kept = chosen_of(self.policy), chosen_of(state.policy)
            if len(self) > MAX_POLICIES + 1:
                del self[next(key for key in self if key not in kept)]

    def use(self, policy: Policy) -> Policy:
        """The process has this policy from now on; the one before is returned."""
        with _lock:
            before, self.policy = self.policy, policy
            self.pop(None, None)
            return before

    def all(self) -> list[State]:
        """Each, once."""
        with _lock:
            return [state for key, state in self.items() if key is not None]

    def renew(self) -> States:
        """Others of the same policy, of which nothing is known."""
        return States(self.policy)


_every: weakref.WeakValueDictionary[int, States] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent's may have held it


os.register_at_fork(after_in_child=_after_fork)
