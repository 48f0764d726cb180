"""Each policy's plans, and which policy is active.

A policy belongs to a context: a thread or an asyncio task, which chooses it by ``with tunegemm.policy(...)``.
A context without its own policy uses the process's. Autograd's threads use the policy of the context that
called ``backward``: torch 2.13 copies that context for them, and all versions copy objects stashed in
thread-local state, where the policy of the block that began or ended last in the thread is.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tunegemm.choose.policies import FASTEST, Policy
from tunegemm.choose.snapshot import Snapshot
from tunegemm.describe.problem import Problem
from tunegemm.dispatch.launchers import Plan, Prepared
from tunegemm.generate.launching import AddressLaunch

#: How many policies keep their plans, besides the process's own policy.
MAX_POLICIES = 4
#: How many contexts' look-ups are kept: tasks may outlive the blocks that began them.
MAX_CONTEXTS = 64

_STASHED = "tunegemm_policy"
#: Removes an object from thread-local state. A thread that keeps one asks for the interpreter's lock as it
#: dies, which ends the process if the program is ending, too. An older torch may lack it.
_unstash: Callable[[str], None] | None = getattr(torch._C, "_remove_obj_from_tls", None)


@dataclass(frozen=True, slots=True)
class Recent:
    """A plan, and a check that operands match the ones it was made for.

    The check compares types, dispatch keys (functorch, tracing, autocast, inference mode), dtypes, devices,
    shapes, strides and `requires_grad`.
    """

    check: Callable[..., bool]
    plan: Plan | None
    launch: AddressLaunch | None
    """The plan's `launch_at`; None if torch computes the product."""
    torchs: Callable[..., Any] | None
    """The single torch function that computes the call without a plan, if there is one."""
    requires_grad: bool
    """Whether an operand requires grad: in grad mode, a launch alone does not suffice."""
    bumps_version: bool
    """Whether the caller's output has a version counter, that is, is not an inference tensor."""
    device_index: int
    """The device that must be current; -1 if there is only one."""


class Composed:
    """Stands in for a plan: a tuned kernel computes the product, but not together with its epilogue."""

    def __bool__(self) -> Literal[False]:
        return False


COMPOSED = Composed()
#: A `COMPOSED` from before records were published: it holds in a capture of a CUDA graph, and else is remade.
EARLIER = Composed()


class Quick(dict[int, Any]):
    """What the latest calls of patched layers came to, if that holds in every context, by the address of a
    weight and what is added to it: 1 for a layer with a bias, 2 for an MLP by its gate.

    A set holds the numbers of elements of inputs for which torch computes the layer, whatever their layout;
    any other object is an MLP's own. In a model each step of a call costs several times what it costs in a
    loop of one layer: with the dispatcher's own look-up, a layer without a kernel took 4 us more than torch,
    with this 1 (a CPU).
    """

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = 0.0
        """When sets end and records are looked for, on the monotonic clock."""


