"""`scaled_grouped_mm` on a CPU, where torch has none: what a stand-in is given, and what is torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tunegemm
from tests.support.grouped import Loops
from tests.support.serving import serving_by
from tunegemm.errors import ProblemError
from tunegemm.generate.takes import NotTaken
from tunegemm.torch import takeover

GROUPS, N, K = 3, 48, 64
BF16 = torch.bfloat16


def operands() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    a = torch.randn(9, K).to(torch.float8_e4m3fn)
    b = torch.randn(GROUPS, N, K).to(torch.float8_e4m3fn).mT
    offs = torch.tensor([4, 4, 9], dtype=torch.int32)
    return a, b, torch.rand(9) + 0.5, torch.rand(GROUPS, N) + 0.5, offs


def call(**changes: Any) -> torch.Tensor:
    a, b, scale_a, scale_b, offs = operands()
    words = {"offs": offs, "out_dtype": BF16, "use_fast_accum": True} | changes
    places = [words.pop(name, value) for name, value in zip("ab", (a, b), strict=True)]
    places += [words.pop(name, value) for name, value in (("scale_a", scale_a), ("scale_b", scale_b))]
    return tunegemm.scaled_grouped_mm(*places, **words)


def expected() -> torch.Tensor:
    a, b, scale_a, scale_b, _ = operands()
    group = torch.tensor([0] * 4 + [2] * 5)
    product = torch.einsum("rk,rkn->rn", a.float(), b.float()[group])
    return product * scale_a[:, None] * scale_b[group]


def test_a_takeover_serves_torchs_operator(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch has no kernel of it for a CPU, but may be given one, below which ours is not.
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_grouped_mm", lambda *_, **__: torch.zeros(()), "CPU")
    try:
        monkeypatch.setattr(takeover, "DEVICE_KEYS", ("CPU",))
        a, b, scale_a, scale_b, offs = operands()
        with takeover.begin():
            run: Callable[..., torch.Tensor] = torch._scaled_grouped_mm
            found = run(a, b, scale_a, scale_b, offs=offs, out_dtype=BF16, use_fast_accum=True)
            assert run(a, b, scale_a, scale_b, offs=offs, out_dtype=BF16).ndim == 0
        torch.testing.assert_close(found.float(), expected(), rtol=1e-2, atol=1e-2)
        assert len(loops.calls) == 1
    finally:
        library._destroy()


UNFIT: dict[str, dict[str, Any]] = {
    "exact sums": {"use_fast_accum": False},
    "fp32": {"out_dtype": torch.float32},
    "no dtype of the result": {"out_dtype": None},
    "a bias": {"bias": torch.zeros(N)},
    "no groups": {"offs": None},
    "bf16 scales": {"scale_a": torch.ones(9, dtype=BF16)},
    "too few scales": {"scale_a": torch.ones(8)},
    "scales of one group": {"scale_b": torch.ones(N)},
    "a is fp32": {"a": torch.randn(9, K)},
    "b by rows": {"b": torch.randn(GROUPS, K, N).to(torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_torchs_to_refuse(loops: Loops, name: str) -> None:
    with pytest.raises((NotImplementedError, RuntimeError, ValueError)):  # which it is differs by version
        call(**UNFIT[name])
    assert loops.calls == []


def test_what_is_no_tensor_is_torchs_to_refuse() -> None:
    with pytest.raises(TypeError, match="scale_a"):
        call(scale_a=None)


# Scales of blocks


def of_blocks(rows: int = 9, n: int = 136, k: int = 400) -> dict[str, Any]:
    torch.manual_seed(0)
    along, across = -(-k // 128), -(-n // 128)
    return {
        "a": torch.randn(rows, k).to(torch.float8_e4m3fn),
        "b": torch.randn(GROUPS, n, k).to(torch.float8_e4m3fn).mT,
        "scale_a": torch.rand(rows, along) + 0.5,
        "scale_b": torch.rand(GROUPS, along, across) + 0.5,
        "offs": torch.tensor([4, 4, rows], dtype=torch.int32),
    }


def in_fp64(a: Any, b: Any, scale_a: Any, scale_b: Any, offs: Any) -> torch.Tensor:
    result, start = torch.zeros(a.shape[0], b.shape[2], dtype=torch.float64), 0
    for group, end in enumerate(offs.tolist()):
        for block in range(scale_a.shape[1]):
            part = slice(block * 128, block * 128 + 128)
            across = scale_b[group, block].double().repeat_interleave(128)[: b.shape[2]]
            product = a[start:end, part].double() @ b[group, part].double()
            result[start:end] += product * scale_a[start:end, block, None].double() * across
        start = end
    return result


def test_block_scales_are_applied_on_a_cpu_to_ragged_blocks_and_groups() -> None:
    words = of_blocks()
    found = tunegemm.scaled_grouped_mm(**words)
    assert found.dtype is BF16
    torch.testing.assert_close(found.double(), in_fp64(**words), rtol=2**-8, atol=1e-3)
    assert tunegemm.scaled_grouped_mm(**words, out_dtype=torch.float32).dtype is torch.float32
    assert tunegemm.scaled_grouped_mm(**of_blocks(0) | {"offs": torch.zeros(3, dtype=torch.int32)}).shape == (
        0,
        136,
    )


def test_autocast_leaves_the_fp32_product_of_block_scales() -> None:
    words = of_blocks()
    with torch.autocast("cpu", dtype=BF16):
        result = tunegemm.scaled_grouped_mm(**words)
    assert torch.equal(result, tunegemm.scaled_grouped_mm(**words))


def test_block_scales_of_meta_tensors_give_one() -> None:
    found = tunegemm.scaled_grouped_mm(**{name: each.to("meta") for name, each in of_blocks().items()})
    assert found.is_meta and found.shape == (9, 136) and found.dtype is BF16


def test_a_kernel_of_block_scales_is_bound_once_and_its_failure_is_no_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = of_blocks()
    launched: list[tuple[int, ...]] = []
    wanted = tunegemm.scaled_grouped_mm(**words)

    class Planted:
        bindings = 0
        error: Exception | None = None

        def bound(self, *tensors: torch.Tensor, blocks: int) -> Callable[..., None]:
            self.bindings += 1
            assert [tuple(each.shape) for each in tensors] == [
                (9, 400), (3, 136, 400), (9, 4), (3, 2, 4), (3,), (9, 136)
            ]  # fmt: skip
            return self.launch

        def launch(self, *addresses: int) -> None:
            launched.append(addresses)
            if self.error is not None:
                raise self.error

    planted = Planted()
    with serving_by(monkeypatch, planted):
        results = [tunegemm.scaled_grouped_mm(**words) for _ in range(2)]
        assert planted.bindings == 1
        assert launched == [(*(each.data_ptr() for each in (*words.values(), result)),) for result in results]
        planted.error = NotTaken("an address")
        assert torch.equal(tunegemm.scaled_grouped_mm(**words), wanted)
        planted.error = RuntimeError("CUDA error: 700")
        with pytest.warns(tunegemm.TunegemmWarning, match=r"failed to launch.*700.*computed in fp32"):
            assert torch.equal(tunegemm.scaled_grouped_mm(**words), wanted)
        count = len(launched)
        assert torch.equal(tunegemm.scaled_grouped_mm(**words), wanted) and len(launched) == count


def test_e8m0_block_scales_are_fp32_ones() -> None:
    words = of_blocks()
    coarse = {name: words[name].to(torch.float8_e8m0fnu) for name in ("scale_a", "scale_b")}
    exact = {name: each.float() for name, each in coarse.items()}
    assert torch.equal(
        tunegemm.scaled_grouped_mm(**words | coarse), tunegemm.scaled_grouped_mm(**words | exact)
    )


def test_a_policy_that_block_scales_break_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the one kernel that keeps the order of sums compiles."""
    with (
        serving_by(monkeypatch, None),
        tunegemm.policy("batch_invariant"),
        pytest.warns(tunegemm.TunegemmWarning, match="does not hold"),
    ):
        tunegemm.scaled_grouped_mm(**of_blocks())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scale_a": torch.ones(4, 9)}, r"scale_a is \(4, 9\).*transpose it: scale_a.mT"),
        ({"scale_b": torch.ones(3, 2, 4)}, r"scale_b is \(3, 2, 4\).*transpose it: scale_b.mT"),
        ({"scale_b": torch.ones(3, 4, 3)}, r"scale_b is \(3, 4, 3\).*blocks of 128 have \(3, 4, 2\)"),
        ({"scale_b": torch.ones(4, 2)}, r"scale_b is \(4, 2\).*blocks of 128 have \(3, 4, 2\)"),
        ({"scale_a": torch.ones(9, 4, dtype=BF16)}, "scale_a is torch.bfloat16.*scale_a.float"),
        ({"a": torch.ones(9, 400, dtype=BF16)}, "a is torch.bfloat16"),
        ({"offs": None}, "offs is missing"),
        ({"offs": [4, 4, 9]}, r"offs is \[4, 4, 9\]; give the end of each of 3 groups as int32"),
        ({"out_dtype": "float32"}, "out_dtype 'float32' is not a torch.dtype"),
        ({"scale_a": torch.ones(9, 4, device="meta")}, "a is on cpu, b on cpu, scale_a on meta"),
        ({"offs": torch.tensor([4, 4, 9])}, "torch.int64; give the end of each of 3 groups as int32"),
        ({"bias": torch.ones(3, 136)}, "support neither bias"),
        ({"a": torch.ones(9, 128).to(torch.float8_e4m3fn)}, "a has k 128 and b 400"),
    ],
)
def test_block_scales_that_do_not_fit_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        tunegemm.scaled_grouped_mm(**of_blocks() | changes)


