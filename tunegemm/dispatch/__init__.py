"""Run time: a call of a product launches its recorded kernel, or falls back to torch.

`dispatcher` has the calls, and `api` holds the process's dispatcher. `forms` describes a call. For a new call
`planning` makes the plan (`launchers`) of the kernel that `tunegemm.choose` selects, and `states` keeps it
under the context's policy. `background` compiles missing kernels and tunes products meanwhile.
`unfused` computes a form by torch, and `autograd` differentiates products. `operation` is a kernel chosen by
the caller. The rooms above use `extension` and the calls of `api.dispatcher`.
"""
