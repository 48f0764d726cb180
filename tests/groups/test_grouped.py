"""`grouped_mm` on a CPU: what kernels are given by a stand-in that computes in loops, and what is torch's.

`test_chosen_groups` has which kernel is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import grouped_mm as torchs
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import tunegemm
from tests.support.grouped import BF16, GROUPS, SIZES, K, Loops, N, groups_of, operands
from tests.support.serving import with_other_device_current
from tunegemm.dispatch import api, extension
from tunegemm.errors import ArtifactError, ProblemError, TunegemmWarning
from tunegemm.generate.grouped import GroupedKernel
from tunegemm.generate.takes import NotTaken
from tunegemm.groups import grouped
from tunegemm.torch import takeover


def unfit() -> dict[str, tuple[Any, ...]]:
    a, b, offs = operands()
    narrow = torch.randn(GROUPS, 12, K, dtype=BF16).mT
    batch = torch.randn(GROUPS, 3, K, dtype=BF16)
    same = torch.randn(1, N, K, dtype=BF16).expand(GROUPS, N, K).mT
    return {
        "n no multiple of 8": (a, narrow, offs),
        "a by columns": (torch.randn(K, 16, dtype=BF16).t(), b, offs),
        "a batch": (batch, b, None),
        "groups along k": (torch.randn(16, 13, dtype=BF16).t().contiguous().t(), None, offs),
        "one weight for all": (a, same, offs),
        "fp32": (a.float(), b.float(), offs),
        "no rows": (a[:0], b, torch.zeros(GROUPS, dtype=torch.int32)),
    }


def shifted(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same values, so many elements behind an aligned address."""
    return torch.empty(tensor.numel() + by).to(tensor.dtype)[by:].view(tensor.shape).copy_(tensor)


def test_a_kernel_serves_what_fits(loops: Loops) -> None:
    a, b, offs = operands()
    assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), torchs(a, b, offs=offs))
    assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs, out_dtype=BF16), torchs(a, b, offs=offs))
    other = torch.tensor([0, 0, 1, 13], dtype=torch.int32)
    assert torch.equal(tunegemm.grouped_mm(a, b, offs=other), torchs(a, b, offs=other))
    assert loops.calls == [(13, GROUPS, N, K)] * 3 and loops.loads == 1


def test_a_launch_has_the_operands_device_as_the_current_one(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, launched = with_other_device_current(monkeypatch), []
    loops.of = lambda *_, **__: lambda *tensors: launched.append(current[-1])  # type: ignore[method-assign]
    a, b, offs = operands()
    tunegemm.grouped_mm(a, b, offs=offs)
    assert launched == [0] and current == [1]


def test_ends_with_gaps_are_copied_for_the_kernel(loops: Loops) -> None:
    a, b, offs = operands()
    apart = torch.stack((offs, offs), 1)[:, 0]
    for _ in range(2):
        assert torch.equal(tunegemm.grouped_mm(a, b, offs=apart), torchs(a, b, offs=offs))
    assert len(loops.calls) == 2 and loops.loads == 1


def test_what_a_launch_does_not_take_is_torchs_each_time(loops: Loops) -> None:
    """Of which no warning says anything, as of other operands that do not fit."""
    a, b, offs = operands()

    def refuse(*_: Any) -> None:
        loops.calls.append(())
        raise NotTaken("an address")

    loops.of = lambda *_, **__: refuse  # type: ignore[method-assign]
    for count in (1, 2):
        assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), torchs(a, b, offs=offs))
        assert len(loops.calls) == count


def test_a_kernel_that_is_compiled_serves_when_it_is_there(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, offs = operands()
    now = 100.0
    monkeypatch.setattr(extension.time, "monotonic", lambda: now)
    loops.found = False
    for _ in range(3):
        assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), torchs(a, b, offs=offs))
    assert loops.loads == 1 and not loops.calls
    loops.found = True
    now += extension.LOOK_SECONDS + 1
    tunegemm.grouped_mm(a, b, offs=offs)
    assert loops.loads == 2 and len(loops.calls) == 1


