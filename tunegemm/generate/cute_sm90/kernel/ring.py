"""The ring of A and B tiles in shared memory: which stage is next, and the barriers that hand it over.

full[stage]    1 arrival and the bytes of a stage       producer -> consumers
empty[stage]   one arrival of each consumer warp, of    consumers -> producer, at every CTA that
               every CTA that this CTA's tiles reach    multicasts into the released stage
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS, KernelConfig

WARPS = WARPGROUP_THREADS // 32


class RingState(NamedTuple):
    """Where a warpgroup is in the ring."""

    stage: Int32
    phase: Int32
    """Parity of the barriers that it waits for next; it changes whenever the ring is round."""


@dataclass(frozen=True)
class Ring:
    """The barriers, from the side of the producer or, with `signal` and `peer`, of a consumer warp."""

    config: KernelConfig
    full: cute.Pointer
    empty: cute.Pointer
    signal: Any = None
    """Whether this thread tells a CTA that its warp is done with a stage."""
    peer: Any = None
    """That CTA's rank in the cluster; None without a cluster."""

    @cute.jit
    def make_barriers(self):
        """One thread: initialize them."""
        config = self.config
        releases = config.tile_warpgroups * WARPS * (config.cluster_m + config.cluster_n - 1)
        for stage in cutlass.range_constexpr(config.stages):
            cute.arch.mbarrier_init(self.full + stage, 1)
            cute.arch.mbarrier_init(self.empty + stage, releases)

    def producer_start(self):
        """The previous phase of a fresh barrier counts as done: the ring starts empty."""
        return RingState(Int32(0), Int32(1))

    def consumer_start(self):
        return RingState(Int32(0), Int32(0))

    @cute.jit
    def for_consumer(self, lane, cta):
        """The ring as a consumer warp sees it, which signals those CTAs that multicast into this one."""
        config = self.config
        size = config.cluster_m * config.cluster_n
        signal = lane == 0
        peer = None
        if const_expr(size > 1):
            peer = lane % size
            peer_m = peer % config.cluster_m
            peer_n = peer // config.cluster_m
            signal = lane < size and (peer_m == cta[0] or peer_n == cta[1])
        return Ring(config, self.full, self.empty, signal, peer)

    def wait_empty(self, state):
        cute.arch.mbarrier_wait(self.empty + state.stage, state.phase)

    def wait_full(self, state):
        cute.arch.mbarrier_wait(self.full + state.stage, state.phase)

    @cute.jit
    def expect_bytes(self, state):
        """The producer announces what its loads will bring."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + state.stage, self.config.stage_bytes)

    @cute.jit
    def release(self, stage):
        """A consumer warp has read a stage."""
        if self.signal:
            cute.arch.mbarrier_arrive(self.empty + stage, self.peer)

    @cute.jit
    def advance(self, state):
        """The next stage."""
        stage, phase = state
        stage += 1
        if stage == self.config.stages:
            stage = Int32(0)
            phase ^= 1
        return RingState(stage, phase)

    def consumer_state(self, k_tiles):
        """A consumer's, of which another warpgroup has read so many stages."""
        return RingState(k_tiles % self.config.stages, (k_tiles // self.config.stages) & 1)

    def skip(self, state, k_tiles):
        """So many stages on, which another warpgroup reads."""
        skipped = state.stage + k_tiles
        phase = state.phase ^ ((skipped // self.config.stages) & 1)
        return RingState(skipped % self.config.stages, phase)
