"""Code that launchers share: reads addresses and strides of operands, and copies those that TMA refuses."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tunegemm.describe.epilogue import MAX_WORDS, Operand, check_operands, operand_dtype
from tunegemm.describe.problem import DTYPE_BYTES, Problem, normalize_dtype
from tunegemm.generate.takes import NotTaken

if TYPE_CHECKING:
    import torch

#: Launches one product on the current stream. It takes (a, b, out), with operands as in torch.matmul, then
#: the tensors and numbers of the problem's epilogue, in the order of `Epilogue.operands`.
Launcher = Callable[..., None]

_FP32, _FP32_BITS = struct.Struct("f"), struct.Struct("I")

#: Addresses of A, B, D; their leading dimensions; the strides between their batch entries, in elements.
Places = tuple[int, int, int, int, int, int, int, int, int]

#: Returns the `Places` of the operands (a, b, out); raises NotTaken if a kernel cannot read or write them.
Reader = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], Places]

#: Launches one product on the current stream. It takes the addresses of A, B and D, then the words of the
#: epilogue's operands, as a `words_reader` returns them. All else was fixed when the launch was made.
AddressLaunch = Callable[..., None]

#: Returns the words of a launch for tensors and numbers; None if kernels cannot read a tensor at its address.
WordsOf = Callable[[Sequence["torch.Tensor"], Sequence[float]], Sequence[int] | None]

MAX_MADE = 1024


def never_unloaded() -> None:
    """The `keep` of a launcher whose kernel stays loaded until the process ends anyway."""


class AddressLauncher:
    """A `Launcher` whose launches take addresses, once the strides of its operands are known.

    Reading the strides of three tensors and assembling the kernel's arguments takes much of a call's host
    time. Dispatch knows the strides from its key, so it gets the launch for them from `of` once.
    """

    def __init__(
        self,
        read: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[Any, ...]],
        make: Callable[..., AddressLaunch],
        read_words: Callable[[Sequence[Any]], Sequence[int]] | None = None,
        keep: Callable[[], object] | None = None,
    ) -> None:
        """
        read: returns the addresses of (a, b, out), then their strides, like an `operand_reader`; raises
        ValueError if the kernel cannot read or write them. make: returns the launch for such strides.
        read_words: returns the words of the epilogue's operands, if the kernel has an epilogue.
        keep: lets the kernel live for as long as the process, also without its launchers.
        """
        self._read = read
        self._make = make
        self._read_words = read_words
        self._made: dict[tuple[Any, ...], AddressLaunch] = {}
        self.keep = keep

    def of(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> AddressLaunch:
        """The launch for operands with these strides, whose addresses must be aligned as well as these are.

        Raises ValueError if the kernel cannot read or write the operands.
        """
        _, _, _, *strides = self._read(a, b, out)
        key = tuple(strides)
        if (launch := self._made.get(key)) is None:
            if len(self._made) >= MAX_MADE:
                self._made.clear()
            launch = self._made[key] = self._make(*strides)
        return launch

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *operands: Any) -> None:
        words = () if self._read_words is None else self._read_words(operands)
        self.of(a, b, out)(a.data_ptr(), b.data_ptr(), out.data_ptr(), *words)


def operand_reader(problem: Problem, in_bytes: int = 16, out_bytes: int = 16) -> Reader:
    """A function that returns the `Places` of (a, b, out); by default for TMA, whose units have 16 bytes.

    It raises NotTaken if addresses or strides of A and B are not multiples of `in_bytes`, or those of D not
    of `out_bytes`: the kernel would fault.
    """
    m, n, k, batch = problem.m, problem.n, problem.k, problem.batch
    # Per operand: the strided mode, its extent, and the packed leading dimension. If the mode has extent 1,
    # its stride has no meaning; the packed stride, rounded up, serves as well and is surely aligned.
    a_leading = (-2, m, k) if problem.a_major == "k" else (-1, k, m)
    b_leading = (-1, n, k) if problem.b_major == "k" else (-2, k, n)
    out_n = problem.out_n
    d_leading = (-2, m, out_n) if problem.out_major == "n" else (-1, out_n, m)
    in_unit, out_unit = in_bytes // DTYPE_BYTES[problem.in_dtype], out_bytes // DTYPE_BYTES[problem.out_dtype]

    def leading(tensor: torch.Tensor, mode: int, lines: int, packed: int, unit: int) -> int:
        stride = -(-packed // unit) * unit if lines == 1 else tensor.stride(mode)
        if stride % unit:
            raise NotTaken(
                f"leading dimension {stride} is not a multiple of the {unit} elements of one access"
            )
        return stride

    def batch_stride(tensor: torch.Tensor, packed: int, unit: int) -> int:
        if tensor.ndim == 2 or batch == 1:
            return -(-packed // unit) * unit
        if tensor.stride(0) % unit:
            raise NotTaken(f"batch stride {tensor.stride(0)} is not a multiple of {unit} elements")
        return tensor.stride(0)

    def read(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Places:
        a_address, b_address, d_address = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if (a_address | b_address) & (in_bytes - 1) or d_address & (out_bytes - 1):
            raise NotTaken(
                f"an operand does not start at a multiple of the {in_bytes} B of one access "
                f"(output: {out_bytes} B)"
            )
        return (
            a_address,
            b_address,
            d_address,
            leading(a, *a_leading, in_unit),
            leading(b, *b_leading, in_unit),
            leading(out, *d_leading, out_unit),
            batch_stride(a, m * k, in_unit),
            batch_stride(b, n * k, in_unit),
            batch_stride(out, m * out_n, out_unit),
        )

    return read


def tma_takes(problem: Problem) -> bool:
    """Whether TMA reads and writes the problem's operands as they lie: 16-byte addresses and strides."""
    line = problem.out_n if problem.out_major == "n" else problem.m
    out_bytes = DTYPE_BYTES[problem.out_dtype]
    batch_bytes = problem.m * problem.out_n * out_bytes if problem.batch > 1 else 0
    return problem.alignment == 16 and line * out_bytes % 16 == batch_bytes % 16 == 0


