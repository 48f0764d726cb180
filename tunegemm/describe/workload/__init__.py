"""A program's products and how often it computes each: `tunegemm record` writes, `tune --from` reads."""

from tunegemm.describe.workload.demand import Demand, demands, total
from tunegemm.describe.workload.foreign import read, read_all
from tunegemm.describe.workload.products import Product, Workload, merge

__all__ = ["Demand", "Product", "Workload", "demands", "merge", "read", "read_all", "total"]
