"""How the sums of a tile's k splits become one: in pairs, inside the kernel, or by `second_kernel` after it.

Both read and write a workspace of sums of *work units*: what one cluster multiplied of one cluster tile. Sums
lie there as the warpgroups hold them: by unit, CTA of the cluster and warpgroup, then four neighbouring
accumulators of a thread, the threads side by side. Every access is 16 bytes of each thread in a row, on both
sides.

Which meets which and who is added to whom is fixed, so that results are the same in every run.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from tunegemm.generate.cute_sm90.config import WARPGROUP_THREADS, KernelConfig
from tunegemm.generate.cute_sm90.kernel.epilogue import sync_warpgroup


class Workspace(NamedTuple):
    """Device memory of a launch with k splits."""

    partials: cute.Pointer
    """Sums of work units, `Division` in the package says of how many."""
    counters: cute.Pointer
    """Counters of meetings: zeros that the kernel leaves as zeros."""


class Place(NamedTuple):
    """Whose sums in the workspace, but for the work unit."""

    rank: Int32
    """The CTA's rank in its cluster."""
    warpgroup: Int32
    """The warpgroup's index among those that share a tile."""
    thread: Int32
    """The thread's index in the warpgroup."""


@cute.jit
def sums_at(config, partials, number, place):
    """A thread's sums of the unit with this number: (4, CHUNK), chunks as far apart as a warpgroup's accesses
    are long.
    """
    values = config.accumulator_registers
    warpgroup = (number * config.cluster_size + place.rank) * config.tile_warpgroups + place.warpgroup
    start = partials + (Int64(warpgroup) * (values * WARPGROUP_THREADS) + place.thread * 4)
    layout = cute.make_layout((4, values // 4), stride=(1, 4 * WARPGROUP_THREADS))
    return cute.make_tensor(start, layout)


@dataclass(frozen=True)
class SplitK:
    """One consumer warpgroup's side of it."""

    config: KernelConfig
    workspace: Workspace
    met: cute.Pointer
    """Words of shared memory, one of each warpgroup: what its first thread found at a meeting."""
    cta: tuple[Int32, Int32]
    """This one's place along m and n in its cluster."""
    group: Int32
    """Which of the consumer warpgroups this is."""
    thread: Int32
    """The thread's index in the warpgroup."""

    @cute.jit
    def add(self, accumulators, schedule, unit):
        """Leave a unit's sums to others, or add those of others to them; true for who holds the total."""
        config = self.config
        cta_m, cta_n = self.cta
        warpgroup = 0 if const_expr(config.schedule == "pingpong") else self.group
        place = Place(cta_n * config.cluster_m + cta_m, warpgroup, self.thread)
        number = schedule.number(unit)
        holds_sum = cutlass.Boolean(True)
        if schedule.params.second_kernel != 0:
            self.deposit(accumulators, number, place)
            holds_sum = cutlass.Boolean(False)
        else:
            first, splits = schedule.splits(schedule.tile_and_split(unit.index)[0])
            holds_sum = self.meet(accumulators, first, number - first, splits, place)
        return holds_sum

    @cute.jit
    def deposit(self, accumulators, number, place):
        """Write a unit's sums into the workspace."""
        chunks = self.config.accumulator_registers // 4
        own = cute.make_tensor(accumulators.iterator, cute.make_layout((4, chunks)))  # (4, CHUNK)
        target = sums_at(self.config, self.workspace.partials, number, place)
        for chunk in cutlass.range_constexpr(chunks):
            cute.autovec_copy(own[(None, chunk)], target[(None, chunk)])

    @cute.jit
    def meet(self, accumulators, first, split, splits, place):
        """Add up the k splits of a tile along a tree; true for the one that then holds the total.

        Splits 0 and 1 meet, 2 and 3, then 0-1 and 2-3, and so on: the later of two adds the earlier's sums to
        its own, the earlier is done. Nobody waits, and the sums are the same whichever is late: additions
        commute, and who meets whom is fixed. A split that is late each time reads log2(splits) sums.

        Only the same warpgroup of other clusters' CTAs touches these sums, thread by thread at the same
        place. Each meeting has a counter, that of the first split on its right side. `first` is the number of
        split 0's unit; the others' follow.
        """
        config, partials = self.config, self.workspace.partials
        chunks = config.accumulator_registers // 4
        own = cute.make_tensor(accumulators.iterator, cute.make_layout((4, chunks)))  # (4, CHUNK)
        answer = cute.make_tensor(self.met + self.group, cute.make_layout(1))
        holds = cutlass.Boolean(True)
        side = Int32(1)  # splits on each side of a meeting
        while holds and side < splits:
            left = split & ~(2 * side - 1)
            right = left + side
            if right < splits:
                meeting = (first + right) * config.cluster_size + place.rank
                counter = self.workspace.counters + meeting * config.tile_warpgroups + place.warpgroup
                mine = split & ~(side - 1)
                # Sums that nobody will read need not be written: first a look whether the other is there.
                if self.thread == 0:
                    answer[0] = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
                sync_warpgroup(self.group)
                late = answer[0] == 1
                sync_warpgroup(self.group)
                if not late:
                    self.deposit(accumulators, first + mine, place)
                    # Each thread's sums are visible before the one thread counts, and counting orders it
                    # before the reader: release and acquire at device scope on both sides of the barrier.
                    cute.arch.fence_acq_rel_gpu()
                    sync_warpgroup(self.group)
                    if self.thread == 0:
                        answer[0] = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
                    sync_warpgroup(self.group)
                    late = answer[0] == 1
                    sync_warpgroup(self.group)
                if late:
                    cute.arch.fence_acq_rel_gpu()
                    if self.thread == 0:
                        cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
                    theirs = sums_at(config, partials, first + left + right - mine, place)  # (4, CHUNK)
                    for chunk in cutlass.range_constexpr(chunks):
                        loaded = cute.make_rmem_tensor(4, own.element_type)
                        cute.autovec_copy(theirs[(None, chunk)], loaded)
                        for value in cutlass.range_constexpr(4):
                            own[value, chunk] = own[value, chunk] + loaded[value]
                holds = late
            side *= 2
        return holds
