"""Makes plans on the first call of a key, off the hot path and mostly under a lock.

Nothing is tuned or compiled here: `dispatch.background` compiles missing kernels, and in mode `online` tunes
problems without a record when the GPU is idle.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from tunegemm.choose.operators import absorbed, least_ratio
from tunegemm.choose.policies import Mode, Policy, read_mode, read_policy, read_switch
from tunegemm.choose.selection import Selection, read_rivals, recorded, select
from tunegemm.choose.snapshot import Snapshot, read_snapshot
from tunegemm.describe.device import Device, find_device, package_version
from tunegemm.describe.problem import MAX_ALIGNMENT, Problem
from tunegemm.dispatch.background import Answer, BackgroundCompiler, OnlineTuning, make_pool
from tunegemm.dispatch.forms import BELOW_AUTOGRAD, LINEAR, Call, Form, Refusal, describe, named
from tunegemm.dispatch.guards import allocation, capturing, deterministic
from tunegemm.dispatch.launchers import Plan, Prepared, make_plan, prepare, refusal_of
from tunegemm.dispatch.notices import Notices, advice, named_error, weight_of, who
from tunegemm.dispatch.states import COMPOSED, EARLIER, Composed, Quick, State, States, own
from tunegemm.errors import TunegemmError, TunegemmWarning, one_line, raised
from tunegemm.generate import families
from tunegemm.generate.cublaslt import is_torch
from tunegemm.store.layers import modified
from tunegemm.store.record import Record
from tunegemm.store.validity import Grade
from tunegemm.store.waiting import deadline_s

if TYPE_CHECKING:
    from tunegemm.compile.pool import CompilePool
    from tunegemm.tuning.progress import TuneResult

#: Computes a product from a form, a, b, the epilogue's tensors, an output and a function that calls torch.
Observe: TypeAlias = Callable[[Form, Any, Any, Sequence[Any], Any, Callable[[], Any]], Any]

#: Most keys whose plans are kept; beyond that the older half is dropped. A plan takes about 4 kB, and the
#: shapes of some programs never repeat.
MAX_PLANS = 4096
#: Seconds between checks for records that other processes published.
LOOK_SECONDS = 5.0
#: Seconds that all reads of records together may delay a product, for example while a database is locked.
READ_SECONDS = 2.0
#: Code compiled for any number of rows needs a predicted gain for at least one of these numbers.
_FEW = (16, 1, 64, 256)

_log = logging.getLogger(__name__)


class Planner:
    """Keeps the plans of each policy, and makes missing ones from records, which it reads once."""

    def __init__(
        self,
        *,
        device_type: str = "cuda",
        read: Callable[[], Snapshot] = read_snapshot,
        find: Callable[[str], Device] = find_device,
        prepare: Callable[[Record, Device], Prepared] = prepare,
        modified: Callable[[], Hashable] = modified,
        rivals: Callable[[Problem], Sequence[Record]] = read_rivals,
        online: OnlineTuning | None = None,
        pool: Callable[[], CompilePool] = make_pool,
    ) -> None:
        """The arguments are the sources of records, devices and launchers, a value that changes with records,
        and the objects that tune online and compile missing kernels.
        """
        self.device_type = device_type
        self._read, self._modified = read, modified
        self.lock = threading.RLock()
        self._online = online or OnlineTuning()
        self.notices = Notices()
        self.compiler = BackgroundCompiler(self._serve_compiled, pool)
        self._find, self._prepare, self._rivals = find, prepare, rivals
        self._devices: dict[int, Device | None] = {}
        """Those on which products were planned, by index; None for one that cannot be found."""
        self.quick = Quick()
        self.states = States(quick=self.quick)
        """The state of each policy. A state is replaced as a whole, so it can be read without a lock."""
        self._mode: Mode | None = None
        self.allocate: Any = allocation(device_type)
        """Makes outputs, from (shape, strides, dtype)."""
        self.observe: Observe | None = None
        self.observe_groups: Callable[..., Any] | None = None
        """Observers that compute products by torch while planning is suspended, and record the requests."""
        _planners.add(self)

    def refresh(self) -> None:
        """Forget all plans; the database is read again on the next call."""
        with self.lock:
            self.states = States(self.states.policy, self.quick)
            self.notices.forget()
            self._devices = {}

    @property
    def state(self) -> State:
        """The state of this context's policy."""
        return self.states[own()]

    @property
    def mode(self) -> Mode:
        """The dispatch mode, which is read on the first call."""
        return self._mode or self._begin()

    @property
    def policy(self) -> Policy:
        """The policy that serves products now."""
        self.mode  # noqa: B018 - the environment's policy is read with it
        return self.state.policy

    def use(self, policy: Policy) -> Policy:
        """Set the policy of contexts without their own; returns the previous one. Each policy has its own
        plans."""
        self.mode  # noqa: B018
        return self.states.use(policy)

    def suspend(
        self, observe: Observe | None = None, observe_groups: Callable[..., Any] | None = None
    ) -> Callable[[], None]:
        """Let torch compute every product until the returned function is called.

        observe: computes products meanwhile, except those below autograd, by calling its last argument;
        observe_groups does the same for gated groups.
        """
        mode = self.mode
        with self.lock:  # calls that are known would launch whatever the mode is
            self._mode, self.observe, self.observe_groups = "off", observe, observe_groups
            kept = {state: state.launches for state in self.states.all()}
            for state in kept:
                state.launches = {}
                state.forget_checks()

        def resume() -> None:
            with self.lock:
                self._mode, self.observe, self.observe_groups = mode, None, None
                for state in self.states.all():
                    state.launches = kept.get(state, {})
                    state.forget_checks()

        return resume

    def tuned(self) -> list[tuple[Problem, Record]]:
        """The problems that have a plan with a tuned kernel, and the record of each."""
        with self.lock:
            plans = [plan for state in self.states.all() for plan in state.plans.values()]
        return [(p.problem, p.record) for p in plans if p and p.problem is not None and p.record is not None]

    @property
    def is_off(self) -> bool:
        """Whether torch computes every product."""
        return self.mode == "off"

    def plan(self, key: tuple[Any, ...], call: Call) -> tuple[State, Plan | Composed | None]:
        """Make and keep the plan of a key; keeps nothing while a CUDA graph is being recorded.

        For a key that falls back to torch, this only reads the clock, and occasionally checks files.
        """
        state, form, a, b = self.state, call.form, call.a, call.b
        found = state.plans.get(key, EARLIER)
        if (known := found is not EARLIER) and time.monotonic() < self.quick.until:
            return state, found
        if torch.cuda._is_in_bad_fork() or capturing(a.device):
            if state.policy.is_batch_invariant and not isinstance(state.plans.get(key), Composed):
                self.notices.warn(
                    f"a product of {tuple(a.shape)} and {tuple(b.shape)} is captured before it was computed "
                    f"once, so torch computes it in this CUDA graph: {state.policy} does not hold. "
                    "Call it first",
                    about=("captured", tuple(b.shape), b.dtype),
                )
            return state, state.plans.get(key)
        with self.lock:
            state = self.look() if known else self.state
            if (found := state.plans.get(key, EARLIER)) is not EARLIER:
                return state, found
            plan: Plan | Composed | None = None
            if not self._is_missing(state, call):
                with torch.inference_mode(False), torch.no_grad(), self._guarded(state):
                    plan = self._make_plan(state, key, call)
                    composed = plan is None and not form.is_plain and form.call != BELOW_AUTOGRAD
                    if composed and self._has_tuned_product(state, form, a, b):
                        plan = COMPOSED
            state.make_room(MAX_PLANS)
            state.plans[key] = plan
        return state, plan

    def _is_missing(self, state: State, call: Call) -> bool:
        """Whether a product's number of rows is in a range that is known to have no kernel. An earlier search
        with another number of rows yields such a range (`Selection.rows`); a serving engine keeps bringing
        new numbers."""
        form = call.form
        if not state.misses or call.b.ndim != 2 or not (form.is_plain or form.call == BELOW_AUTOGRAD):
            return False
        if (ranges := state.misses.get(_but_for_rows(call))) is None:
            return False
        rows = math.prod(call.a.shape[:-1])
        return any(low <= rows <= high for low, high in ranges)

    def _apply_feedback(
        self, problem: Problem, served: Prepared | None, result: TuneResult | None, warning: str
    ) -> None:
        """Apply a result of online tuning: plans of the problem are made again if the kernel changes."""
        if warning:
            self.notices.warn(warning)
        best = result.best if result is not None else None
        record = served.record if served is not None else None
        if best is None or (record is not None and best.candidate == record.candidate):
            return
        with self.lock:
            for state in self.states.all():
                state.snapshot = None  # read on the next product without a plan
                state.forget(problem)

    def look(self) -> State:
        """The state, without its misses if a check is due and finds that records were published.

        Plans of tuned kernels and near hits stay, also for a thread that captures a graph meanwhile; better
        records for them wait for `refresh`.
        """
        with self.lock:
            if time.monotonic() < self.quick.until:
                return self.state
            self.quick.until = time.monotonic() + LOOK_SECONDS
            self.quick.clear()
            for old in self.states.all():
                # Another weight may lie at the address of one that torch computes.
                for hint in [hint for hint, recent in list(old.recent.items()) if recent.plan is None]:
                    old.recent.pop(hint, None)
                changed = False
                with suppress(Exception):  # `_records` has warned of it
                    changed = old.snapshot is not None and self._modified() != old.snapshot.modified
                if changed:
                    new = State(old.policy)
                    new.plans = {key: plan or EARLIER for key, plan in old.plans.items() if plan is not None}
                    new.prepared = {
                        key: result for key, result in old.prepared.items() if result and result.launch
                    }
                    self.states.put(new)
            return self.state

    def _make_plan(self, state: State, key: tuple[Any, ...], call: Call) -> Plan | None:
        form, a, b, tensors, _, out = call
        name, others = form.name(a), (b, *tensors) if out is None else (b, *tensors, out)
        if any(tensor.device != a.device for tensor in others):
            return None
        if form.call == LINEAR:
            if b.ndim != 2:
                return None
            b = b.t()
        asked = named(form, a, b, tensors, out)
        if isinstance(asked, Refusal):
            if asked.reason and name:
                about = "refused", tuple(b.shape), b.stride(), b.dtype, form.text
                self.notices.warn(f"{asked.reason}; {who(name)} falls back to torch", about)
            return None
        problem = asked.problem
        if a.device.type != self.device_type:
            self.notices.warn(
                lambda: (
                    f"{problem} on {a.device.type}: {who(name)} falls back to torch, as every "
                    "product there does. " + advice(problem, "On a CUDA device, tune it with")
                ),
                about=("device", a.device.type),
            )
            return None
        index = a.device.index or 0
        prepared = self._prepared(state, problem, index, name)
        if prepared is None or prepared.launch is None:
            ranges = state.misses.get(_weight(problem, index))
            if ranges is not None and b.ndim == 2 and problem.batch == 1:
                state.misses[_but_for_rows(call)] = ranges
            if prepared is not None and prepared.compiling:
                prepared.waiting.add(key)
            return None
        if (refused := refusal_of(prepared, asked, a, b)) is not None:
            if refused.reason and name:
                text = f"{problem}: {refused.reason}; {who(name)} falls back to torch"
                self.notices.warn(text, ("unaligned", *weight_of(problem)))
            return None
        try:
            return make_plan(prepared, asked, call._replace(b=b))
        except Exception as error:  # launchers of other packages may raise anything
            text = f"{problem}: {named_error(error)}; {who(name)} falls back to torch"
            self.notices.warn(text, ("strides", *weight_of(problem)))
            return None

    def _has_tuned_product(self, state: State, form: Form, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether a tuned kernel computes the product without its epilogue.

        For calls that have no fused kernel. False if the library absorbs a step of the epilogue.
        """
        taken = absorbed(form.epilogue.steps)
        if state.policy.is_batch_invariant and taken == ("bias_n",):
            taken = ()  # `compute` then adds the bias itself: torch's call with a bias is another product
        if taken or (form.call == LINEAR and b.ndim != 2):
            return False
        if (
            a.dtype is torch.float16
            and form.epilogue.steps != ("relu",)
            and not state.policy.is_batch_invariant
        ):
            return False  # the epilogue may bring sums that overflow fp16 back into its range
        index = a.device.index or 0
        known, right = self._devices.get(index), b.t() if form.call == LINEAR else b
        whole, operands = describe(a, right, None, form), describe(a, right)
        if isinstance(whole, Refusal) or isinstance(operands, Refusal) or known is None:
            return False
        if form.out_dtype not in (None, a.dtype) or state.snapshot is None:
            return False
        known_whole = state.prepared.get((whole.problem, index))
        if known_whole is not None and not known_whole.compiling:  # torch won there
            return False
        result = select(
            state.snapshot, operands.problem, known, near=self.mode != "exact", policy=state.policy
        )
        return bool(result.options) and not is_torch(result.options[0].candidate)

    def serves(
        self, form: Form, a: torch.Tensor, b: torch.Tensor, index: int, *, any_m: bool = False
    ) -> bool:
        """Whether `Dispatcher.fused` has a kernel for these shapes, strides and dtypes that gains enough.

        The kernel must be ready or being compiled; `choose.operators` defines the gain. For compiled code:
        a and b may be tensors without memory. any_m: whether a record of another m suffices. Warns if
        there is no record.
        """
        if any_m and not (self.is_off or deterministic() or self.mode == "exact"):
            with self.lock, torch.inference_mode(False), torch.no_grad():
                asked = describe(a, b, None, form)
                if isinstance(asked, Refusal):
                    return False
                if self._records(self.state, form.name(a)).extents(asked.problem):
                    return True
        result = self.expected(form, a, b, index)
        if result is None:
            # Engines trace with the rows of a long prompt, for which few gains are predicted, and generate
            # with the same code. At rows without a kernel the compiler does worse with longer epilogues than
            # with its own product.
            rows = _FEW if any_m and a.ndim == 2 and form.text in ("", "bias_n") else ()
            facts: Any = {"dtype": a.dtype, "device": "meta"}
            few = (torch.empty_strided((m, a.shape[1]), a.stride(), **facts) for m in rows)
            return any(self.serves(form, item, b, index) for item in few)
        problem, known, record = result
        if self.state.policy.is_batch_invariant:  # the compiler would call torch's product
            return True
        return record.ratio >= least_ratio(problem, known)

    def expected(
        self, form: Form, a: torch.Tensor, b: torch.Tensor, index: int
    ) -> tuple[Problem, Device, Record] | None:
        """The problem, the device and the record of the kernel that `serves` judges; None without a kernel.
        The kernel is ready or being compiled, and may not gain in compiled code."""
        if self.is_off or deterministic():
            return None
        with self.lock, torch.inference_mode(False), torch.no_grad():
            operands = describe(a, b, None, form)
            if isinstance(operands, Refusal):
                return None
            problem, state = operands.problem, self.state
            prepared = self._prepared(state, problem, index, form.name(a))
            known = self._devices.get(index)
        # Compiled code is kept, even on disk, so it must be able to use the kernel once that is ready.
        if known is None or prepared is None or not (prepared.compiling or prepared.launch):
            return None
        assert prepared.record is not None
        return problem, known, prepared.record

    def fingerprint(self, *, anywhere: bool = False) -> str:
        """A hash of everything that `serves` depends on; anywhere: without the host's file times."""
        mode = self.mode
        with self.lock:
            state = self.state
            snapshot = self._records(state, "")
            of_records = None if anywhere else snapshot.modified, snapshot.digest
            facts = package_version("tunegemm"), mode, state.policy, *of_records
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def _prepared(self, state: State, problem: Problem, index: int, name: str) -> Prepared | None:
        """The launcher of the problem's record, or one being compiled, or None after a warning that explains
        why."""
        if (problem, index) not in state.prepared:
            with self._guarded(state):
                result = self._search(state, problem, index, name)
                if result is not None:
                    state.prepared[problem, index] = result
            state.prepared.setdefault((problem, index), None)  # unless its kernel is compiled
        return state.prepared[problem, index]

    def _search(self, state: State, problem: Problem, index: int, name: str) -> Prepared | None:
        """The launcher of the first selected kernel that can be launched here. If there is none, starts to
        compile one or explains why, and returns None."""
        known = self._find_device(index, name)
        if known is None:
            return None
        misses = state.misses.get(_weight(problem, index), ()) if state.misses else ()
        if any(low <= problem.m <= high for low, high in misses):
            return None
        snapshot, mode, result = self._records(state, name), self.mode, None
        selection = select(
            snapshot,
            problem,
            known,
            near=mode != "exact",
            policy=state.policy,
            # Do not wait again for databases that cannot be read.
            rivals=self._rivals if not snapshot.warnings else lambda problem: (),
        )
        why = selection.why
        for record in selection.options:
            try:
                with torch.cuda.device(index) if self.device_type == "cuda" else nullcontext():
                    prepared = self._prepare(record, state.policy.device(known))
            except Exception as error:  # the family of a foreign record may raise anything
                why = named_error(error)
                continue
            result = replace(prepared, record=record)
            break
        else:
            answer = self._compile_first(state, problem, known, index, selection.options)
            self._explain_missing(answer, state, snapshot, problem, known, selection, why, name)
        if selection.rows is not None and mode != "online":
            state.misses.setdefault(_weight(problem, index), []).append(selection.rows)
        if mode == "online" and selection.outcome != "hit":
            is_served = selection.outcome == "predicted" and result is not None
            notify = partial(self._apply_feedback, problem, result)
            self._online.later(problem, known, selection.offers if is_served else (), notify)
        return result

    def _compile_first(
        self, state: State, problem: Problem, device: Device, index: int, options: Sequence[Record]
    ) -> Answer:
        """Compile the first of these records' kernels that can be compiled, in the background."""
        answer = Answer()
        if capturing(torch.device(self.device_type, index)):
            return answer
        for record in options:
            try:
                answer = self.compiler.ask(record, device)
            except Exception as error:  # a foreign record's family may raise anything
                answer = Answer(failure=named_error(error))
            if answer.kernel:
                state.prepared[problem, index] = Prepared(record=record, compiling=answer.kernel)
            if answer.kernel or answer.refusal:
                break
        return answer

    def _explain_missing(
        self, answer: Answer, state: State, snapshot: Snapshot, problem: Problem, device: Device,
        selection: Selection, why: str, name: str,
    ) -> None:  # fmt: skip
        """Warn about what a product lacks, and the remedy. answer: from `_compile_first`; why: what the
        selection's last option lacks, or why it has no options."""
        weight = device.name, *weight_of(problem)
        if answer.kernel:
            if state.policy.replaces_torch:
                self.notices.warn(
                    f"{problem} on {device.name}: its kernel is compiled in the background, and torch "
                    f"computes it meanwhile: {state.policy} does not hold until then",
                    about=("compiled", *weight),
                )
            return
        if not selection.options:
            answer = Answer(refusal=_missing_package(snapshot, problem, device))
        if answer.refusal:
            self.notices.warn(
                f"recorded kernels cannot run on {device.name} and are not compiled: {answer.refusal}; "
                "tunegemm falls back to torch for their products",
            )
            return
        if answer.failure:
            why = f"its kernel does not compile here ({answer.failure})"
        # In mode online the product is tuned later, or a warning says why it could not be.
        if selection.outcome == "predicted":
            self.notices.warn(
                f"a kernel that is predicted to be faster than torch cannot run on {device.name}: {why}; "
                "products like that fall back to torch",
                about=("predicted", why),
            )
        elif selection.options or (
            selection.advises_tuning
            and self.mode != "online"
            and not snapshot.warnings  # the unread source may have its record
        ):
            self.notices.warn(
                lambda: (
                    f"{problem} on {device.name}: {why}; {who(name)} falls back to torch. "
                    + advice(problem, "Tune it with")
                ),
                about=("untuned", *weight),
            )

    def _find_device(self, index: int, name: str) -> Device | None:
        """The device of an index, or None after a warning. name: the function that was called."""
        if index not in self._devices:
            try:
                self._devices[index] = self._find(f"{self.device_type}:{index}")
            except Exception as error:  # includes errors of the driver or NVML
                self._devices[index] = None
                self.notices.warn(f"{one_line(error)}; {who(name)} falls back to torch there")
        return self._devices[index]

    @contextmanager
    def _guarded(self, state: State) -> Iterator[None]:
        """Turn any error inside, including our own bugs, into one warning. Torch then computes the product,
        or raises its own error. All reads inside together wait for at most `READ_SECONDS`."""
        try:
            with _in_time():
                yield
        except TunegemmWarning:  # the user turned these warnings into errors
            raise
        except Exception as error:
            _log.debug("planning failed", exc_info=error)
            if isinstance(error, OSError) and state.snapshot is not None and state.snapshot.warnings:
                return  # a warning already names the unreadable source
            name = raised(error)
            self.notices.warn(
                f"planning failed ({name}: {one_line(error)}); tunegemm falls back to torch for such "
                "products. Logging of `tunegemm` at level DEBUG has the traceback",
                about=("planning", name),
            )

    def recorded_groups(self, problem: Problem, index: int) -> Record | None:
        """The record of a grouped product on the device of an index, or None."""
        with self.lock, self._guarded(self.state):
            snapshot = self._records(self.state, "grouped_mm")
            if snapshot.extents(problem):
                known = self._find_device(index, "grouped_mm")
                if known is not None:
                    near = self.mode != "exact"
                    return recorded(snapshot, problem, known.fingerprint, near=near)
        return None

    def _serve_compiled(self, kernel: str) -> None:
        """Plan the calls again that wait for a kernel, which is now compiled or failed to compile."""
        with self.lock:
            for state in self.states.all():
                state.forget_missing(kernel)

    def _records(self, state: State, name: str) -> Snapshot:
        """The records, read on first use. name: the function that was called."""
        if state.snapshot is not None:
            return state.snapshot
        self.quick.until = time.monotonic() + LOOK_SECONDS
        try:
            with _in_time():
                snapshot = self._read()
        except Exception as error:
            _log.debug("records cannot be read", exc_info=error)
            self.notices.warn(f"{one_line(error)}; {who(name)} falls back to torch for every product")
            seen: Hashable = None
            with suppress(Exception):
                seen = self._modified()
            snapshot = Snapshot(warnings=[one_line(error)], modified=seen)
        else:
            if snapshot.warnings:
                lacking = "; ".join(snapshot.warnings)
                self.notices.warn(f"{lacking}; {who(name)} continues without its records")
        state.snapshot = snapshot
        return snapshot

    def drop(self, state: State, key: tuple[Any, ...], plan: Plan, a: Any, b: Any, error: Exception) -> None:
        """Drop a plan that failed to launch: torch computes it, for good or until a kernel is compiled."""
        if capturing(plan.device):
            raise error
        answer, index = Answer(), plan.device.index or 0
        with self.lock:
            known = self._devices.get(index)
            if plan.problem is not None and plan.record is not None and known is not None:
                # A driver too old for a shipped kernel rejects it only at launch.
                with self._guarded(state):
                    answer = self._compile_first(state, plan.problem, known, index, (plan.record,))
            if answer.kernel:
                state.wait_for(answer.kernel, plan)
            state.plans[key] = None
            state.forget_checks()
        self.notices.warn(
            f"the tuned kernel for {tuple(a.shape)} x {tuple(b.shape)} failed to launch "
            f"({one_line(error)}); tunegemm falls back to torch"
            + (" until it is compiled here" if answer.kernel else ""),
            about=("launch", tuple(b.shape), b.dtype),
        )

    def _begin(self) -> Mode:
        """Read the mode and the policy, on the first product or when a policy is chosen before it."""
        warn = self.notices.warn
        with self.lock:
            if self._mode is None:
                self.compiler.is_on = read_switch("TUNEGEMM_COMPILE", warn)
                self._mode = read_mode(warn)
                self.use(read_policy(warn))
        return self._mode


@contextmanager
def _in_time() -> Iterator[None]:
    """Bound all reads inside together by `READ_SECONDS`; an earlier deadline of the context stays."""
    token = deadline_s.set(min(deadline_s.get(), time.monotonic() + READ_SECONDS))
    try:
        yield
    finally:
        deadline_s.reset(token)


def _missing_package(snapshot: Snapshot, problem: Problem, device: Device) -> str:
    """The package to install for the problem's record; empty if none is missing."""
    judged = snapshot.judged(problem, device.fingerprint)
    if not judged or judged[0][0].grade is not Grade.SEED:
        return ""
    try:
        return families.get(judged[0][1].candidate.family).unavailable(launching=True) or ""
    except TunegemmError:  # another package's family, which is not installed
        return ""


def _weight(problem: Problem, index: int) -> tuple[Hashable, ...]:
    return (*weight_of(problem), problem.batch, index)


def _but_for_rows(call: Call) -> tuple[Hashable, ...]:
    """Everything except rows that determines a call's problem; includes all strides of non-dense tensors."""
    form, a, b, _, _, out = call
    dense = tuple(
        each.is_contiguous() or (each.shape, each.stride()) for each in ((a,) if out is None else (a, out))
    )
    low = (a.data_ptr() | b.data_ptr()) % MAX_ALIGNMENT
    return form, dense, low & -low, a.ndim, a.shape[-1], a.dtype, a.device, b.shape, b.stride(), b.dtype


_planners: weakref.WeakSet[Planner] = weakref.WeakSet()


def _after_fork() -> None:
    """Reset locks and plans in a child: threads that the child lacks may hold the locks, and plans hold the
    parent's CUDA context. If the parent used CUDA, the child cannot, and gets torch's own error for CUDA
    tensors."""
    for planner in _planners:
        planner.lock = threading.RLock()
        planner.states = States(planner.states.policy, planner.quick)


os.register_at_fork(after_in_child=_after_fork)
