"""Run time: a call of a product launches its recorded kernel, or falls back to torch.

`dispatcher` is the hot path, and `api` holds the one of the process. For new calls `slow_path` and `planning`
make the plans (`plans`), with launchers that `finding` gets from records. `tunegemm.choose` decides which
kernel serves. `background` compiles and `online` tunes meanwhile; `autograd` has the gradients of products
and `fx` tells proxies from tensors. `operation` is a kernel that the caller chose. The rooms above stand
on `extension` and the calls of `api.dispatcher`: `torch` with the functions that users know, `groups` with
products of rows in groups, `layers` and `engines`. `objects` has kernels that no record names.
"""
