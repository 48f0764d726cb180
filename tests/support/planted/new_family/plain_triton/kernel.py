"""A matrix product in Triton: one block per tile, operands by pointers, both contiguous in k."""

import triton
import triton.language as tl


@triton.jit
def gemm(
    a, b, d, m, n, k_vectors, lda_vectors, ldb_vectors, ldd, swizzle,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    """d[m, n] = a[m, k] times b[n, k] transposed. k and leading dimensions of a and b count 8 elements each,
    so that the compiler knows them for multiples: it loads, and masks, 16 bytes at a time.
    """
    k = k_vectors * 8
    rows_of_tiles, columns_of_tiles = tl.cdiv(m, tile_m), tl.cdiv(n, tile_n)
    group = swizzle * columns_of_tiles
    first = tl.program_id(0) // group * swizzle
    height = min(rows_of_tiles - first, swizzle)
    within = tl.program_id(0) % group
    rows = (first + within % height) * tile_m + tl.arange(0, tile_m)
    columns = within // height * tile_n + tl.arange(0, tile_n)
    depth = tl.arange(0, tile_k)
    a_places = a + (rows % m)[:, None].to(tl.int64) * (lda_vectors * 8) + depth[None, :]
    b_places = b + (columns % n)[None, :].to(tl.int64) * (ldb_vectors * 8) + depth[:, None]
    sums = tl.zeros((tile_m, tile_n), tl.float32)
    for done in range(0, k, tile_k):
        a_tile = tl.load(a_places + done, mask=depth[None, :] < k - done, other=0.0)
        b_tile = tl.load(b_places + done, mask=depth[:, None] < k - done, other=0.0)
        sums = tl.dot(a_tile, b_tile, sums)
    places = d + rows[:, None].to(tl.int64) * ldd + columns[None, :]
    tl.store(places, sums.to(d.dtype.element_ty), mask=(rows[:, None] < m) & (columns[None, :] < n))
