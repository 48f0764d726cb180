"""Policies in dispatch: plans of one never serve another; who sets them."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, nullcontext

import pytest
import torch

import tunegemm
from tests.choose.test_neighbours import kernel
from tests.support.serving import Kernel, Row, dispatcher_of, operands, quietly
from tunegemm.choose.policies import FASTEST, Policy
from tunegemm.describe.problem import Problem
from tunegemm.dispatch import api, states
from tunegemm.dispatch.launchers import Prepared
from tunegemm.dispatch.states import MAX_CONTEXTS, MAX_POLICIES, State
from tunegemm.errors import PolicyError, TunegemmWarning
from tunegemm.store.record import Record


@pytest.fixture
def dispatcher(device):
    """Two launchers: whose kernel is called tells which candidate serves."""
    kernels = {name: Kernel() for name in ("plain", "split")}
    problem = Problem(32, 48, 64)
    split = kernel(split_k=2)
    rival = Record(
        problem, kernel(), device.fingerprint, "plain", ratio=1.1, noise=0.003, relative_error=1e-3,
        kernel_source=Row(problem, device.fingerprint).kernel_source, samples_us=(10.0,) * 3,
        baseline_us=(11.0,) * 3,
    )  # fmt: skip
    made = dispatcher_of(
        [Row(problem, device.fingerprint, split)],
        prepare=lambda record, _: Prepared(
            kernels["split" if record.candidate["split_k"] > 1 else "plain"], tma=True
        ),
        rivals=lambda problem: [rival],
    )
    return made, kernels


def test_each_policy_has_plans_of_its_own(dispatcher):
    made, kernels = dispatcher
    a, b = operands()
    counts = lambda: (len(kernels["split"].calls), len(kernels["plain"].calls))  # noqa: E731
    quietly(made.matmul, a, b)
    assert counts() == (1, 0)
    assert made.planner.use(Policy("no_workspace")) == FASTEST
    for _ in range(2):
        quietly(made.matmul, a, b)
    assert counts() == (1, 2)
    made.planner.use(FASTEST)
    plans = dict(made.planner.state.plans)
    quietly(made.matmul, a, b)
    assert counts() == (2, 2) and made.planner.state.plans == plans, "they were kept"
    made.planner.refresh()
    assert made.planner.policy == FASTEST


def test_policy_is_a_call_and_a_context(monkeypatch, dispatcher):
    made, _ = dispatcher
    monkeypatch.setattr(api, "dispatcher", made)
    with tunegemm.policy("deterministic", max_sms=120):
        assert made.planner.policy == Policy("deterministic", 120)
        with pytest.raises(ZeroDivisionError), tunegemm.policy("no_workspace"):
            raise ZeroDivisionError
        assert made.planner.policy == Policy("deterministic", 120)
    assert made.planner.policy == FASTEST
    tunegemm.policy("min_energy")
    assert made.planner.policy == Policy("min_energy")
    with pytest.raises(PolicyError, match="use one of fastest, deterministic"):
        tunegemm.policy("quickest")


def test_a_block_that_is_dropped_while_it_is_entered_sets_no_policy_of_the_process(monkeypatch, dispatcher):
    made, _ = dispatcher
    monkeypatch.setattr(api, "dispatcher", made)
    context = contextvars.copy_context()
    context.run(lambda: tunegemm.policy("deterministic").__enter__())
    assert made.planner.policy == FASTEST
    context.run(lambda: states.end(*states.own()))  # as long as a block holds, calls elsewhere take longer


def in_thread(function) -> list:
    """What a function returns in a new thread."""
    found: list = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found


@pytest.fixture
def policy_now(monkeypatch, dispatcher):
    """The policy by which a product would be served, here and now."""
    monkeypatch.setattr(api, "dispatcher", dispatcher[0])
    return lambda: dispatcher[0].planner.state.policy.prefer


def test_blocks_of_threads_that_overlap_neither_lose_nor_keep_a_policy(policy_now, dispatcher):
    made, kernels = dispatcher
    inside, outside, seen = threading.Barrier(2), threading.Barrier(2), []
    a, b = operands()

    def first() -> None:
        with tunegemm.policy("no_workspace"):
            inside.wait()
            for _ in range(2):
                made.matmul(a, b)
            seen.append(("first", policy_now()))
        outside.wait()
        seen.append(("first, after it", policy_now()))

    def second() -> None:
        with tunegemm.policy("deterministic"):
            inside.wait()
            outside.wait()
            seen.append(("second", policy_now()))

    threads = [threading.Thread(target=one) for one in (first, second)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(seen) == [
        ("first", "no_workspace"), ("first, after it", "fastest"), ("second", "deterministic")
    ]  # fmt: skip
    assert policy_now() == "fastest" and len(kernels["plain"].calls) == 2 and not kernels["split"].calls


def test_a_block_is_its_contexts_and_a_call_the_processs(policy_now):
    with tunegemm.policy("deterministic"):
        assert (policy_now(), in_thread(policy_now)) == ("deterministic", ["fastest"])
        tunegemm.policy("min_energy")
        assert (policy_now(), in_thread(policy_now)) == ("min_energy", ["min_energy"]), "until the block ends"
    assert policy_now() == "min_energy"
    in_thread(lambda: tunegemm.policy("no_workspace"))
    assert policy_now() == "no_workspace", "this context has none of its own"


def test_tasks_that_take_turns_keep_their_own(policy_now):
    async def task(prefer: str) -> list[str]:
        seen = []
        with tunegemm.policy(prefer):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(policy_now())
        return [*seen, policy_now()]

    async def both() -> list[list[str]]:
        return await asyncio.gather(task("deterministic"), task("no_workspace"))

    assert asyncio.run(both()) == [[prefer] * 3 + ["fastest"] for prefer in ("deterministic", "no_workspace")]


def holding(*prefers: str) -> list[Iterator[None]]:
    """Generators that are each within a block, begun in this order."""

    def hold(prefer: str) -> Iterator[None]:
        with tunegemm.policy(prefer):
            yield

    held = [hold(prefer) for prefer in prefers]
    for each in held:
        next(each)
    return held


def test_blocks_end_in_any_order(policy_now):
    """What holds is the last of those that have not ended."""
    prefers = "deterministic", "no_workspace", "min_energy"
    for order in itertools.permutations(range(3)):
        held, ended = holding(*prefers), set()
        for place in order:
            assert policy_now() == [each for i, each in enumerate(prefers) if i not in ended][-1]
            held[place].close()
            ended.add(place)
        assert policy_now() == "fastest"
    first, second = ExitStack(), ExitStack()
    with tunegemm.policy("min_energy"):
        for stack in (first, second):
            stack.enter_context(tunegemm.policy("deterministic"))
        first.close()
        assert policy_now() == "deterministic"
        second.close()
        assert policy_now() == "min_energy"
    assert (policy_now(), in_thread(policy_now)) == ("fastest", ["fastest"])


def test_a_call_within_a_block_holds_until_it_ends(policy_now):
    outer, inner = holding("deterministic", "no_workspace")
    for prefer in ("batch_invariant", "min_energy"):
        tunegemm.policy(prefer)
        assert policy_now() == prefer
    outer.close()
    assert policy_now() == "min_energy"
    inner.close()
    assert policy_now() == "min_energy", "the process's"
    (outer,) = holding("deterministic")
    inherited = contextvars.copy_context()

    def call() -> None:
        tunegemm.policy("fastest")

    inherited.run(call)
    assert (policy_now(), inherited.run(policy_now)) == ("deterministic", "fastest")
    in_thread(outer.close)
    assert (policy_now(), inherited.run(policy_now)) == ("fastest", "fastest")
    tunegemm.policy("no_workspace")
    assert (policy_now(), inherited.run(policy_now)) == ("no_workspace", "no_workspace"), "no block is left"


def test_a_block_that_another_context_ends_is_over_in_its_own(policy_now):
    """As a generator's that a thread, a task or the garbage collector closes."""
    with tunegemm.policy("min_energy"):
        in_thread(holding("deterministic")[0].close)
        assert policy_now() == "min_energy"

    async def numbers() -> AsyncIterator[int]:
        with tunegemm.policy("no_workspace"):
            yield 1
            yield 2

    async def left_early() -> list[str]:
        async for _ in numbers():
            break
        kept = asyncio.create_task(asyncio.sleep(0, policy_now()))
        for _ in range(9):  # turns in which the loop closes the generator, in a task
            await asyncio.sleep(0)
        return [await kept, policy_now()]

    assert asyncio.run(left_early()) == ["no_workspace", "fastest"]
    made = tunegemm.policy("deterministic")
    assert policy_now() == "deterministic"

    def enters() -> str:
        with made:
            return policy_now()

    assert (in_thread(enters), policy_now()) == (["deterministic"], "fastest")