def through_aligned_copies(problem: Problem, launch: Launcher) -> Launcher:
    """A launcher for operands that TMA refuses: it copies them to aligned memory, and the result back.

    It also copies an output whose lines do not end at a multiple of 16 bytes, even if they start at one. TMA
    stores whole units of 16 bytes (H100, 2026-11-26), and a store of pairs of columns ends at an even column.
    In a view this would overwrite the caller's next columns; at a buffer's end, memory beyond the buffer. The
    lines of an operand may end anywhere: TMA loads zeros beyond an extent.

    A copy moves its bytes through device memory once more, but a product without TMA costs far more: a peer
    that pads is up to 4.8 times as fast as torch.mm at odd k (H200, benchmarks/results/h200/peers.json). The
    copies are temporaries of the stream, or of the graph that is being captured.
    """
    a_rows, b_rows, out_rows = problem.a_major == "k", problem.b_major == "n", problem.out_major == "n"
    matrices = [operand.kind == "matrix" for operand in problem.fused.operands]

    def launch_on_copies(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, *operands: Any) -> None:
        line_bytes = out.shape[-1 if out_rows else -2] * out.element_size()
        in_place = _is_aligned(out, out_rows) and line_bytes % 16 == 0
        target = out if in_place else _aligned_like(out, out_rows)
        fused = [
            _aligned(operand, out_rows) if matrix else operand
            for operand, matrix in zip(operands, matrices, strict=True)
        ]
        launch(_aligned(a, a_rows), _aligned(b, b_rows), target, *fused)
        if target is not out:
            out.copy_(target)

    if keep := getattr(launch, "keep", None):
        launch_on_copies.keep = keep  # type: ignore[attr-defined]
    return launch_on_copies


def _aligned(tensor: torch.Tensor, row_major: bool) -> torch.Tensor:
    if tensor.ndim == 3 and tensor.stride(0) == 0:
        return _aligned(tensor[0], row_major).expand(tensor.shape)  # one copy serves the batch
    return tensor if _is_aligned(tensor, row_major) else _aligned_like(tensor, row_major).copy_(tensor)


def _is_aligned(tensor: torch.Tensor, row_major: bool) -> bool:
    unit = 16 // tensor.element_size()
    line = -2 if row_major else -1
    lines = 0 if tensor.shape[line] == 1 else tensor.stride(line)
    entries = 0 if tensor.ndim == 2 or tensor.shape[0] == 1 else tensor.stride(0)
    return tensor.data_ptr() % 16 == lines % unit == entries % unit == 0


