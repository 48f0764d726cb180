"""Products of rows in groups, and layers of experts made of them.

`grouped` has `grouped_mm`, `scaled_groups` the same of fp8, `routing` the kernels around them, and
`gated_experts` a whole layer. `operators` are ATen's products of groups under `tunegemm.enable`, and
`recorded_groups` says what a recording writes of a call.
"""
