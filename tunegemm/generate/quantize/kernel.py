"""The kernel that quantises rows to float8_e4m3fn, with one fp32 scale for each 128 neighbouring values.

Half a warp has a block of four rows, each thread 8 neighbouring values: of 16-bit values one load of 16 bytes
a row. The loads of four rows are in flight together, and so are their exchanges of maxima. Rows and columns
beyond the extents are the last ones again, whose magnitudes change no maximum, and are not stored.

Each operation has one result under IEEE 754, but for the exponential, which takes the steps of CUDA's expf.
So the bits are those of the same operations by torch.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from tunegemm.generate.quantize.config import (
    BLOCK,
    EPSILON,
    LARGEST,
    ROWS,
    VECTOR,
    WARPS,
    QuantizeConfig,
)

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}
WARP = 32
LANES = BLOCK // VECTOR
"""Lanes of a block."""
MANTISSA, INFINITY = 0x7FFFFF, 0x7F800000
"""Of the bits of an fp32."""


class Arguments(NamedTuple):
    """What a launch is given, in this order, before the stream. Strides count elements."""

    x_address: Int64
    """(rows, k), or (rows, 2 k) where gated"""
    values_address: Int64
    """(rows, k)"""
    scales_address: Int64
    """(rows, blocks of k)"""
    rows: Int32
    k: Int32
    power_of_two: Int32
    """1: scales are rounded up to powers of two."""
    unused: Int32
    x_stride: Int64
    values_stride: Int64
    scales_row_stride: Int64
    scales_block_stride: Int64
    unused_a: Int64
    unused_b: Int64


class Gemm:
    """The kernel of one `QuantizeConfig`; `compile_object` calls the class so."""

    def __init__(self, config: QuantizeConfig):
        self.config = config
        self.dtype = DTYPES[config.dtype]
        self.smem_bytes = 0

    @cute.jit
    def __call__(self, *arguments):
        """Launch. arguments: those of `Arguments`; the stream."""
        given, stream = Arguments(*arguments[:-1]), arguments[-1]
        pairs = Int32((Uint32(given.k) + (2 * BLOCK - 1)) // Uint32(2 * BLOCK))
        units = pairs * Int32((Uint32(given.rows) + (ROWS - 1)) // Uint32(ROWS))
        self.kernel(
            (given.x_address, given.values_address, given.scales_address),
            (given.x_stride, given.values_stride, given.scales_row_stride, given.scales_block_stride),
            given.rows, given.k, given.power_of_two, pairs, units,
        ).launch(
            grid=(Int32((Uint32(units) + (WARPS - 1)) // Uint32(WARPS)), 1, 1),
            block=(WARPS * WARP, 1, 1),
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        addresses: tuple[Int64, Int64, Int64],
        strides: tuple[Int64, Int64, Int64, Int64],
        rows: Int32,
        k: Int32,
        power_of_two: Int32,
        pairs: Int32,
        units: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        unit = cute.arch.make_warp_uniform(cta * WARPS + thread // WARP)
        lane = thread % WARP
        if unit < units:
            # Neighbouring units lie side by side in the same rows.
            group = Int32(Uint32(unit) // Uint32(pairs))
            block = (unit - group * pairs) * 2 + lane // LANES
            self.quantize(addresses, strides, (rows, k), group * ROWS, block, lane % LANES, power_of_two)

    @cute.jit
    def quantize(self, addresses, strides, extents, first, block, lane, power_of_two):
        """One block of `ROWS` rows from the first on, by half a warp."""
        (x, values, scales), (rows, k), of_bytes = addresses, extents, self.dtype.width // 8
        column = block * BLOCK + lane * VECTOR
        source = x + Int64(cutlass.min(column, k - VECTOR)) * of_bytes
        found = []
        for index in cutlass.range_constexpr(ROWS):
            at = source + Int64(cutlass.min(first + index, rows - 1)) * strides[0] * of_bytes
            found.append([vector_at(self.dtype, at + Int64(part) * of_bytes) for part in self.parts(k)])
        own = cute.make_rmem_tensor(1, Float32)  # the scale of the row that this lane stores
        own[0] = Float32(0.0)
        place = values + Int64(first) * strides[1] + column, strides[1], column < k
        if first + ROWS <= rows:
            self.store(found, 0, place, own, lane, power_of_two)
        else:
            for index in cutlass.range_constexpr(ROWS - 1):
                if first + index < rows:
                    self.store(found[index : index + 1], index, place, own, lane, power_of_two)
        row = first + lane
        if lane < ROWS and row < rows and block * BLOCK < k:
            target = scales + (Int64(row) * strides[2] + Int64(block) * strides[3]) * 4
            tensor_at(Float32, target, 1, 4)[0] = own[0]

    @cute.jit
    def store(self, found, first: cutlass.Constexpr, place, own, lane, power_of_two):
        """Quantise rows from the thread's first on, together, and store what lies inside. found: their
        vectors. own: becomes the scale of the row of this lane's number."""
        numbers = [self.numbers_of(vectors) for vectors in found]
        scales = scales_of(numbers, power_of_two)
        for index in cutlass.range_constexpr(len(found)):
            if lane == first + index:
                own[0] = scales[index]
            inverse = ptx("rcp.rn.f32 {$w0}, {$r0};", scales[index])
            words = cute.make_rmem_tensor(VECTOR // 4, Int32)
            for word in cutlass.range_constexpr(VECTOR // 4):
                words[word] = fp8_of(*(each * inverse for each in numbers[index][4 * word : 4 * word + 4]))
            if place[2]:
                target = place[0] + (first + index) * place[1]
                cute.autovec_copy(words, tensor_at(Int32, target, VECTOR // 4, VECTOR))

    def parts(self, k):
        """Where vectors of a row begin, in elements from the thread's own column on."""
        return (0, k) if self.config.gated else (0,)

    def numbers_of(self, vectors):
        """What a row's vectors say, as fp32 values: themselves, or what the gate lets through.

        As torch has it, silu of the gate is rounded to the dtype, and so is the product.
        """
        found = [[vector[index].to(Float32) for index in range(VECTOR)] for vector in vectors]
        if not self.config.gated:
            return found[0]
        return [self.rounded(self.rounded(silu(gate)) * up) for gate, up in zip(*found, strict=True)]

    def rounded(self, number):
        """An fp32 value rounded to the input's dtype, as fp32."""
        return number.to(self.dtype).to(Float32)


def ptx(text, *given, dtype=Float32):
    """The result of PTX instructions on the given registers."""
    return cute.arch.inline_ptx(text, write_only_types=[dtype], read_only_args=list(given))


def tensor_at(dtype, address, count, aligned):
    """`count` neighbouring elements of global memory."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=aligned)
    return cute.make_tensor(pointer, cute.make_layout(count))


def vector_at(dtype, address):
    """A thread's values of a row, in registers."""
    vector = cute.make_rmem_tensor(VECTOR, dtype)
    cute.autovec_copy(tensor_at(dtype, address, VECTOR, 16), vector)
    return vector


def scales_of(rows, power_of_two):
    """The scales of blocks, of each of which this thread has such numbers. NaN where a block has a NaN."""
    largest = [Float32(EPSILON)] * len(rows)
    for index, numbers in enumerate(rows):
        for number in numbers:
            largest[index] = maximum(largest[index], ptx("abs.f32 {$w0}, {$r0};", number))
    for step in (8, 4, 2, 1):  # of all rows at once: none waits for the one before
        others = [cute.arch.shuffle_sync_bfly(each, offset=step) for each in largest]
        largest = [maximum(*pair) for pair in zip(largest, others, strict=True)]
    return [rounded_scale(each * Float32(1 / LARGEST), power_of_two) for each in largest]


@cute.jit
def rounded_scale(scale, power_of_two):
    """A scale as it is, or rounded up to a power of two."""
    bits = scale.bitcast(Int32)
    if power_of_two != 0 and bits < INFINITY:
        bits = (bits + MANTISSA) & ~MANTISSA
    return bits.bitcast(Float32)


def maximum(a, b):
    """The larger; NaN if one of both is."""
    return ptx("max.NaN.f32 {$w0}, {$r0}, {$r1};", a, b)


def silu(number):
    """number / (1 + exp(-number)), rounded as CUDA's expf and IEEE 754's division have it."""
    return ptx("div.rn.f32 {$w0}, {$r0}, {$r1};", number, Float32(1.0) + cute.math.exp(-number))


def fp8_of(first, second, third, fourth):
    """Four values as float8_e4m3fn in a word, the first in its lowest byte."""
    text = (
        "{ .reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2};\n"
        "mov.b32 {$w0}, {low, high}; }"
    )
    return ptx(text, first, second, third, fourth, dtype=Int32)
