"""The portable Triton kernel: pointers and masks, `tl.dot`, for one matrix product per batch entry.

Triton makes of it what an architecture has: cp.async and mma.sync from Ampere on, WGMMA on Hopper, tcgen05 on
Blackwell. Extents need no divisibility: a mask cuts what hangs over. The kernel is promised that addresses,
strides and the extents of lines are multiples of a vector, so that a copy takes a whole one: of A and B, and
of D.

A block takes work units until none is left: with as many blocks as units it takes one. With split-K, a
tile's k range is cut into equal splits, each a work unit of its own. A block leaves its partial sums in a
workspace; the last to arrive adds all of them, in the order of k, and stores: the result does not depend on
who was last, and nobody waits.

Extents, strides, raster order, swizzle size, split count and grid are arguments of the launch.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(work, tiles_m, tiles_n, along_m, swizzle):
    """(tile m, tile n) of a work unit: along the raster order's mode in groups `swizzle` tiles wide.

    The last group may be narrower, so no index is a phantom tile.
    """
    length = tl.where(along_m != 0, tiles_m, tiles_n)
    width = tl.where(along_m != 0, tiles_n, tiles_m)
    group = work // (length * swizzle)
    rest = work - group * length * swizzle
    columns = tl.minimum(width - group * swizzle, swizzle)
    step = rest // columns
    across = group * swizzle + rest - step * columns
    return tl.where(along_m != 0, step, across), tl.where(along_m != 0, across, step)


@triton.jit
def whole(number, vector: tl.constexpr):
    """The number, of which the compiler learns that `vector` divides it."""
    return number // vector * vector


@triton.jit
def piece(rows: tl.constexpr, columns: tl.constexpr):
    """Offsets of a subtile in the workspace, row after row."""
    return tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]


@triton.jit
def store(
    d, leading, row, column, m, n, values, rows: tl.constexpr, columns: tl.constexpr,
    contiguous: tl.constexpr, vector: tl.constexpr,
):  # fmt: skip
    """Store a subtile whose columns, if `contiguous`, else its rows are contiguous in memory."""
    leading = whole(leading, vector)
    down, across = tl.arange(0, rows), tl.arange(0, columns)
    if contiguous:
        left_m, left_n = m - row, whole(n, vector) - column
        d += row.to(tl.int64) * leading + column
        at = down[:, None] * leading.to(tl.int32) + across[None, :]
    else:
        left_m, left_n = whole(m, vector) - row, n - column
        d += column.to(tl.int64) * leading + row
        at = across[None, :] * leading.to(tl.int32) + down[:, None]
    inside = (down < left_m)[:, None] & (across < left_n)[None, :]
    tl.store(d + at, values.to(d.dtype.element_ty), mask=inside)


@triton.jit
def store_columns(
    d, leading, row, column, m, n, tile, epi_n: tl.constexpr, contiguous: tl.constexpr,
    vector: tl.constexpr,
):  # fmt: skip
    """Store a tile in subtiles of `epi_n` columns: one is rearranged in shared memory at a time."""
    rows: tl.constexpr = tile.shape[0]
    half: tl.constexpr = tile.shape[1] // 2
    if tile.shape[1] == epi_n:
        store(d, leading, row, column, m, n, tile, rows, epi_n, contiguous, vector)
    else:
        left, right = tile.reshape(rows, 2, half).permute(0, 2, 1).split()
        store_columns(d, leading, row, column, m, n, left, epi_n, contiguous, vector)
        store_columns(d, leading, row, column + half, m, n, right, epi_n, contiguous, vector)


@triton.jit
def keep_columns(slot, tile, first: tl.constexpr, epi_n: tl.constexpr):
    """Leave a tile's columns from `first` on in a slot of the workspace, a subtile at a time."""
    rows: tl.constexpr = tile.shape[0]
    half: tl.constexpr = tile.shape[1] // 2
    if tile.shape[1] == epi_n:
        tl.store(slot + first * rows + piece(rows, epi_n), tile)
    else:
        left, right = tile.reshape(rows, 2, half).permute(0, 2, 1).split()
        keep_columns(slot, left, first, epi_n)
        keep_columns(slot, right, first + half, epi_n)


