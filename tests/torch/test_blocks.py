"""`scaled_mm` with scales of blocks where no GPU is: what it computes and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

import tunegemm
from tests.support.serving import Bound, serving_by
from tunegemm.errors import ProblemError
from tunegemm.torch import blocks as own
from tunegemm.torch import takeover

FP8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def operands(rows: int, n: int, k: int) -> tuple[torch.Tensor, ...]:
    """a, b, and scales in the layouts of torch."""
    torch.manual_seed(0)
    along, across = -(-k // 128), -(-n // 128)
    a, weight = (torch.randn(*shape).to(FP8) for shape in ((rows, k), (n, k)))
    return a, weight.t(), torch.rand(along, rows).t(), torch.rand(across, along).t()


def wanted(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """In fp64, element by element of the scales."""
    (rows, k), n = a.shape, b.shape[1]
    block = torch.arange(k) // 128
    left = a.double() * scale_a.double()[:, block]
    right = b.double() * scale_b.double()[block][:, torch.arange(n) // 128]
    assert left.shape == (rows, k)
    return left @ right


@pytest.mark.parametrize("shape", [(1, 128, 128), (5, 200, 400), (130, 136, 144)])
@pytest.mark.parametrize("out_dtype", [BF16, F32])
def test_a_cpu_sums_in_fp32(shape: tuple[int, int, int], out_dtype: torch.dtype) -> None:
    a, b, scale_a, scale_b = operands(*shape)
    bias = torch.randn(shape[1]).to(BF16)
    expected = wanted(a, b, scale_a, scale_b)
    for given, added in ((None, 0.0), (bias, bias.double())):
        result = tunegemm.scaled_mm(a, b, scale_a, scale_b, bias=given, out_dtype=out_dtype)
        tolerance = 1e-2 if out_dtype is BF16 else 1e-4
        torch.testing.assert_close(result.double(), expected + added, rtol=tolerance, atol=tolerance)
    # As torch.nn.functional.scaled_mm wants them, with lines that nobody reads.
    padded = torch.full((-(-scale_b.shape[0] // 4) * 4, scale_b.shape[1]), float("nan"))
    padded[: scale_b.shape[0]] = scale_b
    result = tunegemm.scaled_mm(a, b, scale_a.contiguous(), padded, out_dtype=F32)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)


def test_e8m0_scales_are_fp32_ones() -> None:
    a, b, scale_a, scale_b = operands(5, 200, 400)
    for kinds in ((True, True), (True, False), (False, True)):
        coarse = [
            each.to(torch.float8_e8m0fnu) if is_coarse else each
            for each, is_coarse in zip((scale_a, scale_b), kinds, strict=True)
        ]
        exact = [each.float() for each in coarse]
        assert [each.stride() for each in exact] == [scale_a.stride(), scale_b.stride()]
        given = tunegemm.scaled_mm(a, b, *coarse, out_dtype=F32)
        assert torch.equal(given, tunegemm.scaled_mm(a, b, *exact, out_dtype=F32))
        compiled = torch.compile(Scaled(), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(a, b, *coarse), Scaled()(a, b, *exact))


def test_e8m0_scales_of_other_blocks_reach_torch_as_they_are() -> None:
    a, b, _, _ = operands(4, 200, 400)
    scales = [torch.ones(4, 25).to(torch.float8_e8m0fnu), torch.ones(25, 200).to(torch.float8_e8m0fnu)]
    seen: list[Any] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, given: Any = (), words: Any = None) -> Any:
            if function.__name__ == "_scaled_mm":
                return seen.extend(given[2:4])
            return function(*given, **(words or {}))

    with Watch():
        tunegemm.scaled_mm(a, b, *scales, out_dtype=BF16)  # of 1x16
    assert len(seen) == 2 and all(each is scale for each, scale in zip(seen, scales, strict=True))


E8M0 = torch.float8_e8m0fnu


def narrow(rows: int, n: int, k: int, shared: int, *coarse: int) -> tuple[torch.Tensor, ...]:
    """a, b, and scales of 1x32 and `shared` x 32; coarse: which of them are E8M0."""
    torch.manual_seed(1)
    a, weight = (torch.randn(*shape).to(FP8) for shape in ((rows, k), (n, k)))
    scales = [2.0 ** torch.randint(-9, 9, (lines, -(-k // 32))) for lines in (rows, -(-n // shared))]
    given = [each.to(E8M0) if index in coarse else each for index, each in enumerate(scales)]
    return a, weight.t(), given[0], given[1].t()


def wanted_narrow(a: Any, b: Any, scale_a: Any, scale_b: Any, shared: int) -> torch.Tensor:
    """In fp64, element by element of the scales."""
    group, column = torch.arange(a.shape[1]) // 32, torch.arange(b.shape[1]) // shared
    scale_a, scale_b = scale_a.float().double(), scale_b.float().double()
    return (a.double() * scale_a[:, group]) @ (b.double() * scale_b[group][:, column])


@pytest.mark.parametrize("shape", [(1, 128, 128), (5, 200, 400), (130, 136, 144), (3, 33, 1040)])
@pytest.mark.parametrize("shared", [1, 32])
@pytest.mark.parametrize("coarse", [(), (0, 1), (0,), (1,)])
def test_scales_of_32_of_k(shape: tuple[int, int, int], shared: int, coarse: tuple[int, ...]) -> None:
    given = narrow(*shape, shared, *coarse)
    assert own.scale_k_of(*given) == 32
    expected, bias = wanted_narrow(*given, shared), torch.randn(shape[1]).to(BF16)
    for added, out_dtype in ((None, F32), (bias, F32), (None, BF16)):
        result = tunegemm.scaled_mm(*given, bias=added, out_dtype=out_dtype)
        total = expected if added is None else expected + added.double()
        tolerance = 1e-2 if out_dtype is BF16 else 1e-4
        torch.testing.assert_close(result.double(), total, rtol=tolerance, atol=tolerance * 100)
    columns = given[0], given[1], given[2].t().contiguous().t(), given[3].contiguous()
    assert torch.equal(tunegemm.scaled_mm(*columns, out_dtype=BF16), result)


def test_every_e8m0_scale_counts() -> None:
    """0 is 2^-127, and 255 is NaN."""
    a, b = torch.ones(256, 32).to(FP8), torch.ones(32, 48).to(FP8)
    every = torch.arange(256, dtype=torch.uint8)[:, None].view(E8M0)
    a, b, every = torch.cat((a, a), 1), torch.cat((b, b)), torch.cat((every, every), 1)
    result = tunegemm.scaled_mm(a, b, every, torch.ones(2, 48).to(E8M0), out_dtype=F32)
    expected = (64 * 2.0 ** (torch.arange(256).double() - 127)).float()
    assert result[:255].eq(expected[:255, None]).all() and result[255].isnan().all()


def test_what_fits_two_blocks_is_of_128() -> None:
    for n in (32, 33, 128, 200):
        for k in (16, 32):
            a, b = torch.ones(5, k).to(FP8), torch.ones(k, n).to(FP8)
            given = a, b, torch.ones(5, 1), torch.ones(1, -(-n // 128))
            assert own.scale_k_of(*given) == 128
        assert own.scale_k_of(a, b, torch.ones(5, 1), torch.ones(1, -(-n // 32))) == (32 if n > 32 else 128)
    a, b = torch.ones(5, 128).to(FP8), torch.ones(128, 128).to(FP8)  # torch pads one block of k to four
    assert own.scale_k_of(a, b, torch.ones(5, 1), torch.ones(4, 1)) == 128
    assert own.scale_k_of(a, b, torch.ones(5, 4), torch.ones(4, 4)) == 32
    assert own.scale_k_of(a, b, torch.ones(5, 4), torch.ones(4, 1)) == 0


@pytest.mark.parametrize(("shape", "block"), [((5, 40, 32), 32), ((5, 1, 32), 32), ((5, 1, 100), 128)])
@pytest.mark.parametrize("coarse", [(True, True), (True, False), (False, True)])
def test_e8m0_scales_of_one_block_of_k_are_no_scales_of_rows(
    shape: tuple[int, int, int], block: int, coarse: tuple[bool, bool]
) -> None:
    """Their shapes are (m, 1) and (1, n), too, and torch has no E8M0 scales of rows."""
    rows, n, k = shape
    a, b = torch.randn(rows, k).to(FP8), torch.randn(n, k).to(FP8).t()
    scales = [2.0 ** torch.randint(-9, 9, of) for of in ((rows, 1), (1, n))]
    given = [each.to(E8M0) if is_coarse else each for each, is_coarse in zip(scales, coarse, strict=True)]
    expected = (a.double() * scales[0]) @ (b.double() * scales[1])
    for function in (tunegemm.scaled_mm, torch.compile(tunegemm.scaled_mm, backend="aot_eager")):
        result = function(a, b, *given, out_dtype=F32)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 48, 32), (5, 33, 32), (5, 48, 20), (1, 33, 7)])
def test_fp32_scales_of_one_block_of_k_are_those_of_rows_but_where_torch_refuses_them(
    shape: tuple[int, int, int],
) -> None:
    """They mean the same. Fake operands of a GPU show what torch refuses there: it wants multiples of 16."""
    rows, n, k = shape
    bias = torch.ones(n, dtype=BF16)
    with FakeTensorMode():
        a, b = (torch.empty(*of, device="cuda").to(FP8) for of in ((rows, k), (n, k)))
        given = a, b.t(), torch.empty(rows, 1, device="cuda"), torch.empty(1, n, device="cuda")
        for out_dtype in (BF16, F32, torch.float16):
            text = "scale_rowwise"
            is_torchs = shape == (5, 48, 32) and out_dtype is BF16
            assert own.are_of_one_block(text, a, b.t(), out_dtype) != is_torchs
            for added in (None, torch.empty(n, dtype=BF16, device="cuda")):
                result = tunegemm.scaled_mm(*given, bias=added, out_dtype=out_dtype)
                assert (result.shape, result.dtype) == ((rows, n), out_dtype)
        wide = [torch.empty(lines, 33, device="cuda").to(FP8) for lines in (rows, n)]
        for left, right in ((a.view(torch.int8), b.view(torch.int8)), (a, wide[1]), wide):
            assert not own.are_of_one_block(text, left, right.t(), F32)
        assert not own.are_of_one_block("scale_tensor", a, b.t(), F32)
    given = narrow(rows, n, k, 1)
    for added in (None, bias):  # a CPU takes both
        result = tunegemm.scaled_mm(*given, bias=added, out_dtype=F32)
        of_blocks = own.emulated(*given, added, F32)
        torch.testing.assert_close(result, of_blocks, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_sums_are_scaled_before_they_become_fp8(backend: str) -> None:
    """They became fp8 before, too: rounded twice by Inductor, and ATen refuses fp8 times fp32."""
    torch.manual_seed(0)
    a, b = (8 * torch.randn(5, 64)).to(FP8), (8 * torch.randn(64, 48)).to(FP8)
    scales = torch.rand(5, 1) / 16, torch.rand(1, 48) / 16
    torch._dynamo.reset()
    result = torch.compile(tunegemm.scaled_mm, backend=backend)(a, b, *scales)
    assert result.dtype is FP8 and torch.equal(result.float(), tunegemm.scaled_mm(a, b, *scales).float())


@pytest.mark.parametrize("shared", [1, 32])
@pytest.mark.parametrize("batched", [(None, None, 0, None), (None, None, None, 0), (0, None, None, None)])
def test_vmap_takes_further_scales(shared: int, batched: tuple[int | None, ...]) -> None:
    given = narrow(5, 48, 256, shared)
    many = [torch.stack((each, each)) if of == 0 else each for each, of in zip(given, batched, strict=True)]
    result = torch.func.vmap(Scaled(), in_dims=batched)(*many)
    torch.testing.assert_close(result, Scaled()(*given).expand(2, 5, 48))


def test_graphs_hold_scales_of_32_of_k() -> None:
    for given in (narrow(5, 200, 400, 1, 0, 1), narrow(5, 200, 400, 32)):
        expected = Scaled()(*given)
        assert torch.equal(torch.compile(Scaled(), backend="aot_eager", fullgraph=True)(*given), expected)
        assert torch.equal(torch.export.export(Scaled(), given).module()(*given), expected)


@pytest.mark.parametrize("by_columns", [False, True])
def test_enable_serves_torchs_scales_of_1x32_that_are_not_swizzled(
    by_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "DEVICE_KEYS", ("CPU",))
    a, b, scale_a, scale_b = narrow(5, 208, 400, 1, 0, 1)
    kind, plain = ScalingType.BlockWise1x32, SwizzleType.NO_SWIZZLE
    words: Any = {"swizzle_a": plain, "swizzle_b": plain}
    given = a, b, scale_a, kind, scale_b if by_columns else scale_b.t(), kind
    with tunegemm.enable():
        expected = tunegemm.scaled_mm(a, b, scale_a, scale_b, out_dtype=BF16)
        assert torch.equal(scaled_mm(*given, **words), expected)
        for wrong in (
            {"swizzle_a": SwizzleType.SWIZZLE_32_4_4, "swizzle_b": SwizzleType.SWIZZLE_32_4_4},
            words | {"bias": torch.ones(208, dtype=BF16)},
        ):
            with pytest.raises((RuntimeError, ValueError)):
                scaled_mm(*given, **wrong)
        square = narrow(5, 16, 512, 1, 0, 1)  # as many columns as groups of k: which are which?
        with pytest.raises((RuntimeError, ValueError)):
            scaled_mm(*square[:2], square[2], kind, square[3], kind, **words)


def test_enable_leaves_torchs_errors_about_scales_of_1x32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "DEVICE_KEYS", ("CPU",))
    a, b, scale_a, scale_b = narrow(5, 208, 512, 1)
    one, kind = torch.ones(()), [ScalingType.BlockWise1x32.value]
    for name, (left, right, of_a, of_b, recipe_a, recipe_b) in {
        "no dimension": (a, b, one, one, kind, kind),
        "fp64": (a, b, scale_a.double(), scale_b, kind, kind),
        "other k": (a, b[:256], scale_a, scale_b, kind, kind),
        "both recipes for a": (a, b, scale_a, scale_b, kind * 2, []),
    }.items():
        words = left, right, [of_a], recipe_a, [0], [of_b], recipe_b, [0], None, BF16
        with pytest.raises((RuntimeError, ValueError)) as torchs:
            torch.ops.aten._scaled_mm_v2(*words)
        with tunegemm.enable(), pytest.raises(Exception) as ours:
            torch.ops.aten._scaled_mm_v2(*words)
        assert (ours.type, str(ours.value)) == (torchs.type, str(torchs.value)), name


def test_autocast_leaves_the_fp32_product() -> None:
    given = operands(5, 200, 400)
    with torch.autocast("cpu", dtype=BF16):
        result = tunegemm.scaled_mm(*given, out_dtype=F32)
    assert torch.equal(result, tunegemm.scaled_mm(*given, out_dtype=F32))


def test_partial_blocks_count() -> None:
    assert [own.blocks_of(extent) for extent in (1, 128, 129, 256)] == [1, 1, 2, 2]


def test_scales_and_operands_that_torch_takes() -> None:
    a, b, scale_a, scale_b = operands(8, 256, 640)  # five blocks along k
    padded = torch.rand(2, 8).t()  # each column of eight, of which five are read
    good = a, b, scale_a, padded[:5]
    assert own.scale_k_of(*good) == 128 and own.torch_takes(*good)
    for name, given in {
        "rows": (a[:6], b, torch.rand(5, 6).t(), padded[:5]),
        "scale_a's layout": (a, b, scale_a.contiguous(), padded[:5]),
        "scale_b's layout": (a, b, scale_a, scale_b),
        "k": (a[:, :632], b[:632], scale_a, padded[:5]),
        "b's layout": (a, b.contiguous(), scale_a, padded[:5]),
    }.items():
        assert own.scale_k_of(*given) == 128 and not own.torch_takes(*given), name
    assert own.scale_k_of(a, b, scale_a, padded) == 128  # torch's padding of scale_b
    for wrong in (padded[:7], padded[:4], padded[:5, :1], padded[:5, 0]):
        assert own.scale_k_of(a, b, scale_a, wrong) == 0
    assert own.scale_k_of(a, b, scale_a[:, :4], padded[:5]) == 0
    assert own.scale_k_of(a[0], b, scale_a, padded[:5]) == 0
    assert own.scale_k_of(a, b[:, 0], scale_a, padded[:5]) == 0


class Scaled(torch.nn.Module):
    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return tunegemm.scaled_mm(*given[:4], bias=given[4] if len(given) > 4 else None, out_dtype=BF16)


def test_compiled_and_exported_code_computes_as_eager_code_does() -> None:
    compiled = torch.compile(Scaled(), fullgraph=True)
    bias = torch.randn(200).to(BF16)
    for rows, more in ((1, ()), (6, ()), (5, ()), (5, (bias,))):
        given = operands(rows, 200, 400)
        assert torch.equal(compiled(*given, *more), Scaled()(*given, *more))
    assert torch.equal(torch.export.export(Scaled(), given).module()(*given), Scaled()(*given))
    with pytest.raises(ProblemError, match="blocks of 128 have"):
        torch.compile(Scaled(), backend="eager")(given[0], given[1], given[2][:, :3], given[3])


@pytest.mark.parametrize("shape", [(16, 200, 64), (16, 48, 128), (5, 200, 400)])
def test_dynamic_shapes_are_those_of_blocks_too(shape: tuple[int, int, int]) -> None:
    """One block along k makes an extent of 1, which is no symbol beside symbols."""
    torch._dynamo.reset()
    given = operands(*shape)
    compiled = torch.compile(Scaled(), backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(*given), Scaled()(*given))


def test_fake_operands_make_a_graph_that_runs() -> None:
    given = operands(5, 200, 400)
    graph = make_fx(Scaled(), tracing_mode="symbolic")(*given)
    assert torch.equal(graph(*given), Scaled()(*given))


A, B, SCALE_A, SCALE_B = operands(5, 300, 400)


@pytest.mark.parametrize(
    ("scale_a", "scale_b", "says"),
    [
        (SCALE_A[:, :3], SCALE_B, r"scale_a is \(5, 3\) for \(5, 400\) x \(400, 300\); blocks .* \(5, 4\)"),
        (SCALE_A.t(), SCALE_B, r"scale_a is \(4, 5\).*transpose it"),
        (SCALE_A, SCALE_B.t(), r"scale_b is \(3, 4\).*transpose it"),
        (SCALE_A, SCALE_B[:, :2], r"scale_b is \(4, 2\).*have \(4, 3\), rows and columns have \(5, 1\) and"),
        (SCALE_A.double(), SCALE_B, r"scale_a is torch.float64; .* scale_a.float\(\)"),
        (SCALE_A, SCALE_B.to(BF16), r"scale_b is torch.bfloat16; .* scale_b.float\(\)"),
        (torch.ones(5, 13), torch.ones(300, 13), r"scale_b is \(300, 13\).*transpose it"),
        (torch.ones(5, 13), torch.ones(13, 11), r"scale_b is \(13, 11\).*; blocks of 32 have \(13, 300\)"),
        (torch.ones(5, 13), torch.ones(10, 13), r"scale_b is \(10, 13\).*transpose it"),
        (torch.ones(13, 5), torch.ones(13, 300), r"scale_a is \(13, 5\).*transpose it"),
        (torch.ones(5, 13), torch.ones(13, 10).to(BF16), r"scale_b is torch.bfloat16; .* scale_b.float\(\)"),
    ],
)  # fmt: skip
def test_scales_that_fit_nothing_are_refused_in_one_line(scale_a: Any, scale_b: Any, says: str) -> None:
    with pytest.raises(ProblemError, match=says):
        tunegemm.scaled_mm(A, B, scale_a, scale_b, out_dtype=BF16)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"out_dtype": "bfloat16"}, "out_dtype 'bfloat16' is not a torch.dtype; give one such as"),
        ({"out_dtype": [BF16]}, r"out_dtype \[torch.bfloat16\] is not a torch.dtype"),
        ({"bias": [1.0]}, r"bias is \[1.0\]; give a tensor of one value for each column, \(300,\)"),
        ({"bias": torch.ones(1)}, r"bias is \(1,\); give a tensor of one value for each column"),
        ({"bias": torch.ones(5, 300)}, r"bias is \(5, 300\); give"),
        ({"bias": torch.ones(300, device="meta")}, "a is on cpu, .* bias on meta; give all on one device"),
        ({"scale_a": SCALE_A.to("meta")}, "scale_a on meta, scale_b on cpu; give all on one device"),
    ],
)
def test_what_stands_beside_the_scales_is_checked(words: dict[str, Any], says: str) -> None:
    """In torch's place, which would look at it on a GPU."""
    given: dict[str, Any] = {"a": A, "b": B, "scale_a": SCALE_A, "scale_b": SCALE_B, "out_dtype": BF16}
    with pytest.raises(ProblemError, match=says):
        tunegemm.scaled_mm(**given | words)


