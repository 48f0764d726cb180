"""What both kernels' launches are given."""

from typing import NamedTuple

from cutlass import Int32, Int64

from tunegemm.generate.cute_sm90.kernel.layouts import matrix_at

WEIGHTS = 3
"""Most weights of a product; a gate has two."""


class Arguments(NamedTuple):
    """In this order, before the stream. Strides count elements.

    Of a weight that there is not, n is 0, and the others say what the first one's do.
    """

    a_address: Int64
    """(M, K)"""
    b_address: Int64
    """(n, K), the first weight, or that of a gate"""
    d_address: Int64
    """(M, n + n1 + n2), or of a gate (M, n)"""
    m: Int32
    n: Int32
    k: Int32
    n1: Int32
    lda: Int64
    ldb: Int64
    ldb1: Int64
    ldb2: Int64
    ldd: Int64
    b1_address: Int64
    """(n1, K), the second weight; or the gate's other one, of n rows and with the stride of the first"""
    n2: Int32
    raster_along_m: Int32
    swizzle_size: Int32
    block_across: Int32
    """Of many rows: see `cute_sm90`."""
    block_along: Int32
    clusters: Int32
    """The grid."""
    l2_hint: Int32
    """The operand whose lines leave the L2 first: 1 A, 2 the weights, 0 neither."""
    b2_address: Int64
    bias_address: Int64
    """A vector for each weight; 0: none."""
    bias1_address: Int64
    bias2_address: Int64
    first_tiles_address: Int64
    """Of many rows: see `cute_sm90`."""

    @property
    def rows(self):
        """Of each weight."""
        return self.n, self.n1, self.n2

    @property
    def biases(self):
        return self.bias_address, self.bias1_address, self.bias2_address

    def weights(self, dtype, rows):
        """Each weight as a tensor, (N, K, 1); rows: how many each has, at least one."""
        addresses = self.b_address, self.b1_address, self.b2_address
        strides = self.ldb, self.ldb1, self.ldb2
        return tuple(
            matrix_at(address, dtype, (n, self.k, 1), True, stride, stride)
            for address, n, stride in zip(addresses, rows, strides, strict=True)
        )
