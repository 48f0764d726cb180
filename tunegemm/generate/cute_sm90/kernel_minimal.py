"""The smallest kernel of the family's kind, to begin reading with. `kernel/gemm.py` is the one that is tuned.

D = A B^T in bf16, sums in fp32. A is (M, K), B (N, K), both with k contiguous; D is (M, N), n contiguous.
M, N and K are multiples of a tile: there are no edges, and no epilogue, clusters or k splits.

A block has three warpgroups of 128 threads and a *ring* of STAGES pairs of tiles in shared memory. One thread
of the first warpgroup, the producer, lets the TMA engine copy tiles of A and B into the ring. The other two,
the consumers, multiply them: each holds half of the tile of D, 64 rows, in registers, and WGMMA reads its
operands from shared memory. Two barriers of each stage hand it over:

    full[s]     the bytes of both tiles have arrived     the consumers may read stage s
    empty[s]    both consumers have read them            the producer may overwrite stage s

The schedule is static: block b computes tiles b, b + grid, b + 2 grid, ... While the consumers store a tile,
the producer already loads the next one.

`python -m tunegemm.generate.cute_sm90.kernel_minimal` compiles it, checks it against fp32 and times it beside
torch.mm, on a Hopper GPU.
"""

import sys
import tempfile
from pathlib import Path

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

TILE_M, TILE_N, TILE_K = 128, 128, 64
STAGES = 4
STAGE_BYTES = (TILE_M + TILE_N) * TILE_K * 2
CONSUMERS = 2
K_MAJOR = cute.nvgpu.OperandMajorMode.K


def matrix(address, rows, columns):
    """A row-major (rows, columns) tensor at an address that TMA can read: a multiple of 16 bytes."""
    pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)
    leading = cute.assume(columns, divby=8)
    return cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(leading, 1)))


def swizzled(rows, *stages):
    """A (rows, TILE_K, STAGE) layout that WGMMA reads without bank conflicts: 128-byte lines, swizzled."""
    kind = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, BFloat16, TILE_K)
    atom = warpgroup.make_smem_layout_atom(kind, BFloat16)
    shape = (rows, TILE_K, *stages)
    return cute.tile_to_shape(atom, shape, order=(0, 1, 2)[: len(shape)])


@cute.struct
class Storage:
    """Shared memory of a block."""

    full: cute.struct.MemRange[Int64, STAGES]
    empty: cute.struct.MemRange[Int64, STAGES]
    a: cute.struct.Align[cute.struct.MemRange[BFloat16, TILE_M * TILE_K * STAGES], 1024]
    b: cute.struct.Align[cute.struct.MemRange[BFloat16, TILE_N * TILE_K * STAGES], 1024]


@cute.jit
def gemm(a: Int64, b: Int64, d: Int64, m: Int32, n: Int32, k: Int32, blocks: Int32, stream):
    """On the host, at each launch: describe the operands to TMA and start so many blocks.

    a, b, d: addresses on the device.
    """
    mA, mB, mD = matrix(a, m, k), matrix(b, n, k), matrix(d, m, n)  # (M, K), (N, K), (M, N)
    # A TMA atom knows the tensor, the box that one copy brings, and how it lies in shared memory. The second
    # value stands for the tensor: its elements are coordinates.
    op = cpasync.CopyBulkTensorTileG2SOp()
    tma_a, gA = cpasync.make_tiled_tma_atom(op, mA, swizzled(TILE_M), (TILE_M, TILE_K))
    tma_b, gB = cpasync.make_tiled_tma_atom(op, mB, swizzled(TILE_N), (TILE_N, TILE_K))
    # One WGMMA of 64 rows, TILE_N columns and 16 of k for each consumer, side by side along m.
    tiled_mma = sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, K_MAJOR, K_MAJOR, Float32, (CONSUMERS, 1, 1), tiler_mn=(64, TILE_N)
    )
    kernel(tma_a, gA, tma_b, gB, mD, tiled_mma).launch(
        grid=(blocks, 1, 1),
        block=((1 + CONSUMERS) * 128, 1, 1),
        smem=Storage.size_in_bytes(),
        stream=stream,
        min_blocks_per_mp=1,  # so that registers may move from the producer to the consumers
    )