@triton.jit
def gemm(
    a,
    b,
    d,
    m,
    n,
    k,
    batch,
    lda,
    ldb,
    ldd,
    a_step,
    b_step,
    d_step,
    k_tiles,
    along_m,
    swizzle,
    split_k,
    partials,
    counters,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    epi_n: tl.constexpr,
    vector: tl.constexpr,
    out_vector: tl.constexpr,
    a_contiguous: tl.constexpr,
    b_contiguous: tl.constexpr,
    d_contiguous: tl.constexpr,
    sums_dtype: tl.constexpr,
):
    """All work units of one block of D = A B. `k_tiles`: of one k split; `*_contiguous`: whether columns are;
    `vector`, `out_vector`: what of A and B, and of D, all lines and strides are multiples of, in elements."""
    tiles_m = tl.cdiv(m, tile_m)
    tiles_n = tl.cdiv(n, tile_n)
    per_entry = tiles_m * tiles_n
    tiles = per_entry * batch
    lda, ldb = whole(lda, vector), whole(ldb, vector)
    a_step, b_step = whole(a_step, vector), whole(b_step, vector)
    limit_m, limit_n, a_k, b_k = m, n, k, k
    if a_contiguous:
        a_k = whole(k, vector)
    else:
        limit_m = whole(m, vector)
    if b_contiguous:
        limit_n = whole(n, vector)
    else:
        b_k = whole(k, vector)
    for work in tl.range(tl.program_id(0), tiles * split_k, tl.num_programs(0), num_stages=1):
        part = work // tiles
        tile = work - part * tiles
        entry = tile // per_entry
        m_tile, n_tile = tile_of(tile - entry * per_entry, tiles_m, tiles_n, along_m, swizzle)
        row = m_tile * tile_m
        column = n_tile * tile_n
        steps = tl.arange(0, tile_k)
        first = part * k_tiles * tile_k
        # Within a tile 32 bits are enough: one address moves along k, and offsets stay what they are.
        a_here = a + entry.to(tl.int64) * a_step
        b_here = b + entry.to(tl.int64) * b_step
        if a_contiguous:
            a_here += row.to(tl.int64) * lda + first
            a_at = tl.arange(0, tile_m)[:, None] * lda.to(tl.int32) + steps[None, :]
            a_next = tl.cast(tile_k, tl.int64)
        else:
            a_here += first.to(tl.int64) * lda + row
            a_at = steps[None, :] * lda.to(tl.int32) + tl.arange(0, tile_m)[:, None]
            a_next = lda * tile_k
        if b_contiguous:
            b_here += first.to(tl.int64) * ldb + column
            b_at = steps[:, None] * ldb.to(tl.int32) + tl.arange(0, tile_n)[None, :]
            b_next = ldb * tile_k
        else:
            b_here += column.to(tl.int64) * ldb + first
            b_at = tl.arange(0, tile_n)[None, :] * ldb.to(tl.int32) + steps[:, None]
            b_next = tl.cast(tile_k, tl.int64)
        a_inside = (tl.arange(0, tile_m) < limit_m - row)[:, None]
        b_inside = (tl.arange(0, tile_n) < limit_n - column)[None, :]
        a_left, b_left = a_k - first, b_k - first
        sums = tl.zeros((tile_m, tile_n), dtype=sums_dtype)
        for _ in range(k_tiles):
            a_tile = tl.load(a_here + a_at, mask=a_inside & (steps < a_left)[None, :], other=0.0)
            b_tile = tl.load(b_here + b_at, mask=(steps < b_left)[:, None] & b_inside, other=0.0)
            sums = tl.dot(a_tile, b_tile, sums, input_precision="tf32", out_dtype=sums_dtype)
            a_here += a_next
            b_here += b_next
            a_left -= tile_k
            b_left -= tile_k
        d_here = d + entry.to(tl.int64) * whole(d_step, out_vector)
        if split_k == 1:
            store_columns(d_here, ldd, row, column, m, n, sums, epi_n, d_contiguous, out_vector)
        else:
            size: tl.constexpr = tile_m * tile_n
            keep_columns(partials + tl.cast(work, tl.int64) * size, sums, 0, epi_n)
            # The barrier orders the block's stores before one thread's release of them.
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
            if arrived == split_k - 1:
                tl.store(counters + tile, 0)
                for start in tl.range(0, tile_n, epi_n, num_stages=1):
                    total = tl.zeros((tile_m, epi_n), dtype=sums_dtype)
                    for other in tl.range(0, split_k, num_stages=1):
                        slot = partials + tl.cast(other * tiles + tile, tl.int64) * size + start * tile_m
                        # Not through L1, which may hold what this block read there before.
                        total += tl.load(slot + piece(tile_m, epi_n), cache_modifier=".cg")
                    store(
                        d_here, ldd, row, column + start, m, n, total, tile_m, epi_n, d_contiguous, out_vector
                    )  # fmt: skip