def test_a_kernel_that_cannot_run_is_told_once_and_torch_computes(loops: Loops) -> None:
    a, b, offs = operands()
    loops.error = ArtifactError("its object was changed")
    with pytest.warns(
        TunegemmWarning, match="its object was changed; tunegemm.grouped_mm falls back to torch"
    ):
        result = tunegemm.grouped_mm(a, b, offs=offs)
    assert torch.equal(result, torchs(a, b, offs=offs))
    tunegemm.grouped_mm(a, b, offs=offs)  # warnings are errors here


def test_a_launch_that_fails_is_torchs_from_then_on(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: no kernel image")

    monkeypatch.setattr(loops, "load", lambda choice, index: fail)
    monkeypatch.setattr(grouped, "groups", groups_of(loops.load))
    a, b, offs = operands()
    with pytest.warns(TunegemmWarning, match="failed to launch"):
        result = tunegemm.grouped_mm(a, b, offs=offs)
    assert torch.equal(result, torchs(a, b, offs=offs))
    tunegemm.grouped_mm(a, b, offs=offs)


def test_gradients_are_torchs(loops: Loops) -> None:
    a, b, offs = operands()
    bias = torch.randn(GROUPS, N, dtype=BF16)
    found = []
    for ours in (True, False):
        x, w, v = (t.detach().clone().requires_grad_() for t in (a, b.mT, bias))
        if ours:
            result = tunegemm.grouped_mm(x, w.mT, offs=offs, bias=v)
        else:
            rows = torch.tensor([g for g, size in enumerate(SIZES) for _ in range(size)])
            result = torchs(x, w.mT, offs=offs) + v[rows]
        (result.float() ** 2).sum().backward()
        assert x.grad is not None and w.grad is not None and v.grad is not None
        assert w.grad.stride() == w.stride()
        found.append((x.grad, w.grad, v.grad))
    tunegemm.grouped_mm(
        a.requires_grad_(), b, offs=offs
    ).sum().backward()  # of one value, which torch refuses
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    assert len(loops.calls) == 4  # each and its gradient of a


def test_what_no_gradient_of_groups_needs_may_change(loops: Loops) -> None:
    """As in `x += grouped_mm(x, weights)` with frozen weights."""
    a, b, offs = operands()
    for x, w in ((a.clone().requires_grad_(), b), (a, b.clone().requires_grad_())):
        found = []
        for multiply in (torchs, tunegemm.grouped_mm):
            rows, weights = x * 1, w * 1
            result = multiply(rows, weights, offs=offs)
            (rows if x.requires_grad else weights).mul_(2)
            found += torch.autograd.grad(result, x if x.requires_grad else w, torch.ones_like(result))
        assert torch.equal(*found)
    assert len(loops.calls) == 3


def test_what_a_takeover_does_not_serve_is_torchs_to_compute_or_refuse(
    loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "DEVICE_KEYS", ("CPU",))
    a, b, offs = operands()
    calls: list[Callable[[], Any]] = [
        lambda: torchs(a.float(), b.float(), offs=offs),
        lambda: torchs(torch.ones(3, 8, 64).bfloat16(), torch.ones(3, 64, 16).bfloat16()),
        lambda: torchs(a, b, offs=offs.long()),
        lambda: torchs(a, b, offs=offs[:3]),
        lambda: torchs(a[:, :32], b, offs=offs),
        lambda: torchs(a, b),
        lambda: torch._grouped_mm(a, b, offs=offs, bias=torch.ones(N, dtype=BF16)),
        lambda: torchs(a, b, offs=offs, out_dtype=torch.float32),
    ]
    for call in calls:
        try:
            expected: Any = call()
        except (RuntimeError, ValueError) as error:
            expected = error
        with takeover.begin():
            if isinstance(expected, Exception):
                with pytest.raises(type(expected)) as raised:
                    call()
                assert str(raised.value) == str(expected)
            else:
                assert torch.equal(call(), expected)
    assert loops.calls == []


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "int64": (lambda a, b, offs: tunegemm.grouped_mm(a, b, offs=offs.long()), r"are torch.int64; give int32"),
    "ends": (lambda a, b, offs: tunegemm.grouped_mm(a, b, offs=offs[:3]), r"shape \(3,\), b has 4 groups"),
    "k": (lambda a, b, offs: tunegemm.grouped_mm(a[:, :32], b, offs=offs), r"a has k 32 and b 64"),
    "none": (
        lambda a, b, offs: tunegemm.grouped_mm(a, b[:0], offs=offs[:0]), r"\(0, 64, 48\), without groups",
    ),
    "bias": (
        lambda a, b, offs: tunegemm.grouped_mm(a, b, offs=offs, bias=torch.ones(N, GROUPS, dtype=BF16)),
        r"bias has shape \(48, 4\); give \(48,\) or \(4, 48\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_torch_refuses_is_named(loops: Loops, name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises(ProblemError, match=words):
        call(*operands())


#: Ends of 4 groups of 10 rows, and what a look at them says.
WRONG_ENDS = {
    "descend": ([8, 3, 8, 10], r"offs\[1\] is 3, after 8 and with 10 rows; give ascending ends"),
    "exceed": ([3, 8, 8, 14], r"offs\[3\] is 14, after 8 and with 10 rows"),
    "negative": ([-1, 3, 8, 10], r"offs\[0\] is -1, after 0"),
}


@pytest.mark.parametrize("name", WRONG_ENDS)
def test_ends_are_looked_at_where_that_is_asked_for(
    loops: Loops, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, words = WRONG_ENDS[name]
    a, b = torch.randn(10, 64).bfloat16(), torch.randn(4, 48, 64).bfloat16().mT
    tunegemm.grouped_mm(a, b, offs=torch.tensor(ends, dtype=torch.int32))  # nobody looks
    monkeypatch.setenv("TUNEGEMM_CHECK_GROUPS", "1")
    tunegemm.refresh()
    for rows in (a, a.clone().requires_grad_(), a.float()):
        with pytest.raises(ProblemError, match=words):
            tunegemm.grouped_mm(rows, b.to(rows.dtype), offs=torch.tensor(ends, dtype=torch.int32))
    few = torch.tensor([1, 1, 3, 3], dtype=torch.int32)
    assert tunegemm.grouped_mm(a, b, offs=few).shape == (10, 48)
    tunegemm.grouped_mm(a.to("meta"), b.to("meta"), offs=few.to("meta"))
    monkeypatch.delenv("TUNEGEMM_CHECK_GROUPS")
    tunegemm.refresh()
    tunegemm.grouped_mm(a, b, offs=torch.tensor(ends, dtype=torch.int32))


WRONG_LINES: dict[str, tuple[Callable[[Any, Any], tuple[Any, Any]], str]] = {
    "lines of a": (lambda a, b: (torch.randn(10, 65).bfloat16()[:, :64], b), r"a has strides \(65, 1\)"),
    "lines of b": (
        lambda a, b: (a, torch.randn(4, 48, 65).bfloat16()[..., :64].mT), r"b has strides \(3120, 1, 65\)",
    ),
    "no line of b": (
        lambda a, b: (a, torch.randn(4, 48, 128).bfloat16()[..., ::2].mT),
        r"b has strides \(6144, 2, 128\); give one with k or n contiguous",
    ),
    "one line for all": (
        lambda a, b: (a, b[..., :1].expand(b.shape)), r"b has strides \(3072, 1, 0\); give .* their own",
    ),
    "dtypes": (lambda a, b: (a, b.half()), r"a is torch.bfloat16, b torch.float16; give both the same dtype"),
    "one row": (lambda a, b: (a[0], b), r"a has shape \(64,\); give \(rows, k\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_LINES)
def test_operands_that_torch_refuses_are_named(name: str) -> None:
    change, words = WRONG_LINES[name]
    a, b = change(torch.randn(10, 64).bfloat16(), torch.randn(4, 48, 64).bfloat16().mT)
    with pytest.raises(ProblemError, match=words):
        tunegemm.grouped_mm(a, b, offs=torch.tensor([3, 8, 8, 10], dtype=torch.int32))


def test_a_launch_takes_what_a_call_gives_it() -> None:
    """By position, as `Groups` calls it: a, weights, result, ends, bias, scales."""
    signature = inspect.signature(GroupedKernel.of)
    bound = signature.bind(None, *range(6), interleaved=True, blocks=1, swizzle_size=1, l2_hint=0)
    assert list(bound.arguments)[1:7] == ["a", "weights", "out", "offsets", "bias", "scales"]


def test_ends_are_checked_at_their_borders() -> None:
    def check(*ends: int) -> None:
        grouped.check_ends(torch.tensor(ends, dtype=torch.int32), 8)

    for ends in ((), (0,), (8,), (0, 0, 8), (3, 3, 8, 8)):
        check(*ends)
    for ends, says in (
        ((9,), r"offs\[0\] is 9, after 0"), ((-1, 8), r"offs\[0\] is -1"),
        ((4, 3), r"offs\[1\] is 3, after 4"), ((8, 9), r"offs\[1\] is 9, after 8 and with 8 rows"),
    ):  # fmt: skip
        with pytest.raises(ProblemError, match=says):
            check(*ends)
    grouped.check_ends(torch.empty(2, dtype=torch.int32, device="meta"), 8)


def test_which_operands_a_kernel_of_groups_reads() -> None:
    a, b, offs = torch.empty(8, 32, dtype=BF16), torch.empty(3, 16, 32, dtype=BF16).mT, torch.zeros(3).int()

    def fits(a: Any = a, b: Any = b, bias: Any = None, **words: Any) -> bool:
        return grouped.fits(a, b, offs, bias, **words)

    assert fits() and fits(a.half(), b.half()) and fits(b=b.contiguous())
    assert fits(bias=torch.empty(16, dtype=BF16)) and fits(bias=torch.empty(3, 16, dtype=BF16))
    apart = torch.empty(8 * 32 + 4, dtype=BF16)[4:].view(8, 32)
    behind = torch.empty(3 * 16 * 32 + 4, dtype=BF16)[4:].view(3, 16, 32).mT
    for changes in (
        {"a": apart}, {"b": behind}, {"a": a.float(), "b": b.float()}, {"b": b[None]}, {"a": a[:, ::2]},
        {"bias": torch.empty(15, dtype=BF16)}, {"bias": torch.empty(2, 16, dtype=BF16)},
    ):  # fmt: skip
        assert not fits(**changes), changes
    along = torch.empty(8, 16, dtype=BF16)
    assert fits(a.t(), along) and not fits(a.t(), along, bias=torch.empty(16, dtype=BF16))
    assert not fits(a.t()[None], along)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    scales, of_columns = torch.empty(8), torch.empty(3, 16)
    assert fits(a8, b8, of_columns, scales=scales)
    assert not fits(a8, b8[..., :8], of_columns[:, :8].contiguous(), scales=scales)


def test_what_is_wrong_with_groups_that_torch_refused() -> None:
    a, b, offs = torch.empty(8, 32, dtype=BF16), torch.empty(3, 16, 32, dtype=BF16).mT, torch.zeros(3).int()

    def wrong(a: Any = a, b: Any = b, offs: Any = offs) -> str:
        return grouped.wrong_groups(a, b, offs).partition(";")[0]

    assert wrong() == wrong(a[None]) == wrong(b=b[0]) == wrong(offs=None) == wrong(b=b.contiguous()) == ""
    assert wrong(a[0]) == "a has shape (32,)"
    assert wrong(offs=offs.long()) == "offs are torch.int64"
    assert wrong(offs=offs[:2]) == "offs have shape (2,), b has 3 groups"
    for changes in ({"offs": offs.to("meta")}, {"b": b.to("meta")}):
        assert wrong(**changes).startswith("a is on cpu, b on ")
    assert wrong(a[:, :16]) == "a has k 16 and b 32"
    assert wrong(a.half()) == "a is torch.float16, b torch.bfloat16"
    apart = torch.empty(8 * 32 + 4, dtype=BF16)[4:].view(8, 32)
    assert wrong(apart).startswith("a begins at 0x")
    assert wrong(torch.empty(8, 64, dtype=BF16)[:, ::2]) == "a has strides (64, 2)"
    assert wrong(torch.empty(8, 36, dtype=BF16)[:, :32]) == "a has strides (36, 1), of 2 bytes"
    odd = torch.empty(3, 16, 36, dtype=BF16)[..., :32].mT
    assert wrong(b=odd) == "b has strides (576, 1, 36), of 2 bytes"


def test_what_is_wrong_with_a_bias() -> None:
    a, b = torch.empty(8, 32), torch.empty(3, 32, 16)
    assert grouped.wrong_bias(a, b, torch.empty(16)) == grouped.wrong_bias(a, b, torch.empty(3, 16)) == ""
    for given in ((a, b, 1.0), (a[None], b, torch.empty(16)), (a, b[0], torch.empty(16))):
        assert grouped.wrong_bias(*given).startswith("bias is for a (rows, k)")
    for shape in ((15,), (2, 16), (1, 16), (3, 1)):
        assert (
            grouped.wrong_bias(a, b, torch.empty(shape)) == f"bias has shape {shape}; give (16,) or (3, 16)"
        )
    assert "bias is on meta, a on cpu" in grouped.wrong_bias(a, b, torch.empty(16, device="meta"))


def test_a_bias_is_for_all_groups_or_of_each(loops: Loops) -> None:
    a, b, offs = operands()
    each = torch.randn(GROUPS, N, dtype=BF16)
    ends = [0, *offs.tolist()]
    for bias in (each, each[0]):
        expected = torch.cat(
            [
                a[first:end].float() @ b[g].float() + (bias[g] if bias.ndim == 2 else bias).float()
                for g, (first, end) in enumerate(pairwise(ends))
            ]
        )
        for ours in (a, a.float().to(BF16).requires_grad_()):  # by a kernel, and by torch's operations
            result = tunegemm.grouped_mm(ours, b, offs=offs, bias=bias)
            assert torch.allclose(result.float(), expected, rtol=2e-2, atol=6e-2)
    assert len(loops.calls) == 4  # that with gradients adds the bias itself


@pytest.mark.parametrize("name", unfit())
def test_what_does_not_fit_is_torchs(loops: Loops, name: str) -> None:
    a, b, offs = unfit()[name]
    if b is None:  # grouped along k, as gradients of weights are
        a, b = torch.randn(13, 16, dtype=BF16).t(), torch.randn(13, 24, dtype=BF16)
    try:
        expected = torchs(a, b, offs=offs)
    except (RuntimeError, ValueError) as error:
        with pytest.raises(type(error)):
            tunegemm.grouped_mm(a, b, offs=offs)
    else:
        result = tunegemm.grouped_mm(a, b, offs=offs)
        assert torch.equal(result[:13], expected[:13]) and result.stride() == expected.stride()
    assert loops.calls == []


@pytest.mark.parametrize("by", [1, 4, 8])
@pytest.mark.parametrize("which", ["a", "weights"])
def test_operands_at_addresses_that_kernels_do_not_take_are_torchs(
    loops: Loops, monkeypatch: pytest.MonkeyPatch, which: str, by: int
) -> None:
    monkeypatch.setattr(takeover, "DEVICE_KEYS", ("CPU",))
    a, b, offs = operands()
    expected = torchs(a, b, offs=offs)
    tunegemm.grouped_mm(a, b, offs=offs)  # a plan of operands that are laid out alike
    if which == "a":
        a = shifted(a, by)
    else:
        b = shifted(b.mT, by).mT
    loops.calls.clear()
    assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), expected)
    with takeover.begin():
        assert torch.equal(torchs(a, b, offs=offs), expected)
    gated = grouped.groups(a, b, offs, None, "swiglu")
    assert (gated is not None) == (by == 8)
    assert len(loops.calls) == (3 if by == 8 else 0)


@pytest.mark.parametrize("major", ["k", "n"])
def test_a_weights_gradient_lies_as_torchs_does(loops: Loops, major: str) -> None:
    a, b, offs = operands()
    weights = (b if major == "k" else b.contiguous()).requires_grad_()
    ours, torchs_own = (
        torch.autograd.grad(call(a, weights, offs=offs).float().pow(2).sum(), weights)[0]
        for call in (tunegemm.grouped_mm, torchs)
    )
    assert torch.equal(ours, torchs_own) and ours.stride() == torchs_own.stride() == weights.stride()
    assert loops.calls


def test_surroundings_in_which_torch_computes(loops: Loops) -> None:
    a, b, offs = operands()
    call = lambda: tunegemm.grouped_mm(a, b, offs=offs)  # noqa: E731
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)
    with FlopCounterMode(display=False):  # a dispatch mode
        call()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = tunegemm.grouped_mm(*map(mode.from_tensor, (a, b)), offs=mode.from_tensor(offs))
        assert fake.shape == (13, N)

    class Doubles(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            return result * 2 if "grouped_mm" in function.__name__ else result

    with Doubles():
        doubled = call()
    assert torch.equal(doubled, 2 * torchs(a, b, offs=offs))
    mapped = torch.vmap(lambda x: tunegemm.grouped_mm(x, b, offs=offs))(torch.stack((a, a)))
    assert torch.equal(mapped[1], torchs(a, b, offs=offs))
    assert loops.calls == []
    with torch.device("cpu"):  # a mode of functions that make tensors
        call()
    assert len(loops.calls) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("backend", "served"), [("aot_eager", True), ("inductor", False)])
def test_compiled_products_of_other_dtypes_are_the_operator_too(
    loops: Loops, monkeypatch: pytest.MonkeyPatch, backend: str, served: bool, dtype: torch.dtype
) -> None:
    """Torch (2.13) multiplies fp16 and fp32, but traces bf16 alone. Also on a device without kernels."""
    if not served:
        monkeypatch.setattr(grouped.extension, "device_type", lambda: "cuda")
    given, offs = [each.to(dtype) for each in operands()[:2]], operands()[2]
    biases = torch.randn(N).to(dtype), torch.randn(GROUPS, N).to(dtype)
    for words in ({"bias": biases[1]}, {"out_dtype": dtype}, {"bias": biases[0]})[: 1 + 2 * served]:
        call = partial(tunegemm.grouped_mm, **words)
        torch._dynamo.reset()
        compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=served)
        with torch.no_grad():
            assert torch.equal(compiled(*given, offs=offs), call(*given, offs=offs))
        gradients = []
        for each in (compiled, call):
            a, b = (each.clone().requires_grad_() for each in given)
            each(a, b, offs=offs).float().pow(2).sum().backward()
            gradients.append((a.grad, b.grad))
        for ours, torchs_own in zip(*gradients, strict=True):
            assert ours is not None and torchs_own is not None and ours.stride() == torchs_own.stride()
            torch.testing.assert_close(ours, torchs_own, rtol=2e-3, atol=2e-1)
    with pytest.raises(Exception, match=r"contraction dimension|to have same"):
        torch.compile(tunegemm.grouped_mm, backend="eager")(given[0][:, :8], given[1], offs=offs)


class Tripled(torch.Tensor):
    """Gives torch's product a meaning of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 3 if func is torch._grouped_mm else result


def test_compiled_products_of_subclasses_are_torchs(loops: Loops, one_rank: None) -> None:
    """A subclass's meaning got lost, and distributed tensors failed."""
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    a, b, offs = operands()
    expected, mesh = torchs(a, b, offs=offs), init_device_mesh("cpu", (1,))
    spread = [distribute_tensor(each, mesh, [Replicate()]) for each in (a, b, offs)]
    run = torch.compile(tunegemm.grouped_mm, backend="eager", fullgraph=True)
    result = run(spread[0].requires_grad_(), spread[1], offs=spread[2])
    result.square().sum().backward()
    assert torch.equal(result.full_tensor(), expected) and not loops.calls
    assert torch.equal(run(a.as_subclass(Tripled), b, offs=offs), 3 * expected) and not loops.calls


def test_off_means_off(loops: Loops, monkeypatch: pytest.MonkeyPatch, serve) -> None:
    monkeypatch.setenv("TUNEGEMM_MODE", "off")
    api.serve_by(serve())
    a, b, offs = operands()
    assert torch.equal(tunegemm.grouped_mm(a, b, offs=offs), torchs(a, b, offs=offs)) and not loops.calls


def test_no_tensor_is_torchs_error(loops: Loops) -> None:
    a, b, offs = operands()
    with pytest.raises(TypeError):
        tunegemm.grouped_mm(3, b, offs=offs)  # type: ignore[arg-type]
    given: Any
    for given in ((a, None), ([1.0], b), (torch.Size([2]), b)):
        for bias in (None, torch.ones(b.shape[2])):
            with pytest.raises(TypeError, match="must be Tensor, not"):
                tunegemm.grouped_mm(*given, offs=offs, bias=bias)


def test_operands_on_several_devices_are_named(loops: Loops) -> None:
    """Torch (2.13) reads memory that is not there."""
    a, b, offs = operands()
    for given, words in (((a, b.to("meta")), "b on meta"), ((a.to("meta"), b), "a is on meta, b on cpu")):
        with pytest.raises(ProblemError, match=words):
            tunegemm.grouped_mm(*given, offs=offs)
    with pytest.raises(ProblemError, match="offs on meta; give all on one device"):
        tunegemm.grouped_mm(a, b, offs=offs.to("meta"))