def test_an_output_that_torch_refuses_or_that_holds_an_operand_is_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.zeros(256, 640).to(FP8)
    given = torch.zeros(8, 640).to(FP8), weight.t(), torch.ones(8, 5), torch.ones(5, 2)
    inside = weight.flatten().view(BF16)[: 8 * 256].view(8, 256)
    launched: list[Any] = []
    with serving_by(monkeypatch, Bound(lambda *addresses: launched.append(addresses))):
        for out_dtype, out in ((BF16, inside), (BF16, torch.empty(8, 256)), (F32, inside.clone())):
            assert own.product(*given, out_dtype, out) is None and not launched
        for out_dtype in (BF16, None):
            out = torch.empty(8, 256, dtype=BF16)
            assert own.product(*given, out_dtype, out) is out and launched.pop()[-1] == out.data_ptr()


def test_e8m0_is_read_as_it_lies_where_lines_begin_at_units_of_4_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[Any] = []
    with serving_by(monkeypatch, Bound(lambda *addresses: launched.append(addresses))):
        for k, shared, as_they_lie in ((512, 1, True), (512, 32, True), (400, 1, False)):
            given = narrow(8, 256, k, shared, 0, 1)
            assert own.product(*given, BF16, scale_k=32) is not None
            addresses = [each.data_ptr() for each in given]
            assert launched[-1][:2] == tuple(addresses[:2])
            assert (launched[-1][2:4] == tuple(addresses[2:])) == as_they_lie
        *rest, scale_a, scale_b = narrow(8, 256, 512, 1, 0, 1)
        beside = torch.ones(8, 20).to(E8M0)[:, 1:17]
        assert own.product(*rest, beside, scale_b, BF16, scale_k=32) is not None
        assert launched[-1][3] == scale_b.data_ptr() != launched[-1][2] != beside.data_ptr()
        assert own.product(*rest, scale_a.float(), scale_b, BF16, scale_k=32) is not None
        many = narrow(4096, 256, 512, 1, 0, 1)
        count = len(launched)
        assert (
            own.product(*many, BF16, scale_k=32) is None and len(launched) == count
        )  # torch, by bf16 copies


