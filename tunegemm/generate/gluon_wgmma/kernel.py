"""The Gluon kernel bodies: TMA + WGMMA on Hopper, from one blocking loop to persistent warp specialization.

`blocking`, `pipelined` and `multistage` compute one tile per block; all warps load, multiply and store.
`cooperative` and `pingpong` are persistent: one warp issues the loads of all tiles into a ring; the consumer
warpgroups, a partition each, multiply and store. Barriers, all mbarriers:

    full[s]    1 arrival and the bytes of a stage      loads -> the warps that multiply
    empty[s]   one arrival of each partition that      consumers -> producer
               shares the tile
    turn[g]    pingpong only: partition g may issue    the other partition -> g
               its main loop

Operands are (batch, rows, columns) tensor maps with the contiguous mode last. Where WGMMA wants the other
order of modes, it gets a permuted view of the tile in shared memory. Extents are in the tensor maps: beyond
them TMA loads zeros and stores nothing. Counts of tiles, raster order, swizzle size, grid are arguments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tunegemm.generate.gluon_wgmma.config import PRODUCER_REGISTERS
from tunegemm.generate.gluon_wgmma.kernel_compat import tma_load, tma_store

FIRST = gl.constexpr(0)
SECOND = gl.constexpr(1)
PRODUCER = gl.constexpr(PRODUCER_REGISTERS)


@gluon.jit
def gemm(
    a_desc,
    b_desc,
    d_desc,
    k_tiles,
    tiles_m,
    tiles_n,
    batch,
    raster_along_m,
    swizzle_size,
    CONFIG: gl.constexpr,
):
    """D = A B for one `KernelConfig`. The entry."""
    walk = (k_tiles, tiles_m, tiles_n, batch, raster_along_m, swizzle_size)
    STAGES: gl.constexpr = CONFIG.value.stages
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_shape[1:], flat(a_desc.layout))
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape[1:], flat(b_desc.layout))
    BARRIERS: gl.constexpr = CONFIG.value.full_barriers
    full = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for barrier in gl.static_range(BARRIERS):
        mbarrier.init(full.index(barrier), count=1)
    if CONFIG.value.specialized:
        persistent(a_desc, b_desc, d_desc, a_ring, b_ring, full, walk, CONFIG)
    else:
        one_tile(a_desc, b_desc, d_desc, a_ring, b_ring, full, walk, CONFIG)


# ---- device functions ---------------------------------------------------------------------------------


@gluon.constexpr_function
def flat(layout):
    """The layout of one batch entry's tile, for the layout of a tensor map with the batch in front."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, rank=2)


@gluon.constexpr_function
def accumulator_layout(config, dtype):
    along_m, along_n = config.warps_per_tile
    return gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[along_m, along_n],
        instr_shape=[16, config.mma_columns, 256 // dtype.primitive_bitwidth],
    )


@gluon.constexpr_function
def lhs_layout(config, dtype):
    return gl.DotOperandLayout(
        operand_index=0, parent=accumulator_layout(config, dtype), k_width=32 // dtype.primitive_bitwidth
    )


@gluon.jit
def tile_of(work, walk):
    """(tile m, tile n, batch entry) for a work index.

    Batch entries are outermost. The rasterization of one goes along the raster order's mode in groups
    `swizzle_size` tiles wide; the last may be narrower, so no index is a phantom tile.
    """
    k_tiles, tiles_m, tiles_n, batch, raster_along_m, swizzle_size = walk
    length = tiles_n
    width = tiles_m
    if raster_along_m != 0:
        length = tiles_m
        width = tiles_n
    entry = work // (tiles_m * tiles_n)
    rest = work - entry * (tiles_m * tiles_n)
    band = rest // (length * swizzle_size)
    rest -= band * length * swizzle_size
    first = band * swizzle_size
    columns = gl.minimum(width - first, swizzle_size)
    step = rest // columns
    across = first + rest - step * columns
    tile_m = across
    tile_n = step
    if raster_along_m != 0:
        tile_m = step
        tile_n = across
    return tile_m, tile_n, entry


@gluon.jit
def load(a_desc, b_desc, a, b, bar, tile, k_tile, CONFIG: gl.constexpr):
    """Load one stage; `bar` completes when its bytes are there."""
    tile_m, tile_n, entry = tile
    row = tile_m * CONFIG.value.tile_m
    column = tile_n * CONFIG.value.tile_n
    k = k_tile * CONFIG.value.tile_k
    mbarrier.expect(bar, CONFIG.value.stage_bytes)
    if CONFIG.value.a_major == "k":
        tma_load(a_desc, [entry, row, k], bar, a)
    else:
        tma_load(a_desc, [entry, k, row], bar, a)
    if CONFIG.value.b_major == "k":
        tma_load(b_desc, [entry, column, k], bar, b)
    else:
        tma_load(b_desc, [entry, k, column], bar, b)


