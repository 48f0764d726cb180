"""What every kernel family has to keep, shipped or of another package. No GPU needed.

`TUNEGEMM_TEST_SAMPLE=N` compiles N accepted candidates of each, and at least one for each of its problems.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pkgutil
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tests.generate
from tests.support.examples import OTHERWISE, TOO_LARGE, Change, Examples, Rejection, compile_all
from tunegemm.compile.pool import CompilePool
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import LAYOUTS, OUTPUT_DTYPES, Problem
from tunegemm.describe.space import Candidate, SearchSpace
from tunegemm.errors import ArtifactError, SpaceError
from tunegemm.generate import families
from tunegemm.generate.feasibility import Rule, parameters_read, refusal
from tunegemm.generate.sources import hash_of_code
from tunegemm.model.verdicts import CandidateTable


def _examples() -> dict[str, Examples]:
    """Those of the test modules beside this one, and of a plug-in those of its module `examples`."""
    names = [f"tests.generate.{module.name}" for module in pkgutil.iter_modules(tests.generate.__path__)]
    names = [name for name in names if name.rpartition(".")[2].startswith("test_") and name != __name__]
    names += [f"{point.module}.examples" for point in importlib.metadata.entry_points(group=families.GROUP)]
    found = {}
    for name in names:
        if name.startswith("tests.") or _is_there(name):
            examples = getattr(importlib.import_module(name), "EXAMPLES", None)
            if isinstance(examples, Examples) and examples.family in families.NAMES:
                found[examples.family] = examples
    return found


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


EXAMPLES = _examples()
COMPILED = [name for name in families.NAMES if families.get(name).compiled]
SAMPLE = int(os.environ.get("TUNEGEMM_TEST_SAMPLE", "1"))
SHAPES = ("4096x4096x4096", "8x16x24", "128x128x128x7")

every_family = pytest.mark.parametrize("name", families.NAMES)
every_generator = pytest.mark.parametrize("name", COMPILED)


def usual(name: str) -> Problem:
    """The problem of which every good kernel of a family is feasible: of 4096 rows, or of few."""
    return examples_of(name).problems[0]


@functools.cache
def examples_of(name: str) -> Examples:
    """A family's own; of one that has none a kernel that its rules accept."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    device = find_device("model:h200")
    for problem in (Problem.parse("4096x4096x4096"), Problem.parse("16x4096x4096", dtype="fp16")):
        for kernel in accepted(name, problem, device, 1):
            launch = dict(launches(name, kernel)[0].launch_params)
            every = frozenset(rule.name for rule in families.get(name).rules)
            return Examples(name, dict(kernel.compile_params), launch, [problem], [], [], [], every)
    pytest.fail(f"{name}: its rules accept no kernel of 4096x4096x4096; give it Examples")


def drawn(name: str, count: int) -> Iterator[Candidate]:
    """Kernels of the space, feasible or not, without listing it; each is made when it is asked for."""
    values, generator = families.load_space(name).compile_values, random.Random(0)
    for _ in range(count):
        yield Candidate.make(
            name, {parameter: generator.choice(list_) for parameter, list_ in values.items()}
        )


def accepted(name: str, problem: Problem, device: Device, count: int) -> list[Candidate]:
    """Kernels that the rules accept, all of them different."""
    found: dict[Candidate, None] = {}
    for kernel in drawn(name, 100_000):
        if families.get(name).check(problem, kernel, device):
            found[kernel] = None
            if len(found) == count:
                break
    return list(found)


def launches(name: str, kernel: Candidate) -> list[Candidate]:
    """The kernel with the first launch, and with each other value of each parameter."""
    values = families.load_space(name).launch_values
    first = kernel.with_launch(**{parameter: list_[0] for parameter, list_ in values.items()})
    others = [first.with_launch(**{p: value}) for p, list_ in values.items() for value in list_[1:]]
    return [first, *others]


@every_family
def test_it_is_what_its_entry_point_says(name: str) -> None:
    family, space = families.get(name), families.load_space(name)
    assert family.name == space.family == name
    assert {table: tuple(sorted(names)) for table, names in family.parameters.items()} == {
        "compile": tuple(sorted(space.compile_values)),
        "launch": tuple(sorted(space.launch_values)),
    }
    rules = family.rules if family.compiled else ()
    assert len({rule.name for rule in rules}) == len(rules)
    assert all(rule.cause for rule in rules), "each says its cause"
    assert family.unavailable() is None and family.unavailable(launching=True) is None