def _aligned_like(tensor: torch.Tensor, row_major: bool) -> torch.Tensor:
    """A tensor of the same shape whose lines (rows or columns) start at multiples of 16 bytes."""
    *batch, lines, extent = tensor.shape if row_major else tensor.mT.shape
    unit = 16 // tensor.element_size()
    room = tensor.new_empty((*batch, lines, -(-extent // unit) * unit))[..., :extent]
    return room if row_major else room.mT


def words_reader(problem: Problem) -> Callable[[Sequence[Any]], list[int]]:
    """A function of an epilogue's operands that returns the `MAX_WORDS` words of a launch.

    It raises ProblemError if the number of operands is wrong, and ValueError if an operand has another dtype,
    shape or major, or an address that is not a multiple of its access.
    """
    fused = problem.fused
    readers = [_word_reader(problem, operand) for operand in fused.operands]
    rest = [0] * (MAX_WORDS - fused.words)

    def read(operands: Sequence[Any]) -> list[int]:
        if len(operands) != len(readers):
            check_operands(fused, operands)
        words: list[int] = []
        for reader, operand in zip(readers, operands, strict=True):
            reader(operand, words)
        return words + rest

    return read


def words_binder(problem: Problem, operands: Sequence[Any]) -> WordsOf:
    """A function of tensors and numbers that returns the words of a launch, for operands with these strides.

    It does the work of a `words_reader` but checks addresses only, and returns None if one is less aligned
    than the kernel needs. Raises what a `words_reader` raises for these operands.
    """
    fixed = words_reader(problem)(operands)
    addresses: list[tuple[int, int]] = []
    number_places: list[int] = []
    place = 0
    for operand in problem.fused.operands:
        if operand.kind == "number":
            number_places.append(place)
        else:
            addresses.append((place, _address_bytes(operand, operand_dtype(operand, problem.out_dtype)) - 1))
        place += operand.words
    if len(addresses) == 1 and not number_places:  # usually a bias alone
        ((_, mask),) = addresses
        rest = tuple(fixed[1:])

        def bind_one(tensors: Sequence[torch.Tensor], _: Sequence[float]) -> Sequence[int] | None:
            address = tensors[0].data_ptr()
            return None if address & mask else (address, *rest)

        return bind_one

    def bind(tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> Sequence[int] | None:
        words = fixed.copy()
        for (place, mask), tensor in zip(addresses, tensors, strict=True):
            words[place] = address = tensor.data_ptr()
            if address & mask:
                return None
        for place, number in zip(number_places, numbers, strict=True):
            words[place] = _bits(number)
        return words

    return bind


@functools.lru_cache(maxsize=4096)
def _bits(number: float) -> int:
    try:
        packed = _FP32.pack(number)
    except OverflowError:  # infinite in fp32
        packed = _FP32.pack(math.copysign(math.inf, number))
    return int(_FP32_BITS.unpack(packed)[0])


def _address_bytes(operand: Operand, dtype: str) -> int:
    """The required alignment of an operand: kernels read vectors in pairs, matrices in units of 16 bytes."""
    if operand.kind == "matrix":
        return 16
    return (2 if operand.kind in ("n", "m") else 1) * DTYPE_BYTES[dtype]


def _word_reader(problem: Problem, operand: Operand) -> Callable[[Any, list[int]], None]:
    if operand.kind == "number":
        return lambda value, words: words.append(_bits(value))
    dtype, shape = operand_dtype(operand, problem.out_dtype), problem.operand_shape(operand)
    mode = (-1 if problem.out_major == "n" else -2) if operand.kind == "matrix" else 0
    unit = 16 // DTYPE_BYTES[dtype]
    lines = shape[-2 if problem.out_major == "n" else -1] if operand.kind == "matrix" else 0
    extent = shape[mode] if shape else 1
    address_bytes = _address_bytes(operand, dtype)

    def read(tensor: Any, words: list[int]) -> None:
        if tuple(tensor.shape) != shape and not (shape == () and tensor.numel() == 1):
            raise ValueError(f"{operand.name} of shape {tuple(tensor.shape)}; its epilogue takes {shape}")
        if normalize_dtype(str(tensor.dtype)) != dtype:
            raise ValueError(f"{operand.name} of dtype {tensor.dtype}; its epilogue takes {dtype}")
        address = tensor.data_ptr()
        if operand.kind != "matrix":
            if address % address_bytes or (shape and extent > 1 and tensor.stride(0) != 1):
                raise ValueError(
                    f"{operand.name} of strides {tensor.stride()} is not a packed, aligned vector"
                )
            words.append(address)
            return
        leading = tensor.stride(-2 if mode == -1 else -1) if lines > 1 else -(-extent // unit) * unit
        step = tensor.stride(0) if tensor.ndim == 3 else 0
        if (
            address % address_bytes
            or leading % unit
            or step % unit
            or (extent > 1 and tensor.stride(mode) != 1)
        ):
            raise ValueError(f"{operand.name} of strides {tensor.stride()} has no lines of 16 bytes as D has")
        words += [address, leading, step]

    return read