@gluon.jit
def fresh_accumulators(dtype: gl.constexpr, CONFIG: gl.constexpr):
    ROWS: gl.constexpr = CONFIG.value.group_rows
    COLUMNS: gl.constexpr = CONFIG.value.tile_n
    return gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(CONFIG, dtype))


@gluon.jit
def multiply(a, b, accumulators, first, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """Issue the WGMMAs of one stage; the `first` of a tile overwrites the accumulators."""
    if CONFIG.value.a_major == "m":
        a = a.permute((1, 0))
    if CONFIG.value.b_major == "k":
        b = b.permute((1, 0))
    ROWS: gl.constexpr = CONFIG.value.group_rows
    if CONFIG.value.tile_groups > 1:
        a = a.slice(GROUP * ROWS, ROWS, 0)
    if CONFIG.value.lhs_in_registers:
        a = a.load(lhs_layout(CONFIG, a.dtype))
    return warpgroup_mma(a, b, accumulators, use_acc=not first, is_async=True)


@gluon.jit
def pieces(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The tile in subtiles of that size, in the order of its rows, then columns. No data moves.

    A warpgroup's tile is 64 rows after 64 rows, so that the halves of a split are other registers of the same
    threads.
    """
    parts = (tile,)
    for _ in gl.static_range((tile.shape[0] // ROWS).bit_length() - 1):
        halves = ()
        for i in gl.static_range(len(parts)):
            part = parts[i]
            halves += part.reshape(2, part.shape[0] // 2, part.shape[1]).permute(1, 2, 0).split()
        parts = halves
    for _ in gl.static_range((tile.shape[1] // COLUMNS).bit_length() - 1):
        halves = ()
        for i in gl.static_range(len(parts)):
            part = parts[i]
            halves += part.reshape(part.shape[0], 2, part.shape[1] // 2).permute(0, 2, 1).split()
        parts = halves
    return parts


@gluon.jit
def store(d_desc, accumulators, staging, tile, GROUP: gl.constexpr, CONFIG: gl.constexpr):
    """Convert and store one partition's rows by subtiles: TMA reads one buffer while the next is filled.

    Stores may be under way on return; their staging buffers are awaited before they are written again.
    """
    tile_m, tile_n, entry = tile
    ROWS: gl.constexpr = CONFIG.value.epilogue_rows
    COLUMNS: gl.constexpr = CONFIG.value.epilogue_columns
    ACROSS: gl.constexpr = CONFIG.value.tile_n // COLUMNS
    BUFFERS: gl.constexpr = CONFIG.value.epilogue_buffers
    row = tile_m * CONFIG.value.tile_m
    if CONFIG.value.tile_groups > 1:
        row += GROUP * CONFIG.value.group_rows
    column = tile_n * CONFIG.value.tile_n
    parts = pieces(accumulators, ROWS, COLUMNS)
    for i in gl.static_range(len(parts)):
        buffer = staging.index(GROUP * BUFFERS + i % BUFFERS)
        part_row = row + i // ACROSS * ROWS
        part_column = column + i % ACROSS * COLUMNS
        tma.store_wait(BUFFERS - 1)
        if CONFIG.value.out_major == "n":
            buffer.store(parts[i].to(d_desc.dtype))
            fence_async_shared()
            tma_store(d_desc, [entry, part_row, part_column], buffer)
        else:
            buffer.permute((1, 0)).store(parts[i].to(d_desc.dtype))
            fence_async_shared()
            tma_store(d_desc, [entry, part_column, part_row], buffer)


@gluon.jit
def allocate_staging(d_desc, CONFIG: gl.constexpr):
    return gl.allocate_shared_memory(
        d_desc.dtype,
        [CONFIG.value.groups * CONFIG.value.epilogue_buffers] + d_desc.block_shape[1:],
        flat(d_desc.layout),
    )


# ---- one tile per block -------------------------------------------------------------------------------


@gluon.jit
def one_tile(a_desc, b_desc, d_desc, a_ring, b_ring, full, walk, CONFIG: gl.constexpr):
    """All warps load, multiply and store. The staging buffer takes the place of the ring, now idle."""
    BARRIERS: gl.constexpr = CONFIG.value.full_barriers
    # TMA counts its bytes on the barriers through the async proxy, which has to see that they are made.
    fence_async_shared()
    tile = tile_of(gl.program_id(0), walk)
    accumulators = fresh_accumulators(a_desc.dtype, CONFIG)
    if CONFIG.value.schedule == "blocking":
        accumulators = blocking(a_desc, b_desc, a_ring, b_ring, full, accumulators, tile, walk[0], CONFIG)
    elif CONFIG.value.schedule == "pipelined":
        accumulators = pipelined(a_desc, b_desc, a_ring, b_ring, full, accumulators, tile, walk[0], CONFIG)
    else:
        accumulators = multistage(a_desc, b_desc, a_ring, b_ring, full, accumulators, tile, walk[0], CONFIG)
    for barrier in gl.static_range(BARRIERS):
        mbarrier.invalidate(full.index(barrier))
    store(d_desc, accumulators, allocate_staging(d_desc, CONFIG), tile, 0, CONFIG)
    tma.store_wait(0)


@gluon.jit
def blocking(a_desc, b_desc, a_ring, b_ring, full, accumulators, tile, k_tiles, CONFIG: gl.constexpr):
    """Nothing overlaps within the block; a second one on the multiprocessor fills the gaps."""
    a = a_ring.index(0)
    b = b_ring.index(0)
    for k_tile in range(k_tiles):
        load(a_desc, b_desc, a, b, full.index(0), tile, k_tile, CONFIG)
        mbarrier.wait(full.index(0), k_tile & 1)
        accumulators = multiply(a, b, accumulators, False, 0, CONFIG)
        accumulators = warpgroup_mma_wait(0, deps=(accumulators,))
    return accumulators


@gluon.jit
def pipelined(a_desc, b_desc, a_ring, b_ring, full, accumulators, tile, k_tiles, CONFIG: gl.constexpr):
    """The tensor cores work on one buffer while the other is loaded."""
    load(a_desc, b_desc, a_ring.index(0), b_ring.index(0), full.index(0), tile, 0, CONFIG)
    mbarrier.wait(full.index(0), 0)
    accumulators = multiply(a_ring.index(0), b_ring.index(0), accumulators, True, 0, CONFIG)
    for k_tile in range(1, k_tiles):
        buffer = k_tile & 1
        load(a_desc, b_desc, a_ring.index(buffer), b_ring.index(buffer), full.index(0), tile, k_tile, CONFIG)
        mbarrier.wait(full.index(0), buffer)
        accumulators = warpgroup_mma_wait(0, deps=(accumulators,))
        accumulators = multiply(a_ring.index(buffer), b_ring.index(buffer), accumulators, False, 0, CONFIG)
    return warpgroup_mma_wait(0, deps=(accumulators,))


@gluon.jit
def multistage(a_desc, b_desc, a_ring, b_ring, full, accumulators, tile, k_tiles, CONFIG: gl.constexpr):
    """Loads fill the ring ahead of the tensor cores, which have a WGMMA group while the next is prepared."""
    STAGES: gl.constexpr = CONFIG.value.stages
    IN_FLIGHT: gl.constexpr = CONFIG.value.groups_in_flight
    for i in gl.static_range(STAGES):
        if i < k_tiles:
            load(a_desc, b_desc, a_ring.index(i), b_ring.index(i), full.index(i), tile, i, CONFIG)
    stage = 0
    phase = 0
    mbarrier.wait(full.index(0), 0)
    accumulators = multiply(a_ring.index(0), b_ring.index(0), accumulators, True, 0, CONFIG)
    accumulators = warpgroup_mma_wait(IN_FLIGHT, deps=(accumulators,))
    for k_tile in range(1, k_tiles):
        free = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        mbarrier.wait(full.index(stage), phase)
        accumulators = multiply(a_ring.index(stage), b_ring.index(stage), accumulators, False, 0, CONFIG)
        accumulators = warpgroup_mma_wait(IN_FLIGHT, deps=(accumulators,))
        # At most this stage's WGMMA group is under way: the stage before it is free.
        ahead = k_tile - 1 + STAGES
        if ahead < k_tiles:
            load(
                a_desc, b_desc, a_ring.index(free), b_ring.index(free), full.index(free), tile, ahead, CONFIG
            )
    return warpgroup_mma_wait(0, deps=(accumulators,))


# ---- persistent and warp-specialized ------------------------------------------------------------------


@gluon.jit
def persistent(a_desc, b_desc, d_desc, a_ring, b_ring, full, walk, CONFIG: gl.constexpr):
    """Fork into consumer warpgroups and a producer warp; setmaxnreg moves registers to the consumers."""
    STAGES: gl.constexpr = CONFIG.value.stages
    staging = allocate_staging(d_desc, CONFIG)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(empty.index(stage), count=CONFIG.value.tile_groups)
    if CONFIG.value.schedule == "pingpong":
        turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(turn.index(0), count=1)
        mbarrier.init(turn.index(1), count=1)
    else:
        turn = empty  # not used
    # TMA and WGMMA see shared memory through the async proxy.
    fence_async_shared()
    if CONFIG.value.groups == 1:
        gl.warp_specialize(
            [
                (consume, (d_desc, a_ring, b_ring, staging, full, empty, turn, walk, FIRST, CONFIG)),
                (produce, (a_desc, b_desc, a_ring, b_ring, full, empty, walk, CONFIG)),
            ],
            [1],
            [PRODUCER],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (d_desc, a_ring, b_ring, staging, full, empty, turn, walk, FIRST, CONFIG)),
                (consume, (d_desc, a_ring, b_ring, staging, full, empty, turn, walk, SECOND, CONFIG)),
                (produce, (a_desc, b_desc, a_ring, b_ring, full, empty, walk, CONFIG)),
            ],
            [4, 1],
            [CONFIG.value.mma_registers, PRODUCER],
        )


@gluon.jit
def produce(a_desc, b_desc, a_ring, b_ring, full, empty, walk, CONFIG: gl.constexpr):
    """One warp: fill the ring, tile after tile."""
    k_tiles, tiles_m, tiles_n, batch, raster_along_m, swizzle_size = walk
    stage = 0
    phase = 1  # of a fresh barrier the previous phase counts as done: the ring starts empty
    for work in range(gl.program_id(0), tiles_m * tiles_n * batch, gl.num_programs(0)):
        tile = tile_of(work, walk)
        for k_tile in range(k_tiles):
            mbarrier.wait(empty.index(stage), phase)
            load(
                a_desc,
                b_desc,
                a_ring.index(stage),
                b_ring.index(stage),
                full.index(stage),
                tile,
                k_tile,
                CONFIG,
            )
            stage += 1
            if stage == CONFIG.value.stages:
                stage = 0
                phase ^= 1


@gluon.jit
def consume(
    d_desc, a_ring, b_ring, staging, full, empty, turn, walk, GROUP: gl.constexpr, CONFIG: gl.constexpr
):
    """One warpgroup: multiply, convert, store."""
    k_tiles, tiles_m, tiles_n, batch, raster_along_m, swizzle_size = walk
    STAGES: gl.constexpr = CONFIG.value.stages
    PINGPONG: gl.constexpr = CONFIG.value.schedule == "pingpong"
    IN_FLIGHT: gl.constexpr = CONFIG.value.groups_in_flight
    EACH: gl.constexpr = CONFIG.value.groups if PINGPONG else 1
    blocks = gl.num_programs(0)
    work = gl.program_id(0)
    stage = 0
    phase = 0
    my_turn = 0
    if PINGPONG:
        # The second warpgroup takes the block's second tile, k_tiles further on in the ring, and waits for
        # the first; the first finds its own barrier fresh, so that its first turn is at once.
        work += GROUP * blocks
        stage = GROUP * k_tiles % STAGES
        phase = GROUP * k_tiles // STAGES & 1
        my_turn = 1 - GROUP
    accumulators = fresh_accumulators(a_ring.dtype, CONFIG)
    for work in range(work, tiles_m * tiles_n * batch, EACH * blocks):
        tile = tile_of(work, walk)
        if PINGPONG:
            mbarrier.wait(turn.index(GROUP), my_turn)
            my_turn ^= 1
        mbarrier.wait(full.index(stage), phase)
        accumulators = multiply(a_ring.index(stage), b_ring.index(stage), accumulators, True, GROUP, CONFIG)
        accumulators = warpgroup_mma_wait(IN_FLIGHT, deps=(accumulators,))
        for _ in range(1, k_tiles):
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
            mbarrier.wait(full.index(stage), phase)
            accumulators = multiply(
                a_ring.index(stage), b_ring.index(stage), accumulators, False, GROUP, CONFIG
            )
            # One WGMMA group stays in flight, so that the tensor cores have work while a stage is released
            # and the next awaited.
            accumulators = warpgroup_mma_wait(IN_FLIGHT, deps=(accumulators,))
            mbarrier.arrive(empty.index(before), count=1)
        if PINGPONG:
            mbarrier.arrive(turn.index(1 - GROUP), count=1)
        accumulators = warpgroup_mma_wait(0, deps=(accumulators,))
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if PINGPONG:
            stage += k_tiles  # the other warpgroup's tile
            phase ^= stage // STAGES & 1
            stage = stage % STAGES
        elif stage == STAGES:
            stage = 0
            phase ^= 1
        store(d_desc, accumulators, staging, tile, GROUP, CONFIG)
    tma.store_wait(0)
