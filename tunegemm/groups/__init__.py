"""Products of rows in groups, and layers of experts built from them.

`grouped` has `grouped_mm`, `scaled_groups` its fp8 form, `routing` the kernels around the products, and
`gated_experts` a whole layer. `recorded_groups` describes a call in a recording.
"""
