"""How the Ampere kernel copies an operand into the ring: `Feed`, one thread's part of it.

Where lines start at odd elements (`vector_bytes` 2, as for K = 1001) no instruction copies asynchronously
what is wanted: cp.async wants words. The words that *cover* a line are copied instead, one more than a line
has, and the warp that copied a line shifts it by one element in place before the barrier publishes it:
a word, its neighbour from the next lane, one byte permutation. The ring stays asynchronous and as deep as
for aligned operands, and lines at even elements need no shift.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from tunegemm.generate.cute_sm80.config import WARP, WORD_BYTES

# Selectors of prmt.b32 for the word at an even element, and for the one that starts a half-word later.
EVEN, ODD = 0x3210, 0x5432
# Lines whose words are on their way at a time while lines are shifted.
SHIFTED_LINES = 4


class Feed:
    """Copies of one operand, from the side of one thread: see `config.Copy` for who copies what."""

    def __init__(self, config, operand, element_bytes, ring, spare, thread):
        """ring, spare: addresses in shared memory of the operand's tiles and of its lines' spare words."""
        self.config = config
        self.copy = copy = config.copy(operand)
        if objection := copy.objection(config.smem_swizzle):
            raise ValueError(f"operand {operand}: {objection}")
        self.k_major = (config.a_major if operand == "a" else config.b_major) == "k"
        self.bytes = element_bytes
        self.stage_bytes = copy.lines * copy.extent * element_bytes
        self.lane = thread % WARP
        self.line = thread // WARP * copy.lines_per_warp
        self.sub = self.lane // copy.lanes
        self.element = self.lane % copy.lanes * copy.vector
        self.first = self.line + self.sub
        # The swizzle is linear, and the bits of a warp's first line, a pass and a lane's line are apart:
        # a thread XORs its own bits once and a pass's constant ones each time.
        chunk = self.element % copy.block ^ self._swizzle(self.line) ^ self._swizzle(self.sub)
        block = self.element // copy.block * (copy.lines * copy.block)
        self.chunk = chunk * element_bytes
        self.base = ring + (block + self.first * copy.block) * element_bytes
        self.spare = spare

    # What changes from thread to thread; the DSL carries it through dynamic control flow.
    _STATE = ("lane", "line", "sub", "element", "first", "chunk", "base", "spare")

    def __extract_mlir_values__(self):
        return [getattr(self, name).ir_value() for name in self._STATE]

    def __new_from_mlir_values__(self, values):
        new = object.__new__(Feed)
        new.__dict__ = self.__dict__ | {
            name: Int32(value) for name, value in zip(self._STATE, values, strict=True)
        }
        return new

    def _swizzle(self, line):
        """What a line's elements are XORed with: bits 6.. of the offset onto bits 3.. (in elements)."""
        bits = line if self.copy.block == 64 else line // 2
        return (bits & ((1 << self.config.smem_swizzle) - 1)) << 3

    def _address(self, tile, chunk, index, piece):
        """Where a vector of the tile at `tile` in shared memory goes; `chunk` is this thread's."""
        copy = self.copy
        passed = index * copy.lines_per_pass
        blocks = piece * (copy.lanes * copy.vector) // copy.block
        added = (passed + blocks * copy.lines) * copy.block * self.bytes
        return tile + added + (chunk ^ (self._swizzle(passed) * self.bytes))

    def start(self, address, batch_stride, entry, leading, outer, first_k):
        """Address in bytes of the tile's first element."""
        offset = Int64(outer) * leading + first_k if self.k_major else Int64(first_k) * leading + outer
        return address + (Int64(entry) * batch_stride + offset) * self.bytes

    def step(self, leading):
        """Bytes from a tile to the next one along k."""
        tile_k = self.config.tile_k
        return Int64(tile_k * self.bytes) if self.k_major else leading * (tile_k * self.bytes)

    def odd(self, place, leading, line):
        """1 when a line of the tile at `place` starts at an odd element, else 0."""
        return (Int32(place >> 1) + line * Int32(leading)) & 1

    def load_part(self, place, leading, slot, exists, part, parts):
        """One of so many parts of the copies of a tile that lies inside the extents, if it `exists`."""
        copy = self.copy
        first, last = part * copy.passes // parts, (part + 1) * copy.passes // parts
        target = self.base + slot * self.stage_bytes
        step = leading * (copy.lines_per_pass * self.bytes)
        source = place + (Int64(self.first) * leading + self.element) * self.bytes + step * first
        for index in range(first, last):
            for piece in range(copy.pieces):
                start = source + piece * copy.lanes * copy.vector * self.bytes
                copy_async(
                    self._address(target, self.chunk, index, piece),
                    start & ~3 if self.config.shifts else start,
                    copy.vector * self.bytes,
                    exists=exists,
                )
            source += step
        if self.config.shifts and part == 0:
            # A shifted line has one word more. Each lane brings those of other lines.
            for index in range((copy.lines_per_warp + WARP - 1) // WARP):
                own = index * WARP + self.lane
                line = self.line + own
                own_exists = exists
                if (index + 1) * WARP > copy.lines_per_warp:
                    own_exists = (own < copy.lines_per_warp) & exists
                copy_async(
                    self.spare + (slot * copy.lines + line) * WORD_BYTES,
                    (place + (Int64(line) * leading + (copy.extent - 1)) * self.bytes) & ~3,
                    WORD_BYTES,
                    exists=own_exists,
                )

    @cute.jit
    def load(self, place, leading, outer_left, k_left, slot):
        """Start copying the tile at `place` into a slot; elements beyond the extents become zeros."""
        copy = self.copy
        lines_left, elements_left = (outer_left, k_left) if const_expr(self.k_major) else (k_left, outer_left)
        line, chunk, leading = opaque(self.first), opaque(self.chunk), opaque(leading)
        target = self.base + slot * self.stage_bytes
        source = place + (Int64(line) * leading + self.element) * self.bytes
        lines = copy.group * copy.lines_per_pass
        for group in cutlass.range(copy.passes // copy.group, unroll=1):
            self.load_lines(
                target, source, line, chunk ^ (self._swizzle(group * lines) * self.bytes), place, leading,
                lines_left, elements_left,
            )  # fmt: skip
            target += lines * copy.block * self.bytes
            source += leading * (lines * self.bytes)
            line += lines
        if const_expr(self.config.shifts):
            # A shifted line has one word more. Each lane brings those of other lines.
            for index in cutlass.range_constexpr((copy.lines_per_warp + WARP - 1) // WARP):
                own = index * WARP + self.lane
                line = self.line + own
                if own < copy.lines_per_warp and self.odd(place, leading, line) == 1:
                    size = cutlass.min(cutlass.max(elements_left - (copy.extent - 1), 0), 2) * self.bytes
                    if line >= lines_left:
                        size = Int32(0)
                    copy_async(
                        self.spare + (slot * copy.lines + line) * WORD_BYTES,
                        place + (Int64(line) * leading + (copy.extent - 1)) * self.bytes,
                        WORD_BYTES,
                        size,
                    )

    @cute.jit
    def load_lines(
        self, target, source, line, chunk, place, leading, lines_left, elements_left
    ):  # fmt: skip
        """One group of passes over this warp's lines, from `line` on."""
        copy = self.copy
        for index in cutlass.range_constexpr(copy.group):
            passed = index * copy.lines_per_pass
            odd = Int32(0)
            if const_expr(self.config.shifts):
                odd = self.odd(place, leading, line + passed)
            for piece in cutlass.range_constexpr(copy.pieces):
                ahead = piece * copy.lanes * copy.vector
                left = elements_left - self.element - ahead + odd
                size = cutlass.min(cutlass.max(left, 0), copy.vector) * self.bytes
                if line + passed >= lines_left:
                    size = Int32(0)
                copy_async(
                    self._address(target, chunk, index, piece),
                    source + ahead * self.bytes - Int64(odd * self.bytes),
                    copy.vector * self.bytes,
                    size,
                )
            source += leading * (copy.lines_per_pass * self.bytes)

    @cute.jit
    def shift(self, place, leading, slot):
        """Move the odd lines of this warp one element to the front, in place.

        Tiles lie an even number of elements apart, so that `place` may be that of any tile of the block.
        """
        copy = self.copy
        line, chunk, leading = opaque(self.first), opaque(self.chunk), opaque(leading)
        target = self.base + slot * self.stage_bytes
        spare = self.spare + (slot * copy.lines + line) * WORD_BYTES
        lines = copy.group * copy.lines_per_pass
        for group in cutlass.range(copy.passes // copy.group, unroll=1):
            swizzled = chunk ^ (self._swizzle(group * lines) * self.bytes)
            for index in cutlass.range_constexpr(copy.group):
                passed = index * copy.lines_per_pass
                odd = self.odd(place, leading, line + passed)
                if const_expr(copy.lines_per_pass > 1):
                    self.shift_line(target, swizzled, spare + passed * WORD_BYTES, odd, index)
                elif odd == 1:  # the whole warp has this line: where it is even, nothing is to be done
                    self.shift_line(target, swizzled, spare + passed * WORD_BYTES, odd, index)
            target += lines * copy.block * self.bytes
            spare += lines * WORD_BYTES
            line += lines

    @cute.jit
    def shift_even(self, place, leading, slot):
        """The shift of lines that all start at odd elements, which `shift_part` leaves to it."""
        if const_expr(self.copy.lines_per_pass == 1):
            if Int32(leading) & 1 == 0 and self.odd(place, leading, self.line) == 1:
                self.shift(place, leading, slot)

    def shift_part(self, place, leading, slot, part, parts):
        """One of so many parts of a tile's shift, without branches, to go among products.

        Where a pass is one line and lines lie an odd number of elements apart, every second one is shifted.
        """
        copy = self.copy
        one = copy.lines_per_pass == 1
        passes = copy.passes // 2 if one else copy.passes
        target = self.base + slot * self.stage_bytes
        spare = self.spare + (slot * copy.lines + self.first) * WORD_BYTES
        chunk = self.chunk
        if one:
            skipped = 1 - self.odd(place, leading, self.line)
            target += skipped * (copy.block * self.bytes)
            spare += skipped * WORD_BYTES
            chunk = chunk ^ (self._swizzle(skipped) * self.bytes)
            selector = EVEN + (Int32(leading) & 1) * (ODD - EVEN)
        lanes = copy.lanes
        next_lane = (self.lane & ~(lanes - 1)) | ((self.lane + 1) & (lanes - 1))
        first, last = part * passes // parts, (part + 1) * passes // parts
        for start in range(first, last, SHIFTED_LINES):
            held = []
            indices = [index * (2 if one else 1) for index in range(start, min(start + SHIFTED_LINES, last))]
            for index in indices:
                words = [word_at(self._address(target, chunk, index, piece)) for piece in range(copy.pieces)]
                more = word_at(spare + index * copy.lines_per_pass * WORD_BYTES)
                held.append((words, [word[0] for word in words] + [more[0]]))
            for index, (words, values) in zip(indices, held, strict=True):
                if not one:
                    odd = self.odd(place, leading, self.first + index * copy.lines_per_pass)
                    selector = EVEN + odd * (ODD - EVEN)
                for piece in range(copy.pieces):
                    given = select(self.lane & (lanes - 1), values[piece], values[piece + 1])
                    neighbour = cute.arch.shuffle_sync(given, next_lane)
                    words[piece][0] = Int32(cute.arch.prmt(values[piece], neighbour, selector))

    @cute.jit
    def shift_line(self, target, chunk, spare, odd, index: cutlass.Constexpr):
        """One line, or the lines of one pass: each lane replaces its own words.

        What a lane needs of the next word comes by shuffle, so nobody reads what another writes. The first
        lane's word is no lane's neighbour: it hands on the first word of the next piece, or the spare one.
        """
        copy = self.copy
        lanes = copy.lanes
        next_lane = (self.lane & ~(lanes - 1)) | ((self.lane + 1) & (lanes - 1))
        words = [word_at(self._address(target, chunk, index, piece)) for piece in range(copy.pieces)]
        held = [word[0] for word in words] + [word_at(spare)[0]]
        selector = EVEN + odd * (ODD - EVEN)
        for piece in cutlass.range_constexpr(copy.pieces):
            given = held[piece]
            if self.lane % lanes == 0:
                given = held[piece + 1]
            neighbour = cute.arch.shuffle_sync(given, next_lane)
            words[piece][0] = Int32(cute.arch.prmt(held[piece], neighbour, selector))


def opaque(value):
    """The same value, of which the compiler does not know that: what follows from it stays in its loop.

    Addresses and predicates of some thirty copies would otherwise be held in registers throughout.
    """
    kind = type(value)
    return cute.arch.inline_ptx(
        f"mov.b{kind.width} {{$w0}}, {{$r0}};", write_only_types=[kind], read_only_args=[value]
    )


def select(condition, one, other):
    """`one` where the condition is not 0, else `other`, without a branch."""
    return cute.arch.inline_ptx(
        "{\n.reg .pred p;\nsetp.ne.s32 p, {$r0}, 0;\nselp.b32 {$w0}, {$r1}, {$r2}, p;\n}",
        write_only_types=[Int32],
        read_only_args=[condition, one, other],
    )


def word_at(address):
    """The word at an address in shared memory, as a tensor."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))


def copy_async(target, source, vector_bytes, size=None, exists=True):
    """cp.async of `vector_bytes` to shared memory, if it `exists`; the first `size` are read, the rest zeros.

    16 bytes bypass the L1 (.cg); smaller ones cannot.
    """
    cache = "cg" if vector_bytes == 16 else "ca"
    limit = "" if size is None else ", {$r2}"
    cute.arch.inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {vector_bytes}{limit};",
        read_only_args=[target, source] if size is None else [target, source, size],
        predicate=None if exists is True else exists,
    )
