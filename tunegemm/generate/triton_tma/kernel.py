"""The Triton kernel: persistent, TMA loads and stores, WGMMA, for one matrix product per batch entry.

Two schedules of the same body: the main loop is pipelined tile by tile (`pipelined`), or fused with the loop
over tiles, so that the next tile's loads run under this one's epilogue (`flattened`).

With split-K, a tile's k range is cut into equal splits, each a work unit of its own. A block leaves its
partial sums in a workspace; the last to arrive adds all of them, in the order of k, and stores: the result
does not depend on who was last, and nobody waits.

Extents, raster order, swizzle size, split count and grid are arguments of the launch.
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
    band = work // (length * swizzle)
    rest = work - band * length * swizzle
    columns = tl.minimum(width - band * swizzle, swizzle)
    step = rest // columns
    across = band * swizzle + rest - step * columns
    return tl.where(along_m != 0, step, across), tl.where(along_m != 0, across, step)


@triton.jit
def load(desc, entry, row, column, rows: tl.constexpr, columns: tl.constexpr, contiguous: tl.constexpr):
    """A (rows, columns) tile whose columns, if `contiguous`, else its rows are contiguous in memory."""
    if contiguous:
        tile = desc.load([entry, row, column]).reshape(rows, columns)
    else:
        tile = desc.load([entry, column, row]).reshape(columns, rows).T
    return tile


@triton.jit
def store(desc, entry, row, column, tile, contiguous: tl.constexpr):
    """The inverse of `load`."""
    values = tile.to(desc.dtype)
    if not contiguous:
        values = values.T
        row, column = column, row
    desc.store([entry, row, column], values.reshape(1, values.shape[0], values.shape[1]))


@triton.jit
def store_columns(desc, entry, row, column, tile, epi_n: tl.constexpr, contiguous: tl.constexpr):
    """Store a tile in subtiles of `epi_n` columns: one is staged in shared memory at a time."""
    rows: tl.constexpr = tile.shape[0]
    half: tl.constexpr = tile.shape[1] // 2
    if tile.shape[1] == epi_n:
        store(desc, entry, row, column, tile, contiguous)
    else:
        left, right = tile.reshape(rows, 2, half).permute(0, 2, 1).split()
        store_columns(desc, entry, row, column, left, epi_n, contiguous)
        store_columns(desc, entry, row, column + half, right, epi_n, contiguous)


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
def piece(rows: tl.constexpr, columns: tl.constexpr):
    """Offsets of a subtile in the workspace, row after row."""
    return tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]


@triton.jit
def gemm(
    a_desc,
    b_desc,
    d_desc,
    m,
    n,
    batch,
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
    a_contiguous: tl.constexpr,
    b_contiguous: tl.constexpr,
    d_contiguous: tl.constexpr,
    schedule: tl.constexpr,
):
    """All tiles of one block of D = A B. `k_tiles`: of one k split; `*_contiguous`: whether columns are."""
    tiles_m = tl.cdiv(m, tile_m)
    tiles_n = tl.cdiv(n, tile_n)
    per_entry = tiles_m * tiles_n
    tiles = per_entry * batch
    total = tiles
    if schedule == "pipelined":
        total = tiles * split_k
    for work in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=schedule == "flattened"):
        tile = work
        part = 0
        if schedule == "pipelined":
            part = work // tiles
            tile = work - part * tiles
        entry = tile // per_entry
        m_tile, n_tile = tile_of(tile - entry * per_entry, tiles_m, tiles_n, along_m, swizzle)
        row = m_tile * tile_m
        column = n_tile * tile_n
        first = part * k_tiles * tile_k
        sums = tl.zeros((tile_m, tile_n), dtype=tl.float32)
        for step in range(k_tiles):
            a = load(a_desc, entry, row, first + step * tile_k, tile_m, tile_k, a_contiguous)
            b = load(b_desc, entry, first + step * tile_k, column, tile_k, tile_n, b_contiguous)
            sums = tl.dot(a, b, sums)
        if schedule == "pipelined":
            if split_k == 1:
                store_columns(d_desc, entry, row, column, sums, epi_n, d_contiguous)
            else:
                size: tl.constexpr = tile_m * tile_n
                keep_columns(partials + work.to(tl.int64) * size, sums, 0, epi_n)
                # The barrier orders the block's stores before one thread's release of them.
                tl.debug_barrier()
                arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu")
                if arrived == split_k - 1:
                    tl.store(counters + tile, 0)
                    for start in tl.range(0, tile_n, epi_n, num_stages=1):
                        whole = tl.zeros((tile_m, epi_n), dtype=tl.float32)
                        for other in tl.range(0, split_k, num_stages=1):
                            slot = partials + (other * tiles + tile).to(tl.int64) * size + start * tile_m
                            # Not through L1, which may hold what this block read there before.
                            whole += tl.load(slot + piece(tile_m, epi_n), cache_modifier=".cg")
                        store(d_desc, entry, row, column + start, whole, d_contiguous)
        else:
            store_columns(d_desc, entry, row, column, sums, epi_n, d_contiguous)