@every_family
def test_its_listed_values_are_expected_and_others_are_not(name: str) -> None:
    space = families.load_space(name)
    for parameter, values in {**space.compile_values, **space.launch_values}.items():
        assert all(families.expected(name, parameter, value) is None for value in values)
        assert families.expected(name, parameter, "no such word"), parameter
        assert families.expected(name, parameter, 2**31), parameter


@every_family
def test_a_space_with_another_parameter_is_refused(name: str, tmp_path: Path) -> None:
    text = families.get(name).space_file.read_text()
    parameter = families.get(name).parameters["compile"][0]
    bad = tmp_path / "space.toml"
    bad.write_text(text.replace(f"\n{parameter} = ", f"\n{parameter}x = ", 1))
    with pytest.raises(SpaceError, match=f"did you mean '{parameter}'"):
        SearchSpace.load(bad, parameters=families.get(name).parameters)


@every_family
def test_its_hash_is_of_the_sources_that_it_names(name: str) -> None:
    family = families.get(name)
    assert families.kernel_source_hash(name) == (hash_of_code(family.sources) if family.compiled else "")
    assert bool(families.kernel_source_hash(name)) == family.compiled
    others = {families.kernel_source_hash(other) for other in COMPILED if other != name}
    assert families.kernel_source_hash(name) not in others


@every_generator
def test_its_sources_import_no_file_of_its_own_that_is_not_hashed(name: str) -> None:
    """But for itself as a package, whose names are of the host's side."""
    sources = families.get(name).sources
    folder = next(path.parent for path in sources if path.name == "config.py")
    package = families.SHIPPED.get(name, name)
    own = [path for path in sources if path.is_relative_to(folder)]
    hashed = {".".join([package, *path.relative_to(folder).with_suffix("").parts]) for path in own}
    hashed |= {module.removesuffix(".__init__") for module in hashed}
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
                assert node.module in hashed, path


@every_family
def test_rules_answer_for_every_problem(name: str, h200: Device) -> None:
    """With a verdict of one line, whatever is asked; and what a rule refuses for all, it refuses for each."""
    family, kernels = families.get(name), [*drawn(name, 40)]
    rules = family.rules if family.compiled else ()
    names = {rule.name for rule in rules}
    problems = [
        Problem.parse(SHAPES[number % len(SHAPES)], dtype=dtype, out_dtype=out_dtype, layout=layout)
        for number, layout in enumerate(LAYOUTS)
        for dtype, out_dtypes in OUTPUT_DTYPES.items()
        for out_dtype in out_dtypes[:2]
    ]
    problems.append(Problem.parse(SHAPES[0], epilogue="bias_n+gelu"))
    for problem in problems:
        never = refusal(rules, name, problem)
        for kernel in kernels:
            verdict = family.check(problem, kernel, h200)
            assert "\n" not in str(verdict)
            if not verdict and rules:
                assert verdict.rule in names
            assert not (never and verdict), (problem, never)


@every_generator
def test_other_gpus_are_refused_with_their_name(name: str, h200: Device) -> None:
    a100 = find_device("model:a100-sxm-80gb")
    (kernel,) = accepted(name, usual(name), h200, 1)
    verdict = families.get(name).check(usual(name), kernel, a100)
    assert verdict or verdict.rule in ("architecture", "shared_memory", "smem"), verdict


#: Problems that differ in one field after the other from the first.
_FIELDS = [
    Problem.parse("512x768x1024"),
    Problem.parse("60x768x1024"),
    Problem.parse("512x100x1024"),
    Problem.parse("512x768x60"),
    Problem.parse("512x768x1024x3"),
    Problem.parse("512x768x1024", dtype="fp16"),
    Problem.parse("512x768x1024", dtype="fp8_e4m3", out_dtype="bf16"),
    Problem.parse("512x768x1024", dtype="int8"),
    Problem.parse("512x768x1024", out_dtype="fp32"),
    Problem.parse("512x768x1024", dtype="fp8_e4m3", out_dtype="bf16", accumulation="two_level"),
    *(Problem.parse("512x768x1024", layout=layout) for layout in LAYOUTS),
    Problem(512, 768, 1024, out_major="m"),
    Problem.parse("512x768x1024", alignment=8),
    *(Problem.parse("512x768x1024", epilogue=text) for text in ("bias_n+gelu", "swiglu", "beta_c+amax")),
]


def agree(rule: Rule, one: Problem, other: Problem) -> bool:
    """Whether problems agree in all that a rule declares to read of them."""
    read = rule.reads & frozenset(Problem.__dataclass_fields__)
    return all(getattr(one, name) == getattr(other, name) for name in read)


