"""Whose policy holds, and what is known under each.

A policy is its context's: that of a thread, or of an asyncio task, which chose it by ``with
tunegemm.policy(...)``. A context that chose none has the process's. Autograd's own threads have that of the
thread that called ``backward``: torch copies what is stashed in its thread-local state to them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from contextvars import ContextVar

import torch

from tunegemm.choose.policies import FASTEST, Policy
from tunegemm.dispatch.plans import State

#: Policies whose plans are kept beside those of the process's own.
MAX_POLICIES = 4

_STASHED = "tunegemm_policy"


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
            state = State(key.policy) if known is None else State(key.policy, known.snapshot, known.modified)
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