@pytest.mark.parametrize(
    ("scale_a", "scale_b"), [((5,), (300,)), ((5, 4), (4, 3)), ((1, 5), (300, 1)), ((5, 1), (1,))]
)
def test_scales_that_int8_lacks_are_named(scale_a: tuple[int, ...], scale_b: tuple[int, ...]) -> None:
    """Torch would say that it wants fp8."""
    a, b = A.view(torch.int8), B.view(torch.int8)
    with pytest.raises(
        ProblemError, match=r"of int8; give .* scales of one element, or \(m, 1\) and \(1, n\)"
    ):
        tunegemm.scaled_mm(a, b, torch.ones(scale_a), torch.ones(scale_b))
    with pytest.raises(ProblemError, match=r"scale_a is \(\) torch.float8_e8m0fnu.*; give .* float32 scales"):
        tunegemm.scaled_mm(a, b, torch.ones(()).to(E8M0), torch.ones(()))


@pytest.mark.parametrize("scale_a", [torch.ones(()), torch.ones(5, 1), SCALE_A])
@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_a_scale_that_is_no_tensor_is_named(scale_a: torch.Tensor, dtype: torch.dtype) -> None:
    for given in ((scale_a, None), (scale_a, [1.0]), (1.0, scale_a)):
        with pytest.raises(TypeError, match=r"'scale_[ab]' .* must be Tensor"):
            tunegemm.scaled_mm(A.view(dtype), B.view(dtype), *given)  # type: ignore[arg-type]