@every_generator
def test_rules_read_no_parameter_that_they_do_not_declare(name: str, h200: Device) -> None:
    """Candidates that agree in what a rule declares get the same from it; no other shows what it says."""
    family, space, draw = families.get(name), families.load_space(name), random.Random(0)
    problems = [problem for problem in _FIELDS if not refusal(family.rules, name, problem)]
    for problem in draw.sample(problems, 5):
        table = CandidateTable.kernels(name, space.compile_values)
        rows = np.array(draw.sample(range(len(table)), min(len(table), 2000)))
        narrow = {parameter: values[:3] for parameter, values in space.launch_values.items()}
        launched = table.with_launches(rows[:400], narrow)
        for candidates, alive in ((table, rows), (launched, np.arange(len(launched))[::7])):
            for rule in family.rules:
                firsts, group = candidates.groups(rule, alive)
                said = [rule(problem, candidates.candidate(int(row)), h200) is None for row in firsts]
                for place in draw.sample(range(len(alive)), min(len(alive), 60)):
                    other = candidates.candidate(int(alive[place]))
                    first = candidates.candidate(int(firsts[group[place]]))
                    is_allowed = rule(problem, other, h200) is None
                    assert is_allowed == said[group[place]], (rule.name, problem, first, other)
                alive = alive[np.array(said, dtype=bool)[group]]  # a rule is asked what others let pass
                if not len(alive):
                    break


@every_generator
def test_rules_read_nothing_of_a_problem_that_they_do_not_declare(name: str, h200: Device) -> None:
    family, draw = families.get(name), random.Random(1)
    kernels = [
        launch for kernel in drawn(name, 120) for launch in (kernel, draw.choice(launches(name, kernel)))
    ]
    compared = dict.fromkeys((rule.name for rule in family.rules), 0)
    for rule in family.rules:
        before = family.rules[: [one.name for one in family.rules].index(rule.name)]
        for kernel in kernels:
            asked = [p for p in _FIELDS if all(one(p, kernel, h200) is None for one in before)]
            said = [rule(problem, kernel, h200) is None for problem in asked]
            for (one, is_allowed), (other, others) in itertools.pairwise(zip(asked, said, strict=True)):
                if agree(rule, one, other):
                    assert is_allowed == others, (rule.name, one, other, kernel)
                    compared[rule.name] += 1
    assert sum(map(bool, compared.values())) > len(compared) // 2


@every_generator
def test_a_rule_that_does_not_declare_the_device_is_not_asked_about_it(name: str, h200: Device) -> None:
    family, problem = families.get(name), usual(name)
    for kernel in accepted(name, problem, h200, 5):
        for rule in family.rules:
            if "device" not in rule.reads:
                assert rule(problem, kernel, None) is None  # type: ignore[arg-type]


@every_generator
def test_launch_parameters_that_no_rule_reads_are_free(name: str, h200: Device) -> None:
    family, problem = families.get(name), usual(name)
    for kernel in accepted(name, problem, h200, 20):
        first, *others = launches(name, kernel)
        for launch in others:
            changed = {p for p, v in launch.launch_params if first[p] != v}
            if not changed & parameters_read(family.rules):
                assert family.check(problem, launch, h200) == family.check(problem, first, h200)


@every_generator
def test_one_object_serves_every_shape(name: str, h200: Device) -> None:
    family = families.get(name)
    for kernel in accepted(name, usual(name), h200, 5):
        keys = [family.kernel_key(Problem.parse(shape), kernel, h200) for shape in SHAPES]
        assert keys[0] == keys[1] == keys[2]
        assert json.loads(json.dumps(keys[0])) == keys[0]
        assert keys[0]["family"] == name and keys[0]["source"] == families.kernel_source_hash(name)
        assert not {"m", "n", "k", "batch"} & set(keys[0])


@every_generator
def test_labels_are_short_and_distinct(name: str, h200: Device) -> None:
    family = families.get(name)
    kernels = accepted(name, usual(name), h200, 1000)
    labels = {family.label(kernel) for kernel in kernels}
    assert len(labels) == len(kernels) and max(map(len, labels)) < 40
    named = [family.label(launch) for launch in launches(name, kernels[0])]
    assert len(set(named)) == len(named), "launches are told apart, too"


@every_generator
def test_load_without_an_object_names_the_remedy(name: str, h200: Device) -> None:
    (kernel,) = accepted(name, usual(name), h200, 1)
    with pytest.raises(ArtifactError, match="run tunegemm tune"):
        families.get(name).load(usual(name), launches(name, kernel)[0], h200, None)