def test_scales_of_rows_are_shown_their_shape_and_their_device() -> None:
    words = of_blocks()
    rows = words | {"scale_a": torch.ones(9, 1), "scale_b": torch.ones(3, 136)}
    with pytest.raises(ProblemError, match=r"rows and columns have \(9,\) and \(3, 136\)"):
        tunegemm.scaled_grouped_mm(**rows)
    rows |= {"scale_a": torch.ones(9, device="meta"), "out_dtype": BF16}
    with pytest.raises(ProblemError, match="scale_a on meta, scale_b on cpu, offs on cpu; give all on one"):
        tunegemm.scaled_grouped_mm(**rows)


def test_ends_of_block_scales_are_cut_at_the_rows_or_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    words = of_blocks()
    beyond = words | {"offs": torch.tensor([4, 4, 99], dtype=torch.int32)}
    assert torch.equal(tunegemm.scaled_grouped_mm(**beyond), tunegemm.scaled_grouped_mm(**words))
    monkeypatch.setenv("TUNEGEMM_CHECK_GROUPS", "1")
    tunegemm.refresh()
    tunegemm.scaled_grouped_mm(**words)
    with pytest.raises(ProblemError, match=r"offs\[2\] is 99, after 4 and with 9 rows"):
        tunegemm.scaled_grouped_mm(**beyond)
    monkeypatch.delenv("TUNEGEMM_CHECK_GROUPS")
    tunegemm.refresh()


def test_block_scales_are_traced_in_one_graph() -> None:
    words = of_blocks()
    compiled = torch.compile(
        lambda **given: tunegemm.scaled_grouped_mm(**given), backend="eager", fullgraph=True
    )
    assert torch.equal(compiled(**words), tunegemm.scaled_grouped_mm(**words))