def test_int8_lines_that_are_one_are_right() -> None:
    a, b = (torch.arange(-9, 9, dtype=torch.int8).repeat(200)[: x * 64].view(x, 64) for x in (32, 48))
    for left, right in ((a[:1].expand(32, 64), b.t()), (a, b[:1].expand(48, 64).t())):
        wanted = left.int() @ right.int()
        assert torch.equal(tunegemm.matmul(left, right, out_dtype=torch.int32), wanted)
        scaled = tunegemm.scaled_mm(left, right, torch.tensor(0.5), torch.tensor(2.0), out_dtype=F32)
        assert torch.equal(scaled, wanted.float())


def test_an_error_in_one_whole_graph_shows_its_message() -> None:
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"ProblemError.*scale_a is \(5, 3\) for .*; blocks of 128 have"):
        torch.compile(Scaled(), backend="eager", fullgraph=True)(A, B, SCALE_A[:, :3], SCALE_B)


def test_scales_that_torch_has_are_torchs() -> None:
    """On a CPU it refuses them itself."""
    with pytest.raises((RuntimeError, ValueError)) as raised:
        tunegemm.scaled_mm(A, B, SCALE_A, torch.rand(4, 300), out_dtype=BF16)
    assert not isinstance(raised.value, ProblemError)