def test_a_task_keeps_the_policy_of_the_block_that_began_it(policy_now, dispatcher):
    async def later(gate: asyncio.Event) -> str:
        await gate.wait()
        return policy_now()

    async def begun_in_a_block() -> list[str]:
        gate = asyncio.Event()
        with tunegemm.policy("deterministic"):
            task = asyncio.create_task(later(gate))
            await asyncio.sleep(0)
        gate.set()
        return [policy_now(), await task]

    for _ in range(MAX_CONTEXTS + 1):
        assert asyncio.run(begun_in_a_block()) == ["fastest", "deterministic"]
    assert len(dispatcher[0].planner.states) <= MAX_CONTEXTS


class Deep(torch.autograd.Function):
    """Its backward pass calls another one, 70 deep: from 61 on, autograd computes in threads of its own."""

    @staticmethod
    def forward(ctx, x, depth, see):
        ctx.depth, ctx.see = depth, see
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.see()
        if ctx.depth < 70:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), ctx.depth + 1, ctx.see).sum().backward()
        return grad, None, None


@pytest.fixture
def policies_of_backward(policy_now):
    """Calls a backward pass; returns the policies in autograd's threads, of the first one outside a pass."""

    def seen() -> list[str]:
        caller, policies = threading.get_ident(), []

        def see() -> None:
            if threading.get_ident() != caller:
                policies.append(policy_now())

        Deep.apply(torch.ones(1, requires_grad=True), 0, see).sum().backward()
        return policies

    return seen


