// Work of one known kind for `benchmarks/power_roof.py`: what a Hopper chip draws for it is measured outside.
//
// One block per multiprocessor. Its consumer warpgroups multiply bf16 tiles out of a ring of stages in shared
// memory, as a GEMM's main loop does; one thread of a further warpgroup refills the stages by bulk copies, all of
// them, some or none, alone or by multicast in a cluster. Every `tile_steps` stages the accumulators begin anew and
// may be stored.
//
// The build sets: WIDTH (n of the instruction), ACROSS (instructions side by side), FROM_REGISTERS (operand A),
// WARPGROUPS, STAGES, CLUSTER_M, CLUSTER_N, STORE (an epilogue), MULTIPLY and WAIT (0 try_wait, 1 the same with a
// hint, 2 test_wait). In front of this file it puts `multiply_add`, the WGMMA instruction of that width.

constexpr u32 kStepK = 64;             // elements of k in a stage: rows of 128 bytes, swizzled
constexpr u32 kRowBytes = kStepK * 2;
constexpr u32 kTileRows = 64 * WARPGROUPS;
constexpr u32 kTileBytesA = kTileRows * kRowBytes;
constexpr u32 kStageBytesA = FROM_REGISTERS ? 0 : kTileBytesA;
constexpr u32 kColumns = ACROSS * WIDTH;
constexpr u32 kStageBytesB = kColumns * kRowBytes;
constexpr u32 kStageBytes = kStageBytesA + kStageBytesB;
constexpr u32 kRingBytes = STAGES * kStageBytes;
constexpr u32 kClusterSize = CLUSTER_M * CLUSTER_N;
constexpr u32 kPieceBytes = 8192;      // of one bulk copy; larger ones starve the ring
constexpr u32 kPanelBytes = 64 * 128;  // 64 rows of 64 stored columns
constexpr u32 kPanels = 2;             // per warpgroup, written in turn

struct Work {
  const char* source;       // operands, footprint_bytes of them
  char* stored;             // tiles of bf16, in slots
  u64* meter;               // cycles and nanoseconds that block 0 was at work, added up
  u64 footprint_bytes;
  u64 hold_ns;              // how long the producer waits before the first stage
  u32 steps;
  u32 tile_steps;
  u32 loads_percent;        // of the stages that are fetched
  u32 together;             // 1: all blocks fetch the same bytes at the same time
  u32 slots;                // tiles that `stored` has room for
};

__device__ u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

__device__ u64 now_ns() {
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// A barrier's phase is waited for by parity, as its ring comes round.
__device__ bool has_passed(u32 barrier, u32 parity) {
  u32 passed;
#if WAIT == 0
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
#elif WAIT == 1
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed) : "r"(barrier), "r"(parity), "r"(1000000) : "memory");
#else
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed) : "r"(barrier), "r"(parity) : "memory");
#endif
  return passed;
}

__device__ void wait_for(u32 barrier, u32 parity) {
  while (!has_passed(barrier, parity)) {}
}

__device__ void init_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals));
}

__device__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ void arrive_and_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ void arrive_at(u32 barrier, u32 rank) {
  asm volatile("{ .reg .u32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there]; }"
               :: "r"(barrier), "r"(rank) : "memory");
}

// Copies into shared memory in pieces, of this block or of all blocks in the mask.
__device__ void fetch(u32 to, const char* from, u32 bytes, u32 barrier, u32 mask, bool multicast) {
  for (u32 done = 0; done < bytes; done += kPieceBytes) {
    u32 piece = min(kPieceBytes, bytes - done);
    if (multicast) {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                   " [%0], [%1], %2, [%3], %4;"
                   :: "r"(to + done), "l"(from + done), "r"(piece), "r"(barrier), "h"(static_cast<u16>(mask))
                   : "memory");
    } else {
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   :: "r"(to + done), "l"(from + done), "r"(piece), "r"(barrier) : "memory");
    }
  }
}

// WGMMA's descriptor of an operand with k in rows of 128 bytes, swizzled by 128, in groups of eight rows.
__device__ u64 descriptor(u32 address) {
  constexpr u64 kGroupBytes = 8 * kRowBytes;
  return static_cast<u64>((address & 0x3ffff) >> 4) | (1ull << 16) | ((kGroupBytes >> 4) << 32) | (1ull << 62);
}

// Which blocks of the cluster a block shares operands with.
struct Place {
  u32 row, column, row_mask, column_mask;

  __device__ explicit Place(u32 rank) : row(rank % CLUSTER_M), column(rank / CLUSTER_M), row_mask(0), column_mask(0) {
    for (u32 j = 0; j < CLUSTER_N; j++) row_mask |= 1u << (row + j * CLUSTER_M);
    for (u32 i = 0; i < CLUSTER_M; i++) column_mask |= 1u << (i + column * CLUSTER_M);
  }
  __device__ bool shares_with(u32 rank) const { return ((row_mask | column_mask) >> rank) & 1; }
};

