"""The kernels of products of one A with several weights, on the parts of `grouped` and `cute_sm90`.

`few`: few rows, which are WGMMA's narrow mode. `many`: many rows, tiles of 128 and 256 of them. Both take the
same arguments (`arguments`).
"""
