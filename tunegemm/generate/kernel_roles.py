"""How a block of a warp-specialized kernel begins, and what its warps become: parts of the kernels that no
search includes, beside those of `cute_sm90` and `grouped`.

The first warpgroup's first warp loads, the other warpgroups multiply. A kernel names what either does, and
what its other warps do, as functions.
"""

from dataclasses import dataclass, field
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from tunegemm.generate.cute_sm90.config import MMA_ATOM_M, WARPGROUP_THREADS
from tunegemm.generate.cute_sm90.kernel.layouts import START_BARRIER, Dtypes, Layouts


class Product:
    """The base of a product for one config: its `launch` encodes TMA descriptors and starts a kernel."""

    arguments: Any
    """The fields of what a launch is given, before the stream."""

    def __init__(self, config):
        self.config = config
        self.dtypes = Dtypes.of(config)
        self.layouts = Layouts(config, self.dtypes)
        self.smem_bytes = 0

    @cute.jit
    def __call__(self, *arguments):
        """arguments: those of `arguments`; the stream."""
        self.launch(self.arguments(*arguments[:-1]), arguments[-1])

    def start(self, kernel, clusters, stream):
        """Launch a kernel with its arguments in so many clusters."""
        config = self.config
        kernel.launch(
            grid=(config.cluster_m, config.cluster_n, clusters),
            block=(config.threads, 1, 1),
            cluster=(config.cluster_m, config.cluster_n, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=1,  # without it ptxas ignores setmaxnreg (warning C7508)
        )


def int32_at(address):
    """A pointer to int32 in global memory."""
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)


@dataclass(frozen=True)
class LayoutsWith(Layouts):
    """Layouts of a block with more shared memory than a block of `grouped` has, which is `rest` there."""

    more: dict = field(default_factory=dict)
    """By its name what is behind that."""

    def shared_storage(self, a_elements, b_elements):
        class Storage:
            pass

        Storage.__annotations__ = {"rest": super().shared_storage(a_elements, b_elements), **self.more}
        return cute.struct(Storage)


def place_in_block():
    """A thread's index in its block, and those of its warp and of its warpgroup."""
    thread, _, _ = cute.arch.thread_idx()
    warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return thread, warp_index, cute.arch.make_warp_uniform(thread // WARPGROUP_THREADS)


def tensor_in(memory, layout):
    """A tensor of swizzled shared memory."""
    return memory.get_tensor(layout.outer, swizzle=layout.inner)


@cute.jit
def prefetch(warp_index, tensors):
    """The first warp fetches the descriptors of what TMA copies."""
    if warp_index == 0:
        for index in cutlass.range_constexpr(len(tensors)):
            cpasync.prefetch_descriptor(tensors[index].atom)


@cute.jit
def begin(thread, in_cluster: cutlass.Constexpr, *makers):
    """One thread initializes barriers by these functions. Nobody waits here, as in `cute_sm90`."""
    if thread == 0:
        for maker in cutlass.range_constexpr(len(makers)):
            makers[maker]()
    cute.arch.mbarrier_init_fence()
    if const_expr(in_cluster):
        cute.arch.cluster_arrive_relaxed()


@cute.jit
def part_ways(config, warp_index, group, storage, load, multiply, aside=None):
    """Run a warp's role: `load` of the first warp, `multiply` of the consumers, which takes a pointer to
    the staging buffers; `aside`, if there is one, for all warps of the first warpgroup, once `load` is done.
    """
    load_registers, mma_registers = config.registers
    started = 32 + config.consumers * WARPGROUP_THREADS
    if group == 0:
        cute.arch.setmaxregister_decrease(load_registers)
        if const_expr(config.cluster_size > 1):
            if warp_index != 0:
                cute.arch.cluster_wait()
        if warp_index == 0:
            if const_expr(config.cluster_size == 1):
                cute.arch.sync_warp()
                cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=started)
            load()
        if const_expr(aside is not None):
            aside()
    else:
        cute.arch.setmaxregister_increase(mma_registers)
        if const_expr(config.cluster_size > 1):
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=started)
        multiply(storage.d.data_ptr())


def staged_rows(config):
    """(epiM, epiN, BUFFER): the staging buffers of `grouped`'s epilogue."""
    buffers, buffer = config.consumers * config.epilogue_buffers, config.pitch * config.staged_rows
    if config.fused.gated:
        rows_apart = config.pitch * config.epi_n
        return cute.make_layout(
            ((8, 2, MMA_ATOM_M // 16), config.epi_n, buffers),
            stride=((1, rows_apart, 8), config.pitch, buffer),
        )
    return cute.make_layout((MMA_ATOM_M, config.epi_n, buffers), stride=(1, config.pitch, buffer))


def multicast_masks(config, cta_m, cta_n):
    """The CTAs of a cluster that share A tiles, those of one row, and B tiles, those of one column; None for
    those that share none.
    """
    ctas = cute.make_layout((config.cluster_m, config.cluster_n))
    shared = (config.cluster_n > 1, 1), (config.cluster_m > 1, 0)
    return [
        cute.make_layout_image_mask(ctas, (cta_m, cta_n), mode=mode) if is_shared else None
        for is_shared, mode in shared
    ]


@cute.jit
def load_k_tiles(ring, loads, state, k_tiles):
    """Load a tile, k tile after k tile. loads: for each operand its atom, the stages of its ring, its k
    tiles, the CTAs that share them, and a policy. Returns where the ring then is.
    """
    for k_tile in cutlass.range(k_tiles, unroll=1):
        ring.wait_empty(state)
        ring.expect_bytes(state)
        for load in cutlass.range_constexpr(len(loads)):
            atom, stages, tiles, mask, policy = loads[load]
            cute.copy(
                atom, tiles[(None, k_tile, 0)], stages[(None, state.stage)],
                tma_bar_ptr=ring.full + state.stage, mcast_mask=mask, cache_policy=policy,
            )  # fmt: skip
        state = ring.advance(state)
    return state


@cute.jit
def await_empty(ring, state):
    """The producer behind the last tile: a CTA must outlive the arrivals that its cluster's consumers send to
    its barriers.
    """
    for _ in cutlass.range(ring.config.stages, unroll=1):
        ring.wait_empty(state)
        state = ring.advance(state)


@cute.jit
def draw(counter, total, behind):
    """One lane: take a number from a counter, which the last of `total` draws leaves as zero."""
    drawn = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
    if drawn == total - 1:
        cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
    return drawn + behind