@cute.kernel
def kernel(tma_a: cute.CopyAtom, mA: cute.Tensor, tma_b: cute.CopyAtom, mB: cute.Tensor, mD: cute.Tensor,
           tiled_mma: cute.TiledMma):  # fmt: skip
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    group = cute.arch.make_warp_uniform(thread // 128)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

    storage = SmemAllocator().allocate(Storage)
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    sA_layout, sB_layout = swizzled(TILE_M, STAGES), swizzled(TILE_N, STAGES)
    sA = storage.a.get_tensor(sA_layout.outer, swizzle=sA_layout.inner)  # (bM, bK, STAGE)
    sB = storage.b.get_tensor(sB_layout.outer, swizzle=sB_layout.inner)  # (bN, bK, STAGE)

    if thread == 0:
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(full + stage, 1)  # the producer announces, then the bytes count
            cute.arch.mbarrier_init(empty + stage, CONSUMERS)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    tiles_n = mD.shape[1] // TILE_N
    tiles = mD.shape[0] // TILE_M * tiles_n
    k_tiles = mA.shape[1] // TILE_K
    # A barrier's phase is a bit that changes whenever it completes; to wait is to name the phase that must
    # have completed. So each role counts its way round the ring: the stage, and the phase of the round.
    stage = Int32(0)
    tile = Int32(block)
    if group == 0:
        cute.arch.setmaxregister_decrease(40)
        if warp == 0:
            phase = Int32(1)  # of a fresh barrier the phase before the first counts as done: all is empty
            while tile < tiles:
                # (bM, bK, RestK) and (bN, bK, RestK): the tiles along k of this row and this column of D
                gA = cute.local_tile(mA, (TILE_M, TILE_K), (tile // tiles_n, None))
                gB = cute.local_tile(mB, (TILE_N, TILE_K), (tile % tiles_n, None))
                tAsA, tAgA = tma_views(tma_a, sA, gA)  # ((ATOM_V, REST_V), STAGE), (.., RestK)
                tBsB, tBgB = tma_views(tma_b, sB, gB)
                for k_tile in cutlass.range(k_tiles, unroll=1):
                    cute.arch.mbarrier_wait(empty + stage, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, STAGE_BYTES)
                    bar = full + stage
                    cute.copy(tma_a, tAgA[(None, k_tile)], tAsA[(None, stage)], tma_bar_ptr=bar)
                    cute.copy(tma_b, tBgB[(None, k_tile)], tBsB[(None, stage)], tma_bar_ptr=bar)
                    stage += 1
                    if stage == STAGES:
                        stage = Int32(0)
                        phase ^= 1
                tile += blocks
    else:
        cute.arch.setmaxregister_increase(232)
        phase = Int32(0)
        own = thread - 128
        thread_mma = tiled_mma.get_slice(own)
        # Of operands in shared memory a fragment holds descriptors, no registers. All threads of a warpgroup
        # have the same: those of its first.
        group_mma = tiled_mma.get_slice(own // 128 * 128)
        tCrA = tiled_mma.make_fragment_A(group_mma.partition_A(sA))  # (MMA, MMA_M, MMA_K, STAGE)
        tCrB = tiled_mma.make_fragment_B(group_mma.partition_B(sB))  # (MMA, MMA_N, MMA_K, STAGE)
        sums = cute.make_rmem_tensor(  # (MMA, MMA_M, MMA_N)
            thread_mma.partition_shape_C((TILE_M, TILE_N)), Float32
        )
        while tile < tiles:
            sums.fill(0.0)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            for _ in cutlass.range(k_tiles, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                warpgroup.fence()  # registers are written before the tensor cores add to them
                for block_k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    index = (None, None, block_k, stage)
                    cute.gemm(tiled_mma, sums, tCrA[index], tCrB[index], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(0)  # to let one group run on while the next is awaited is faster
                if own % 128 == 0:
                    cute.arch.mbarrier_arrive(empty + stage)
                stage += 1
                if stage == STAGES:
                    stage = Int32(0)
                    phase ^= 1
            # (bM, bN): each thread stores its own elements, in pairs; by TMA, from shared memory, is faster.
            gD = cute.local_tile(mD, (TILE_M, TILE_N), (tile // tiles_n, tile % tiles_n))
            converted = cute.make_rmem_tensor(sums.layout, BFloat16)
            converted.store(sums.load().to(BFloat16))
            cute.autovec_copy(converted, thread_mma.partition_C(gD))  # (MMA, MMA_M, MMA_N)
            tile += blocks


def tma_views(tma, ring, tiles):
    """The stages of a ring and tiles of global memory, as TMA copies one to the other."""
    return cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(ring, 0, 2), cute.group_modes(tiles, 0, 2)
    )


def compile_into(folder, *options):
    """An object in a folder that `cute_launch.load_function` loads. options: further ones of the compiler."""
    from tunegemm.compile.cute_object import FUNCTION_NAME, link

    out = Path(folder, "minimal.o")
    numbers = [Int64(0)] * 3 + [Int32(1)] * 4  # stand for addresses, extents and blocks of every launch
    compiled = cute.compile(
        gemm, *numbers, cute.runtime.make_fake_stream(),
        options=" ".join(["--enable-tvm-ffi", "--gpu-arch=sm_90a", f"--dump-dir={folder}", *options]),
    )  # fmt: skip
    compiled.export_to_c(object_file_path=str(out), function_name=FUNCTION_NAME)
    link(out)
    return out


def main():
    """One product, against fp32, and its time beside torch.mm's."""
    import torch

    from tunegemm.generate.cute_launch import load_function

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("kernel_minimal wants a Hopper GPU (compute capability 9.0), and there is none here")
    m, n, k = 4096, 4096, 4096
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16()
    d = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    with tempfile.TemporaryDirectory() as folder:
        launch = load_function(compile_into(folder))

    def ours():
        stream = torch.cuda.current_stream().cuda_stream
        launch(a.data_ptr(), b.data_ptr(), d.data_ptr(), m, n, k, blocks, stream)

    ours()
    expected = a.float() @ b.float().t()
    error = ((d.float() - expected).norm() / expected.norm()).item()
    is_right = error < 4e-3  # bf16 rounds by 1e-3; not a number is not less
    print(f"{m}x{n}x{k}: relative error {error:.1e}, {'right' if is_right else 'wrong'}")
    ours_us, torch_us = microseconds(ours), microseconds(lambda: torch.mm(a, b.t()))
    print(f"{ours_us:.0f} us, {2 * m * n * k / ours_us / 1e6:.0f} TFLOP/s; torch.mm {torch_us:.0f} us")
    sys.exit(not is_right)


def microseconds(launch, count=50):
    """The mean time of launches that follow each other, after as many that warm up."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for number in range(2 * count):
        if number == count:
            begin.record()
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count * 1e3


if __name__ == "__main__":
    main()