// A position in the ring: its slot, and the parity of its present round.
struct Position {
  u32 slot = 0, parity = 0;

  __device__ void advance() {
    if (++slot == STAGES) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct Ring {
  u32 data, full, empty, panels;

  __device__ u32 full_at(u32 slot) const { return full + slot * 8; }
  __device__ u32 empty_at(u32 slot) const { return empty + slot * 8; }
  __device__ u32 a_at(u32 slot) const { return data + slot * kStageBytes; }
  __device__ u32 b_at(u32 slot) const { return a_at(slot) + kStageBytesA; }
};

__device__ void produce(const Work& work, const Ring& ring, const Place& place) {
  constexpr u32 share_a = kStageBytesA / CLUSTER_N, share_b = kStageBytesB / CLUSTER_M;
  constexpr u32 share = share_a + share_b;  // what this block fetches of a stage; its neighbours fetch the rest
  const u64 blocks = work.footprint_bytes / share;
  u64 next = work.together ? 0 : blocks * blockIdx.x / gridDim.x;
  const u64 start_ns = now_ns(), start_cycle = clock64();
  while (now_ns() - start_ns < work.hold_ns) __nanosleep(10000);
  Position at;
  u32 credit = 0;
  for (u32 step = 0; step < work.steps; step++, at.advance()) {
    wait_for(ring.empty_at(at.slot), at.parity ^ 1);
    credit += work.loads_percent;
    if (credit < 100) {
      arrive(ring.full_at(at.slot));
      continue;
    }
    credit -= 100;
    arrive_and_expect(ring.full_at(at.slot), kStageBytes);
    const char* from = work.source + next * share;
    next = next + 1 == blocks ? 0 : next + 1;
    fetch(ring.a_at(at.slot) + place.column * share_a, from, share_a, ring.full_at(at.slot), place.row_mask,
          CLUSTER_N > 1);
    fetch(ring.b_at(at.slot) + place.row * share_b, from + share_a, share_b, ring.full_at(at.slot),
          place.column_mask, CLUSTER_M > 1);
  }
  if (blockIdx.x == 0) {
    atomicAdd(work.meter, clock64() - start_cycle);
    atomicAdd(work.meter + 1, now_ns() - start_ns);
  }
}

__device__ void release(const Ring& ring, const Place& place, u32 slot) {
  u32 rank = threadIdx.x % 128;
  if (kClusterSize == 1) {
    if (rank == 0) arrive(ring.empty_at(slot));
  } else if (rank < kClusterSize && place.shares_with(rank)) {
    arrive_at(ring.empty_at(slot), rank);
  }
}

// Operand A in registers: the fragments of one stage, of row-major rows of 64.
__device__ void load_fragments(u32 (&a)[4][4], const char* source, u32 warpgroup) {
  const u32 thread = threadIdx.x % 128, lane = thread % 32;
  const u32 row = warpgroup * 64 + thread / 32 * 16 + lane / 4;
  for (u32 k = 0; k < 4; k++)
    for (u32 part = 0; part < 4; part++)
      a[k][part] = *reinterpret_cast<const u32*>(source + (row + part % 2 * 8) * kRowBytes + k * 32 +
                                                 part / 2 * 16 + lane % 4 * 4);
}

__device__ u32 packed(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

// A warpgroup's accumulators to global memory by way of shared memory, 64 columns at a time.
__device__ void store_tile(const float (&sums)[ACROSS][WIDTH / 2], const Ring& ring, char* tile, u32 warpgroup) {
  const u32 thread = threadIdx.x % 128, lane = thread % 32;
  const u32 row = thread / 32 * 16 + lane % 16;
#pragma unroll
  for (u32 panel = 0; panel < kColumns / 64; panel++) {
    const u32 staging = ring.panels + (warpgroup * kPanels + panel % kPanels) * kPanelBytes;
    if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    asm volatile("bar.sync %0, 128;" :: "r"(warpgroup + 1) : "memory");
#pragma unroll
    for (u32 pair = 0; pair < 4; pair++) {
      const float* of = sums[panel * 64 / WIDTH] + panel * 64 % WIDTH / 2 + pair * 8;
      const u32 chunk = pair * 2 + lane / 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                   :: "r"(staging + row * 128 + ((chunk ^ (row & 7)) * 16)), "r"(packed(of[0], of[1])),
                      "r"(packed(of[2], of[3])), "r"(packed(of[4], of[5])), "r"(packed(of[6], of[7])) : "memory");
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" :: "r"(warpgroup + 1) : "memory");
    if (thread == 0) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;"
                   :: "l"(tile + (warpgroup * (kColumns / 64) + panel) * kPanelBytes), "r"(staging), "r"(kPanelBytes)
                   : "memory");
    }
  }
}

__device__ void consume(const Work& work, const Ring& ring, const Place& place) {
  const u32 warpgroup = threadIdx.x / 128;
  Position at;
#if MULTIPLY
  float sums[ACROSS][WIDTH / 2];
  for (u32 part = 0; part < ACROSS; part++)
    for (u32 i = 0; i < WIDTH / 2; i++) sums[part][i] = 0.f;
#if FROM_REGISTERS
  u32 a[4][4];
  load_fragments(a, work.source, warpgroup);
#endif
  u32 in_tile = 0, previous = 0;
  [[maybe_unused]] u32 tile = blockIdx.x;
  bool holds = false;  // whether the previous slot is still to be released
  for (u32 step = 0; step < work.steps; step++, at.advance()) {
    wait_for(ring.full_at(at.slot), at.parity);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    const u64 b = descriptor(ring.b_at(at.slot));
#if !FROM_REGISTERS
    const u64 a = descriptor(ring.a_at(at.slot) + warpgroup * 64 * kRowBytes);
#endif
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
      const u32 keep = k > 0 || in_tile > 0;
#pragma unroll
      for (u32 part = 0; part < ACROSS; part++) {
#if FROM_REGISTERS
        multiply_add(sums[part], a[k], b + k * 2 + part * (WIDTH * kRowBytes >> 4), keep);
#else
        multiply_add(sums[part], a + k * 2, b + k * 2 + part * (WIDTH * kRowBytes >> 4), keep);
#endif
      }
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    if (holds) release(ring, place, previous);
    holds = true;
    previous = at.slot;
    if (++in_tile == work.tile_steps) {
      in_tile = 0;
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      release(ring, place, previous);
      holds = false;
#if STORE
      store_tile(sums, ring, work.stored + static_cast<u64>(tile % work.slots) * (kTileRows * kColumns * 2), warpgroup);
      tile += gridDim.x;
#else
      float total = 0.f;
      for (u32 part = 0; part < ACROSS; part++)
        for (u32 i = 0; i < WIDTH / 2; i++) total += sums[part][i];
      if (total == 12345.f) work.meter[2] = 1;  // so that nothing above is left out
#endif
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#if STORE
  if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
#else
  for (u32 step = 0; step < work.steps; step++, at.advance()) {
    wait_for(ring.full_at(at.slot), at.parity);
    release(ring, place, at.slot);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128 + 128, 1) roof(const __grid_constant__ Work work) {
  extern __shared__ char raw[];
  Ring ring;
  ring.data = (shared_address(raw) + 1023) & ~1023u;
  ring.panels = ring.data + kRingBytes;
  ring.full = ring.panels + (STORE ? WARPGROUPS * kPanels * kPanelBytes : 0);
  ring.empty = ring.full + STAGES * 8;
  if (threadIdx.x == 0) {
    for (u32 slot = 0; slot < STAGES; slot++) {
      init_barrier(ring.full_at(slot), 1);
      init_barrier(ring.empty_at(slot), WARPGROUPS * (CLUSTER_M + CLUSTER_N - 1));
    }
  }
  for (u32 i = threadIdx.x * 16; i < kRingBytes; i += blockDim.x * 16) {  // what is multiplied until it is refilled
    const uint4 chunk = *reinterpret_cast<const uint4*>(work.source + i);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "r"(ring.data + i), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z), "r"(chunk.w) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  cluster_sync();
  const Place place(cluster_rank());
  if (threadIdx.x < WARPGROUPS * 128) {
#if WARPGROUPS == 2
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#elif WARPGROUPS == 3
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#endif
    consume(work, ring, place);
  } else {
#if WARPGROUPS == 2
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#elif WARPGROUPS == 3
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
#endif
    if (threadIdx.x == WARPGROUPS * 128) produce(work, ring, place);
  }
  __syncthreads();
  cluster_sync();
}

// Cycles of a read that L2 holds: of each block, one per line. Each block reads every line twice before.
extern "C" __global__ void latency(const char* lines, u32 count, u32 stride_bytes, u32* cycles, u32* sm) {
  extern __shared__ char raw[];
  if (threadIdx.x != 0) return;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm[blockIdx.x]));
#pragma unroll 1
  for (u32 i = 0; i < count; i++) {
    u32 least = ~0u;
#pragma unroll 1
    for (u32 again = 0; again < 5; again++) {
      u32 value;
      const long long start = clock64();
      asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(lines + static_cast<u64>(i) * stride_bytes)
                   : "memory");
      asm volatile("st.shared.u32 [%0], %1;" :: "r"(shared_address(raw)), "r"(value) : "memory");  // waits for it
      const u32 took = static_cast<u32>(clock64() - start);
      if (again >= 2) least = min(least, took);
    }
    cycles[static_cast<u64>(blockIdx.x) * count + i] = least;
  }
}
