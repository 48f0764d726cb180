"""Compiles kernels into objects, in processes that see no GPU, and keeps the objects.

`pool` hands jobs to `worker` processes, `cute_object` and `triton_object` call the compilers, `ptxas` reads
their output, and `artifacts` keeps objects under the hash of their key. This room knows a family only by its
`compile`.
"""