def test_threads_of_autograd_have_the_policy_of_who_calls_backward(policy_now, policies_of_backward):
    """Autograd computes in threads of its own on a GPU; on a CPU where backward passes nest this deep."""
    with tunegemm.policy("batch_invariant"):
        assert policies_of_backward() == ["batch_invariant"] * 10
    assert policy_now() == "fastest"


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="its threads do not know the context of the caller")
def test_threads_of_autograd_have_the_policy_of_the_task_that_calls_backward(policies_of_backward):
    """Not that of the block that began or ended last in the thread of the tasks."""

    async def in_turns(prefer: str) -> list[str]:
        seen = []
        with tunegemm.policy(prefer) if prefer else nullcontext():
            for _ in range(2):
                await asyncio.sleep(0)
                seen.append(policies_of_backward()[0])
        await asyncio.sleep(0)
        return [*seen, policies_of_backward()[0]]

    async def all_of_them() -> list[list[str]]:
        return await asyncio.gather(in_turns("deterministic"), in_turns("no_workspace"), in_turns(""))

    prefers = "deterministic", "no_workspace", "fastest"
    assert asyncio.run(all_of_them()) == [[prefer, prefer, "fastest"] for prefer in prefers]


def test_more_policies_than_are_kept_serve(policy_now, dispatcher):
    made, _ = dispatcher
    a, b = operands()
    for max_sms in (*range(100, 110), 100):
        with tunegemm.policy("deterministic", max_sms=max_sms):
            assert torch.equal(quietly(made.matmul, a, b), a @ b)
            assert made.planner.policy.max_sms == max_sms
    assert len(made.planner.states) <= 6 and policy_now() == "fastest"
    kept = [str(state.policy) for state in made.planner.states.all()]
    last = [f"deterministic on {max_sms} multiprocessors" for max_sms in (107, 108, 109, 100)]
    assert sorted(kept) == sorted(["fastest", *last]) and len(kept) == MAX_POLICIES + 1


def test_the_older_half_makes_room() -> None:
    state = State()
    for size, left in ((3, [0, 1, 2]), (4, [3]), (5, [3, 4])):
        state.plans = {(number,): None for number in range(size)}
        state.misses = {(number,): [] for number in range(2)}
        state.recent = {"call": None}  # type: ignore[dict-item]
        state.make_room(4)
        assert [number for (number,) in state.plans] == left and len(state.misses) == 2
        assert bool(state.recent) == (size < 4)


def test_the_environment_sets_the_first_policy(monkeypatch, dispatcher):
    made, kernels = dispatcher
    monkeypatch.setenv("TUNEGEMM_POLICY", "no_workspace")
    assert made.planner.policy == Policy("no_workspace")  # before any product, too: `explain` asks
    quietly(made.matmul, *operands())
    assert made.planner.policy == Policy("no_workspace") and len(kernels["plain"].calls) == 1


def test_an_unknown_policy_in_the_environment_is_a_warning(monkeypatch, dispatcher):
    made, _ = dispatcher
    monkeypatch.setenv("TUNEGEMM_POLICY", "quickest")
    with pytest.warns(TunegemmWarning, match="TUNEGEMM_POLICY: policy 'quickest' is not known"):
        made.matmul(*operands())
    assert made.planner.policy == FASTEST


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch cannot remove it")
def test_a_thread_that_had_a_block_keeps_nothing_of_it() -> None:
    """Torch gives back what a dead thread kept under the interpreter's lock: while a program ends, that
    ends the process by SIGABRT."""
    kept = []

    def serve() -> None:
        for prefer in ("deterministic", "no_workspace"):
            with tunegemm.policy(prefer):
                kept.append(torch._C._is_key_in_tls("tunegemm_policy"))
        kept.append(torch._C._is_key_in_tls("tunegemm_policy"))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert kept == [True, True, False]
