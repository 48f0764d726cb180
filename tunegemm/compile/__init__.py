"""Compile kernels into objects, in processes that see no GPU, and keep the objects.

`pool` hands jobs to processes of `worker`, `cute_object` and `triton_object` call the compilers, `ptxas`
reads what they say, `artifacts` keeps objects under the hash of their key. Families are known here by the
name of a module alone, in which a worker finds them. Imports `describe`.
"""
