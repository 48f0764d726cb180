"""What launches of groups refuse: operands that kernels would read or write elsewhere, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tunegemm.generate import takes
from tunegemm.generate.along_k import AlongK
from tunegemm.generate.grouped import GroupedKernel
from tunegemm.generate.takes import NotTaken
from tunegemm.groups import routing
from tunegemm.model.grouped import configs, listed_along_k

GROUPS, ROWS, N, K = 3, 8, 48, 64
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What the driver was given."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr("tunegemm.generate.along_k.tile_counter", lambda index: Counter())
    return []


class Counter:
    def take(self, stream: int) -> tuple[int, int, None]:
        return 0, 64, None


def launches(launched: list[tuple[int, ...]]) -> dict[str, Callable[..., None]]:
    """Each kernel's launch, of tensors by their names."""

    def function(*arguments: int) -> None:
        launched.append(arguments)

    def bind(ctas: int, **numbers: int) -> Callable[..., None]:
        return lambda *tensors: function(*numbers.values())

    def few(a: Any, weights: Any, out: Any, offsets: Any, bias: Any = None, **words: Any) -> None:
        of = routing.few(configs("bf16")["co64x32"], 0, lambda name, index: bind)
        assert of is not None
        beside = () if bias is None else (bias,)
        of(a, weights, out, offsets, bias, **words)(a, weights, offsets, *beside, out)

    found: dict[str, Callable[..., None]] = {
        kind: partial(GroupedKernel(configs(kind)["pp128x128"], function).launch, blocks=132)
        for kind in ("bf16", "gated", "n_major", "fp8")
    }
    along = AlongK(listed_along_k()[0], function)
    return found | {"few": few, "along_k": partial(along.launch, blocks=132)}


