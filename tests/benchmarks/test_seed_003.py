"""The tutorial's tables without a GPU: what they list can run, and how they print."""

from collections import Counter

from benchmarks.interleave import Interleave, Timing
from benchmarks.seeds import seed_003
from tunegemm.describe.device import find_device
from tunegemm.generate import families


def test_every_kernel_of_the_tables_can_run() -> None:
    """But for the narrow instructions, which the rules call useless and the tutorial measures."""
    device, family = find_device("model:h200"), families.get("gluon_wgmma")
    everything = list(seed_003.contenders())
    for problem, contender in everything:
        verdict = family.check(problem, contender.candidate, device)
        assert verdict or verdict.rule == "instruction_width", (contender, verdict)
    assert Counter(c.table for _, c in everything) == {
        "lhs_and_n": 8, "blocking": 6, "pipelined": 7, "exercise": 48,
    }  # fmt: skip
    labels = Counter((problem, family.label(c.candidate)) for problem, c in everything)
    assert max(labels.values()) == 1


def test_tables_name_what_was_skipped() -> None:
    family = families.get("gluon_wgmma")
    pairs = [(c, lambda a, b, out: None) for p, c in seed_003.contenders() if p == seed_003.SMALL][:2]
    fast, slow = (family.label(c.candidate) for c, _ in pairs)
    timings = {"torch": Timing((2.0, 2.0, 2.0), 1e-4), fast: Timing((1.0, 1.0, 1.0), 1e-4)}
    timed = Interleave(timings, {slow: "RuntimeError: no"}, 0.001, 1, 1, 3)
    providers = seed_003.described(seed_003.SMALL, timed, pairs)
    text = seed_003.tables(
        [{"m": 64, "n": 128, "k": 128, "dtype": "fp16", "providers": providers, "tried": 0}]
    )
    assert f"| lhs_and_n | {fast} | 1.00 | 2.1 | 2.000 | 9.47 us |" in text
    assert f"| lhs_and_n | {slow} | skipped: RuntimeError: no | | | 8.48 us |" in text
