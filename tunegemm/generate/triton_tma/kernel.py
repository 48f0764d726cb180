"""The Triton kernel: persistent, TMA loads and stores, WGMMA, for one matrix product per batch entry.

Three schedules of the same body: the main loop is pipelined tile by tile (`pipelined`), or fused with the
loop over tiles, so that the next tile's loads run under this one's epilogue (`flattened`), or the compiler
gives loads to a warp of their own (`warp_specialized`).

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
    if len(desc.block_shape) == 2:
        if contiguous:
            tile = desc.load([row, column])
        else:
            tile = desc.load([column, row]).T
    else:
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
    if len(desc.block_shape) == 2:
        desc.store([row, column], values)
    else:
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
def products(
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
    """All tiles of one block. `k_tiles` of one k split; `*_contiguous`: whether columns are in memory."""
    tiles_m = tl.cdiv(m, tile_m)
    tiles_n = tl.cdiv(n, tile_n)
    per_entry = tiles_m * tiles_n
    tiles = per_entry * batch
    total = tiles
    if schedule == "pipelined":
        total = tiles * split_k
    for work in tl.range(
        tl.program_id(0),
        total,
        tl.num_programs(0),
        flatten=schedule == "flattened",
        warp_specialize=schedule == "warp_specialized",
    ):
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
    """D = A B, with descriptors that the host encoded."""
    products(
        a_desc, b_desc, d_desc, m, n, batch, k_tiles, along_m, swizzle, split_k, partials, counters,
        tile_m, tile_n, tile_k, epi_n, a_contiguous, b_contiguous, d_contiguous, schedule,
    )  # fmt: skip


@triton.jit
def gemm_specialized(
    a,
    b,
    d,
    lda,
    ldb,
    ldd,
    m,
    n,
    k,
    k_tiles,
    along_m,
    swizzle,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    epi_n: tl.constexpr,
    a_contiguous: tl.constexpr,
    b_contiguous: tl.constexpr,
    d_contiguous: tl.constexpr,
    schedule: tl.constexpr,
):
    """D = A B without a batch, with descriptors that each block makes for itself.

    The compiler gives each consumer warpgroup half a tile and cuts the descriptors to fit. It cannot cut
    those that the host encoded, nor those with a third mode.
    """
    a_desc = descriptor(a, m, k, lda, tile_m, tile_k, a_contiguous)
    b_desc = descriptor(b, k, n, ldb, tile_k, tile_n, b_contiguous)
    d_desc = descriptor(d, m, n, ldd, tile_m, epi_n, d_contiguous)
    products(
        a_desc, b_desc, d_desc, m, n, 1, k_tiles, along_m, swizzle, 1, None, None,
        tile_m, tile_n, tile_k, epi_n, a_contiguous, b_contiguous, d_contiguous, schedule,
    )  # fmt: skip


@triton.jit
def descriptor(
    address,
    rows,
    columns,
    leading,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    contiguous: tl.constexpr,
):
    """Of a matrix whose columns, if `contiguous`, else its rows are contiguous in memory."""
    if contiguous:
        desc = tl.make_tensor_descriptor(address, [rows, columns], [leading, 1], [tile_rows, tile_columns])
    else:
        desc = tl.make_tensor_descriptor(address, [columns, rows], [leading, 1], [tile_columns, tile_rows])
    return desc