class State:
    """The records and plans of one policy. `Planner.refresh` replaces the whole object."""

    def __init__(self, policy: Policy = FASTEST, snapshot: Snapshot | None = None) -> None:
        self.policy = policy
        self.forget_quick: Callable[[], None] = lambda: None
        """Clears the planner's `Quick`, from `States.put` on."""
        self.plans: dict[tuple[Any, ...], Plan | Composed | None] = {}
        self.recent: dict[Hashable, Recent] = {}
        """Calls without a key, by hints; `Recent.check` decides. Hints are: the address of `b` and the form's
        tag; these with the number of elements of `a` and the strides of `b`, because a weight's products
        alternate with batch sizes, and its input's gradients lie between them; the key of the plan, which
        layers share; and sites of compiled code, which need no check: their `torchs` takes ``out``."""
        self.launches: dict[Any, dict[Hashable, Any]] = {}
        """Launches that higher-level packages keep, by their `extension.LaunchCache`."""
        self.snapshot = snapshot
        self.prepared: dict[tuple[Problem, int], Prepared | None] = {}
        self.misses: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        """Ranges of rows for which no kernel serves a weight, by `weight_of` and device. The same lists are
        also stored under all parts of a call except its rows."""

    def make_room(self, most: int) -> None:
        """Drop the older half of the plans, launchers or misses when there are `most` of them."""
        for kept in (self.plans, self.prepared, self.misses):
            if len(kept) >= most:
                for key in list(itertools.islice(kept, len(kept) // 2 + 1)):
                    del kept[key]
                self.forget_checks()

    def wait_for(self, kernel: str, failed: Plan) -> None:
        """Send plans that share a failed plan's kernel to torch until that kernel is compiled."""
        index = failed.device.index or 0
        for key, plan in list(self.plans.items()):
            if not isinstance(plan, Plan) or plan.device != failed.device:
                continue
            record, other, problem = plan.record, failed.record, plan.problem
            if record is None or other is None or problem is None:
                continue
            if record.candidate.kernel == other.candidate.kernel:  # their dtypes and majors may differ
                self.plans[key] = None
                known = self.prepared.get((problem, index))
                if known is None or known.compiling != kernel:
                    known = self.prepared[problem, index] = Prepared(record=record, compiling=kernel)
                known.waiting.add(key)
        self.forget_checks()

    def forget_missing(self, kernel: str) -> None:
        """Forget plans that fell back because this kernel was missing, so that they are made again.

        Others stay: a graph that is captured meanwhile needs them, and a failed launch is not repeated.
        """
        for place, item in list(self.prepared.items()):
            if item is not None and item.compiling == kernel:
                del self.prepared[place]
                for key in item.waiting:
                    if not self.plans.get(key, key):
                        del self.plans[key]
                self.forget_checks()

    def forget(self, problem: Problem) -> None:
        """Forget the plans of a problem, and all plans that fell back to torch, because those name no
        problem.
        """
        self.misses.clear()
        self.prepared = {place: item for place, item in self.prepared.items() if place[0] != problem}
        self.plans = {key: plan for key, plan in self.plans.items() if plan and plan.problem != problem}
        self.forget_checks()

    def forget_checks(self) -> None:
        """Forget all checks and launches of products, so that every call makes its key again."""
        self.forget_quick()
        self.recent.clear()
        for cache, known in self.launches.items():
            if cache.of_products:
                known.clear()


class Block:
    """A ``with`` block, in the contexts where its policy holds: its own, and those copied from it meanwhile,
    such as the tasks that it starts."""

    __slots__ = ("began", "ended_elsewhere", "outer", "policy")

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.began: Token[tuple[Block, ...]] | None = None
        self.outer: Block | None = None
        """The block with which it ends, if it is a call within one."""
        self.ended_elsewhere = False
        """Whether it ended in another context than it began in, which cannot be reached from there: a task
        that closes the generator of another one. `States.__missing__` looks at this."""

    @property
    def is_over(self) -> bool:
        """Whether it holds in no context."""
        return self.ended_elsewhere or (self.outer is not None and self.outer.ended_elsewhere)


_own: ContextVar[tuple[Block, ...]] = ContextVar("tunegemm_policy", default=())
_own.set(())  # copies of this context, as tasks', then say that no block holds; empty ones say nothing
#: Returns the blocks that hold in this context, the last of which decides.
own = _own.get
_lock = threading.RLock()
_begun = 0
#: One object for equal policies, which lives as long as the process: see `_keep`.
_one = functools.cache(lambda policy: policy)


def begin(policy: Policy) -> Block:
    """Let a policy hold in this context until the block ends."""
    global _begun
    with _lock:
        _begun += 1
        for states in list(_every.values()):
            states.pop((), None)  # contexts without a policy now reach `States.__missing__`
            states.quick.clear()
    block = Block(policy)
    block.began = _set((*own(), block))
    return block


def end(block: Block) -> None:
    """End a block, also one that is not the last: the last of those that remain decides then."""
    blocks = own()
    try:
        assert block.began is not None
        _own.reset(block.began)
    except ValueError:  # it began in another context
        block.ended_elsewhere = True
    _set(tuple(each for each in blocks if block not in (each, each.outer)))
    _count_less(block)


def end_with_outer(block: Block) -> None:
    """Let a block hold until the one around it ends; end it if there is none here."""
    *outer, last = own() or (None,)
    if last is block and outer:
        block.outer = outer[-1].outer or outer[-1]
        _count_less(block)
    else:
        end(block)


def _count_less(block: Block) -> None:
    global _begun
    block.began = None
    with _lock:
        _begun -= 1
        for states in list(_every.values()):
            for blocks in [blocks for blocks in list(states) if block in blocks]:
                del states[blocks]


def _set(blocks: tuple[Block, ...]) -> Token[tuple[Block, ...]]:
    policy = _one(blocks[-1].policy) if blocks else None
    if policy is None and _unstash is not None:
        if torch._C._is_key_in_tls(_STASHED):
            _unstash(_STASHED)
    else:
        _keep(policy)
        torch._C._stash_obj_in_tls(_STASHED, policy)
    return _own.set(blocks)


def _keep(policy: Policy | None) -> None:
    """Add a reference, because the thread-local state of torch 2.11 steals one. In other versions this leaks
    a reference, which is harmless: these objects live as long as the process."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(policy))


def _of_backward() -> Policy | None:
    """The policy of the context that called ``backward``; None outside a backward pass, or if it has none.

    A pass that another one calls in autograd's threads has their empty context, and so does without it.
    """
    if torch._C._current_graph_task_id() == -1:
        return None
    caller = torch._C._get_obj_in_tls("context") if torch._C._is_key_in_tls("context") else None
    if caller is not None and (blocks := caller.get(_own)) is not None:
        for block in reversed(blocks):
            if not block.is_over:
                return block.policy
        return None
    if not torch._C._is_key_in_tls(_STASHED):
        return None
    stashed: Policy | None = torch._C._get_obj_in_tls(_STASHED)
    _keep(stashed)
    return stashed


class States(dict[tuple[Block, ...], State]):
    """The state of each policy: ``states[own()]`` is this context's state.

    It keeps what `__missing__` found. The key of no blocks stands for the process's policy. It is not kept
    while any context has a block: the look-up then reaches `__missing__`, which recognizes a backward pass.
    """

    def __init__(self, policy: Policy = FASTEST, quick: Quick | None = None) -> None:
        super().__init__()
        self.policy = policy
        """The process's policy."""
        self.quick = Quick() if quick is None else quick
        self.quick.clear()
        self._of_policy: dict[Policy, State] = {}
        _every[id(self)] = self

    def __missing__(self, blocks: tuple[Block, ...]) -> State:
        with _lock:
            if any(block.is_over for block in blocks):
                is_own = own() is blocks
                blocks = tuple(block for block in blocks if not block.is_over)
                if is_own:
                    _set(blocks)
            policy = blocks[-1].policy if blocks else _of_backward() or self.policy
            if (state := self._of_policy.get(policy)) is None:
                known = next(iter(self._of_policy.values()), None)
                state = State(policy, None if known is None else known.snapshot)
                self.put(state)
            if len(self) >= MAX_CONTEXTS:
                self.clear()
            if blocks or not _begun:
                self[blocks] = state
            return state

    def put(self, state: State) -> None:
        """Replace the state of this state's policy."""
        with _lock:
            self.clear()
            self.quick.clear()
            state.forget_quick = self.quick.clear
            self._of_policy[state.policy] = state
            if len(self._of_policy) > MAX_POLICIES + 1:
                kept = self.policy, state.policy
                del self._of_policy[next(policy for policy in self._of_policy if policy not in kept)]

    def use(self, policy: Policy) -> Policy:
        """Set the process's policy; returns the previous one."""
        with _lock:
            before, self.policy = self.policy, policy
            self.pop((), None)
            self.quick.clear()
            return before

    def put_quick(self, state: State, key: int, entry: Any) -> None:
        """Add an entry to `quick`, or numbers to an entry, if this state is that of every context."""
        with _lock:
            if not _begun and self._of_policy.get(self.policy) is state:
                known = self.quick.get(key)
                self.quick[key] = entry | known if type(entry) is type(known) is set else entry

    def all(self) -> list[State]:
        """Every state."""
        with _lock:
            return list(self._of_policy.values())


_every: weakref.WeakValueDictionary[int, States] = weakref.WeakValueDictionary()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)
