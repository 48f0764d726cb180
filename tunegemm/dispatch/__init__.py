"""Run time: a call of a product launches its recorded kernel, or falls back to torch.

`dispatcher` has the calls, and `api` holds the dispatcher of the process. `forms` describes a call. For a new
one `planning` makes the plan (`launchers`) of the kernel that `tunegemm.choose` names, and `states` keeps it
under the policy of the context. `missing` says what is done where no kernel can be launched: `background`
compiles and `online` tunes meanwhile. `unfused` has torch's way to compute a form, `autograd` the gradients
of products, and `fx` tells proxies from tensors. `operation` is a kernel that the caller chose. The rooms
above stand on `extension` and the calls of `api.dispatcher`: `torch` with the functions that users know,
`groups` with products of rows in groups, `layers` and `engines`.
"""