def compiles_clean(pool: CompilePool, pairs: list[tuple[Problem, Candidate]], device: Device) -> None:
    """And into just as much shared memory as was computed."""
    for (problem, kernel), result in zip(pairs, compile_all(pool, pairs, device), strict=True):
        family = families.get(kernel.family)
        assert (verdict := family.check(problem, kernel, device)), (problem, kernel, verdict)
        assert result.failure == "", (problem, kernel)
        assert result.artifact is not None
        resources = result.artifact.resources
        assert resources.spill_bytes == 0 and resources.warnings == ()
        assert resources.smem_bytes == family.smem_bytes(problem, kernel), (problem, kernel)


@every_generator
def test_a_good_kernel_compiles(pool: CompilePool, h200: Device, name: str) -> None:
    examples = examples_of(name)
    compiles_clean(pool, [(examples.problems[0], examples.candidate())], h200)


@pytest.mark.slow
@pytest.mark.timeout(600)
@every_generator
def test_what_is_accepted_compiles_clean_and_to_the_byte(pool: CompilePool, h200: Device, name: str) -> None:
    examples = examples_of(name)
    each = -(-SAMPLE // len(examples.problems))
    pairs = [(p, kernel) for p in examples.problems for kernel in accepted(name, p, h200, each)]
    assert len(pairs) == each * len(examples.problems)
    compiles_clean(pool, pairs + [(p, examples.candidate(corner)) for p, corner in examples.corners], h200)


def _rejections() -> list[object]:
    """Of each family the first is tried always, the others by the slow tests."""
    return [
        pytest.param(
            examples,
            case,
            marks=[pytest.mark.slow] if number else [],
            id=f"{examples.family}-{case.rule}-{number}",
        )
        for examples in EXAMPLES.values()
        for number, case in enumerate(examples.rejected)
    ]


@pytest.mark.parametrize(("examples", "case"), _rejections())
def test_what_is_rejected_fails(pool: CompilePool, h200: Device, examples: Examples, case: Rejection) -> None:
    problem, kernel = case.problem or examples.problems[0], examples.candidate(case.change)
    family = families.get(examples.family)
    assert family.check(problem, kernel, h200).rule == case.rule
    (result,) = compile_all(pool, [(problem, kernel)], h200)
    if case.outcome not in (TOO_LARGE, OTHERWISE):
        assert case.outcome in result.failure
    elif case.outcome == OTHERWISE and result.artifact is None:
        assert "spills" in result.failure
    else:
        assert result.artifact is not None, result.failure
        smem_bytes, limits = result.artifact.resources.smem_bytes, h200.architecture
        blocks = kernel.params.get("occupancy", kernel.params.get("ctas_per_sm", 1))
        if case.outcome == OTHERWISE:
            assert smem_bytes != family.smem_bytes(problem, kernel)
        else:
            assert smem_bytes > limits.smem_bytes_per_block or (
                int(blocks) * (smem_bytes + 1024) > limits.smem_bytes_per_sm
            )


@pytest.mark.parametrize(
    ("examples", "rule", "problem", "change"),
    [
        pytest.param(examples, *objection, id=f"{examples.family}-{objection[0]}-{number}")
        for examples in EXAMPLES.values()
        for number, objection in enumerate(examples.objections)
    ],
)
def test_each_rule_names_its_numbers(
    h200: Device, examples: Examples, rule: str, problem: Problem, change: Change
) -> None:
    verdict = families.get(examples.family).check(problem, examples.candidate(change), h200)
    assert verdict.rule == rule
    assert any(character.isdigit() for character in verdict.reason)


@every_generator
def test_every_rule_can_object(name: str) -> None:
    """No dead rule: each has an example, here or in a test of its own. That of epilogues comes by itself."""
    if name not in EXAMPLES:
        pytest.skip(f'{name} has no Examples; CONTRIBUTING.md, "Adding things", says what they are')
    examples, rules = EXAMPLES[name], families.get(name).rules
    seen = {case.rule for case in examples.rejected} | {rule for rule, *_ in examples.objections}
    assert {rule.name for rule in rules} - {"epilogue"} == seen | examples.elsewhere
    fused = Problem.parse(SHAPES[0], epilogue="relu")
    takes_none = refusal(rules, name, fused) == f"{name} stores products as they are, without relu"
    assert takes_none == ("epilogue" in {rule.name for rule in rules})