def operands(kind: str) -> dict[str, torch.Tensor]:
    offsets = torch.tensor([2, 2, ROWS], dtype=torch.int32)
    if kind == "along_k":
        shapes = {"a": (ROWS, K), "b": (ROWS, N), "out": (GROUPS, K, N)}
        return {name: torch.zeros(shape, dtype=BF16) for name, shape in shapes.items()} | {"offsets": offsets}
    dtype = torch.float8_e4m3fn if kind == "fp8" else BF16
    bias, scales = torch.zeros(GROUPS, N, dtype=BF16), {}
    if kind == "fp8":
        bias, scales = bias.float(), {"scales": torch.zeros(ROWS)}
    weights = torch.zeros(GROUPS, N, K).to(dtype)
    return {
        "a": torch.zeros(ROWS, K).to(dtype),
        "weights": weights.mT.contiguous().mT if kind == "n_major" else weights,
        "out": torch.zeros(ROWS, N // (1 + (kind == "gated")), dtype=BF16),
        "offsets": offsets,
        "bias": bias,
        **scales,
    }


def moved(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """The same, so many bytes behind an aligned address, as memory of others may be."""
    memory = torch.zeros(tensor.nbytes + 256, dtype=torch.uint8)
    first = -memory.data_ptr() % 128 + num_bytes
    size = max(1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)), 1)
    bytes_of = memory[first : first + size * tensor.element_size()]
    flat = torch.frombuffer(memoryview(bytes_of.numpy()), dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


KINDS = ("bf16", "gated", "n_major", "fp8", "few", "along_k")


@pytest.mark.parametrize("kind", KINDS)
def test_each_operand_is_taken_at_its_addresses_alone(kind: str, launched: list[tuple[int, ...]]) -> None:
    launch, given = launches(launched)[kind], operands(kind)
    launch(**given)
    assert len(launched) == 1
    if kind == "few":  # whose addresses are looked at where the driver is called: tests/gpu/test_takes.py
        return
    for name, tensor in given.items():
        size = tensor.element_size()
        wide = name in ("a", "b", "weights", "out")
        for num_bytes in (16, 8, size, 1):
            launched.clear()
            if taken := num_bytes % (16 if wide else size) == 0:
                launch(**given | {name: moved(tensor, num_bytes)})
            else:
                with pytest.raises(NotTaken, match=f"addresses: .*{name} 0x"):
                    launch(**given | {name: moved(tensor, num_bytes)})
            assert len(launched) == taken, (name, num_bytes)


def changed(kind: str) -> dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """What is changed of one operand, by a word for it."""
    strided: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.new_zeros(*x.shape[:-1], x.shape[-1] + 1)  # noqa: E731
    every = {
        "a with gaps": ("a", lambda x: strided(x)[..., :-1]),
        "rows that share": ("a", lambda x: x[:1].expand(x.shape)),
        "every other": ("a", lambda x: torch.cat((x.float(), x.float()), -1).to(x.dtype)[..., ::2]),
        "another dtype": ("a", lambda x: x.float()),
        "fewer columns": ("a", lambda x: x[:, : -16]),
        "no rows": ("a", lambda x: x[:0]),
        "out of others": ("out", lambda x: x.new_zeros(x.shape[0] + 1, *x.shape[1:])),
        "out in fp32": ("out", lambda x: x.float()),
        "out of one row": ("out", lambda x: x[:1].expand(x.shape)),
        "int64": ("offsets", lambda x: x.long()),
        "an end more": ("offsets", lambda x: torch.cat((x, x[-1:]))),
        "every other end": ("offsets", lambda x: torch.stack((x, x), 1)[:, 0]),
    }  # fmt: skip
    if kind == "along_k":
        return every | {"b of other rows": ("b", lambda x: x[1:]), "odd n": ("b", lambda x: x[:, :-2])}
    every |= {
        "one weight": ("weights", lambda x: x[:1].expand(x.shape)),
        "bias of others": ("bias", lambda x: x[:, 1:]),
        "bias in fp16": ("bias", lambda x: x.half()),
        "every other bias": ("bias", lambda x: torch.stack((x, x), -1)[..., 0]),
        "odd n": ("weights", lambda x: x[:, :-1]),
    }
    if kind != "n_major":
        every["weights with gaps"] = "weights", lambda x: strided(x)[..., :-1]
    return every


@pytest.mark.parametrize("kind", KINDS)
def test_operands_that_lie_otherwise_are_refused(kind: str, launched: list[tuple[int, ...]]) -> None:
    launch, given = launches(launched)[kind], operands(kind)
    for word, (name, change) in changed(kind).items():
        if name == "a" and kind == "along_k" and word == "fewer columns":
            continue  # another product
        with pytest.raises(NotTaken):
            launch(**given | {name: change(given[name])})
            pytest.fail(word)
    assert launched == []


@pytest.mark.parametrize("kind", ["bf16", "few"])
def test_strides_that_a_descriptor_does_not_hold(kind: str, launched: list[tuple[int, ...]]) -> None:
    """Of one row a stride may be anything."""
    given = operands(kind)
    given |= {"a": given["a"].as_strided((1, K), (2**40, 1)), "out": given["out"][:1]}
    with pytest.raises(NotTaken, match="lines"):
        launches(launched)[kind](**given)


def test_kernels_that_have_scales_want_them_and_others_do_not(launched: list[tuple[int, ...]]) -> None:
    made, given = launches(launched), operands("fp8")
    for kind, words in (("fp8", {"scales": None}), ("fp8", {"bias": None}), ("bf16", {})):
        with pytest.raises(NotTaken):
            made[kind](**operands(kind) | {"scales": given["scales"]} | words)
    assert launched == []


@pytest.mark.parametrize(
    ("shape", "strides", "order", "words", "says"),
    [
        ((4, 24), (24, 1), (0, 1), {}, ""), ((4, 24), (32, 1), (0, 1), {}, ""),
        ((4, 24), (24, 1), (1, 0), {}, "not contiguous along dimension 0"),
        ((4, 24), (28, 1), (0, 1), {}, "lines 56 B apart"), ((4, 24), (28, 1), (0, 1), {"unit_bytes": 8}, ""),
        ((4, 24), (16, 1), (0, 1), {}, "overlaps itself"), ((4, 24), (16, 1), (0, 1), {"apart": False}, ""),
        ((4, 1), (8, 5), (0, 1), {}, "not contiguous along dimension 1"),
        ((4, 1), (8, 5), (0, 1), {"apart": False}, ""), ((4, 2), (8, 5),
        (0, 1), {"apart": False}, "contiguous"),
        ((3, 4, 24), (96, 24, 1), (0, 1, 2), {}, ""), ((3, 4, 24), (88, 24, 1),
        (0, 1, 2), {}, "overlaps itself"),
        ((3, 4, 24), (24, 72, 1), (1, 0, 2), {}, ""),
        ((1, 24), (2**39 - 8, 1), (0, 1), {}, ""), ((1, 24), (2**39, 1), (0, 1), {}, "lines 1099511627776 B"),
    ],
)  # fmt: skip
def test_lines_of_an_operand_are_apart_and_in_units(
    shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...], words: dict[str, Any], says: str
) -> None:
    tensor = torch.empty(1024, dtype=BF16).as_strided(shape, strides)
    place = takes.Place("x", tensor, "bfloat16", shape, order, **words)
    found = place.objection(torch.device("cpu"))
    assert says in found and bool(says) == bool(found)
    other_shape = *shape[:-1], shape[-1] + 1
    for other in (
        takes.Place("x", tensor, "float16", shape, order, **words),
        takes.Place("x", tensor, "bfloat16", other_shape, order, **words),
    ):
        assert other.objection(torch.device("cpu")).startswith(f"x is {shape} torch.bfloat16 on cpu, not ")
    assert "not" in place.objection(torch.device("meta"))
    again = takes.Place("y", tensor, "bfloat16", shape, order, **words)
    assert takes.first_objection([again, place], torch.device("cpu")) == (found.replace("x ", "y ", 1))


def test_extents_are_from_one_to_31_bits() -> None:
    assert takes.wrong_extents(m=1, n=2**31 - 1) == ""
    assert takes.wrong_extents(m=1, n=0) == f"n is 0, not from 1 to {2**31 - 1}"
    assert takes.wrong_extents(m=2**31).startswith(f"m is {2**31}, not")
    assert "operands at these addresses: a 0x11, c 0x20;" in str(takes.not_aligned(a=17, b=0, c=32))
