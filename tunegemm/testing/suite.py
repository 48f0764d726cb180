"""Tests of a kernel family: of its space, rules, keys, labels and hash, and of what compiles; without a GPU.

`TUNEGEMM_TEST_SAMPLE=N` compiles N accepted candidates of each, and at least one for each of its problems.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from tunegemm.choose.policies import read_sample
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.pool import CompilePool, CompileResult
from tunegemm.describe.device import Device, find_device
from tunegemm.describe.problem import LAYOUTS, OUTPUT_DTYPES, Problem
from tunegemm.describe.space import Candidate, SearchSpace, Value
from tunegemm.errors import ArtifactError, SpaceError
from tunegemm.generate import families
from tunegemm.generate.family import Generator
from tunegemm.generate.feasibility import Remembered, Rule, parameters_read, refusal
from tunegemm.generate.sources import hash_of_code
from tunegemm.model.feasible import CandidateTable

SAMPLE = read_sample(warnings.warn)
SHAPES = ("4096x4096x4096", "8x16x24", "128x128x128x7")

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
    *(Problem.parse(shape, groups=7) for shape in ("512x768x1024", "60x768x1024", "512x104x1024")),
    *(Problem.parse("512x768x1024", groups=groups) for groups in (2, 64)),
    *(Problem.parse("512x768x1024", epilogue=text) for text in ("bias_n+gelu", "swiglu", "beta_c+amax")),
]


Change = Mapping[str, Value]

OTHERWISE = "another kernel"
"""Marks kernels that the compiler gives more or less shared memory than the formula predicts: it does not
pipeline, specialize or subtile as requested. With one version of it, they may also spill."""
TOO_LARGE = ""
"""Stands for an object that exceeds a limit of the hardware."""


@dataclass(frozen=True)
class Rejection:
    """A kernel that one rule rejects, and the result of compiling it."""

    rule: str
    change: Change
    """To `Examples.good`."""
    outcome: str
    """A part of the compiler's complaint, or `OTHERWISE`, or `TOO_LARGE`."""
    problem: Problem | None = None
    """None for the family's first."""


@dataclass(frozen=True)
class Examples:
    """The examples of one family."""

    family: str
    good: Change
    """Compile-time parameters of a kernel that is feasible for the first problem."""
    launch: Change
    """A launch of it, without optional parameters."""
    problems: Sequence[Problem]
    """Of all dtypes and majors that kernels have."""
    corners: Sequence[tuple[Problem, Change]]
    """Feasible kernels at the borders of the rules on registers and memory, where a spill shows first."""
    rejected: Sequence[Rejection]
    objections: Sequence[tuple[str, Problem, Change]]
    """Rules, and the other kernels and launches that they reject although these may run."""
    elsewhere: frozenset[str] = frozenset()
    """Rules that other tests have examples of."""

    def candidate(self, change: Change | None = None) -> Candidate:
        """The good kernel with changes; with a launch, if a launch parameter changes."""
        change = change or {}
        launch_names = families.get(self.family).parameters["launch"]
        launch = {name: value for name, value in change.items() if name in launch_names}
        kernel = {name: value for name, value in change.items() if name not in launch_names}
        return Candidate.make(
            self.family, {**self.good, **kernel}, {**self.launch, **launch} if launch else {}
        )


def compile_all(
    pool: CompilePool, pairs: Sequence[tuple[Problem, Candidate]], device: Device
) -> list[CompileResult]:
    """Each candidate compiled for its problem, as many at once as the pool has workers."""
    futures = []
    for problem, candidate in pairs:
        family = families.generator(candidate.family)
        futures.append(pool.submit(candidate.family, family.kernel_key(problem, candidate, device)))
    return [future.result() for future in futures]


def agree(rule: Rule, problem: Problem, other: Problem) -> bool:
    """Whether problems agree in all that a rule declares to read of them."""
    read = rule.reads & frozenset(Problem.__dataclass_fields__)
    return all(getattr(problem, name) == getattr(other, name) for name in read)


def drawn(name: str, count: int) -> Iterator[Candidate]:
    """Random kernels of the space, feasible or not, made on demand without listing the space.

    If there are no more than `count`, each once.
    """
    space, generator = families.load_space(name), random.Random(0)
    size, order = space.compile_size, sorted(space.compile_values)
    for number in generator.sample(range(size), size) if size <= count else range(count):
        place = number if size <= count else generator.randrange(size)
        chosen = {}
        for parameter, values in space.compile_values.items():
            place, index = divmod(place, len(values))
            chosen[parameter] = values[index]
        yield Candidate(name, tuple([(parameter, chosen[parameter]) for parameter in order]))


def accepted(name: str, problem: Problem, device: Device, count: int) -> list[Candidate]:
    """Kernels that the rules accept, all of them different."""
    result: dict[Candidate, None] = {}
    family = families.generator(name)
    allow = Remembered(family.rules, problem, device)  # most kernels are rejected, by verdicts already known
    for kernel in drawn(name, 100_000):
        if allow(kernel) and family.check(problem, kernel, device):
            result[kernel] = None
            if len(result) == count:
                break
    return list(result)


def launches(name: str, kernel: Candidate) -> list[Candidate]:
    """The kernel with the first launch, and with each other value of each parameter."""
    values = families.load_space(name).launch_values
    first = kernel.with_launch(**{parameter: list_[0] for parameter, list_ in values.items()})
    others = [first.with_launch(**{p: value}) for p, list_ in values.items() for value in list_[1:]]
    return [first, *others]


def module_of(name: str) -> str:
    """The module that a family's entry point names."""
    points = importlib.metadata.entry_points(group=families.GROUP)
    return families.SHIPPED.get(name) or next(point.module for point in points if point.name == name)


@functools.cache
def made_up(name: str) -> Examples:
    """Examples for a family without any: a kernel that its rules accept."""
    device = find_device("model:h200")
    for problem in (Problem.parse("4096x4096x4096"), Problem.parse("16x4096x4096", dtype="fp16")):
        for kernel in accepted(name, problem, device, 1):
            launch = dict(launches(name, kernel)[0].launch_params)
            return Examples(name, dict(kernel.compile_params), launch, [problem], [], [], [])
    pytest.fail(f"{name}: its rules accept no kernel of 4096x4096x4096; give it Examples")


def compiles_clean(
    family: Generator, pool: CompilePool, pairs: Sequence[tuple[Problem, Candidate]], device: Device
) -> None:
    """Kernels compile without spills, and into just as much shared memory as was computed."""
    for (problem, kernel), result in zip(pairs, compile_all(pool, pairs, device), strict=True):
        assert (verdict := family.check(problem, kernel, device)), (problem, kernel, verdict)
        assert result.failure == "", (problem, kernel)
        assert result.artifact is not None
        resources = result.artifact.resources
        assert resources.spill_bytes == 0 and resources.warnings == ()
        assert resources.smem_bytes == family.smem_bytes(problem, kernel), (problem, kernel)


class Suite:
    """What the classes of tests share. A subclass names its family, by `examples` if it has them."""

    family: ClassVar[str] = ""
    """The name, if there are no examples."""
    examples: ClassVar[Examples | None] = None

    @property
    def _name(self) -> str:
        return self.examples.family if self.examples else self.family

    @pytest.fixture
    def name(self) -> str:
        """The family's."""
        return self._name

    @pytest.fixture
    def h200(self) -> Device:
        """A GPU to compile for."""
        return find_device("model:h200")

    @pytest.fixture(scope="class")
    def compile_pool(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompilePool]:
        """The compile pool; may be overridden by one that keeps its objects."""
        with CompilePool(ArtifactStore(tmp_path_factory.mktemp("objects"))) as pool:
            yield pool

    @property
    def generator(self) -> Generator:
        return families.generator(self._name)  # raises for a library, which has FamilyTests alone

    @property
    def known(self) -> Examples:
        """The examples; for a family without any, a kernel that its rules accept."""
        return self.examples or made_up(self._name)

    @property
    def usual(self) -> Problem:
        """The problem for which every good kernel of the family is feasible: of 4096 rows, or of few."""
        return self.known.problems[0]


class FamilyTests(Suite):
    """For every family, a library's, too."""

    def test_it_is_what_its_entry_point_says(self, name: str) -> None:
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

    def test_its_listed_values_are_expected_and_others_are_not(self, name: str) -> None:
        space = families.load_space(name)
        for parameter, values in {**space.compile_values, **space.launch_values}.items():
            assert all(families.expected(name, parameter, value) is None for value in values)
            assert families.expected(name, parameter, "no such word"), parameter
            assert families.expected(name, parameter, 2**31), parameter

    def test_a_space_with_another_parameter_is_refused(self, name: str, tmp_path: Path) -> None:
        text = families.get(name).space_file.read_text()
        parameter = families.get(name).parameters["compile"][0]
        bad = tmp_path / "space.toml"
        bad.write_text(text.replace(f"\n{parameter} = ", f"\n{parameter}x = ", 1))
        with pytest.raises(SpaceError, match=f"did you mean '{parameter}'"):
            SearchSpace.load(bad, parameters=families.get(name).parameters)

    def test_its_hash_is_of_the_sources_that_it_names(self, name: str) -> None:
        family = families.get(name)
        assert families.kernel_source_hash(name) == (hash_of_code(family.sources) if family.compiled else "")
        assert bool(families.kernel_source_hash(name)) == family.compiled
        compiled = [name for name in families.NAMES if families.get(name).compiled]
        others = {families.kernel_source_hash(other) for other in compiled if other != name}
        assert not family.compiled or families.kernel_source_hash(name) not in others

    def test_rules_answer_for_every_problem(self, name: str, h200: Device) -> None:
        """A verdict is always one line; and a rule that rejects all rejects each."""
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


class GeneratorTests(FamilyTests):
    """For a family whose kernels are compiled: further requirements on its rules, keys and labels.

    One good kernel is compiled. `CompileTests` compile many.
    """

    def test_its_sources_import_no_file_of_its_own_that_is_not_hashed(self, name: str) -> None:
        """But for itself as a package, whose names are of the host's side."""
        sources = self.generator.sources
        package = module_of(name)
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent
        own = [path for path in sources if path.is_relative_to(folder)]
        hashed = {".".join([package, *path.relative_to(folder).with_suffix("").parts]) for path in own}
        hashed |= {module.removesuffix(".__init__") for module in hashed}
        for path in sources:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
                    assert node.module in hashed, path

    def test_other_gpus_are_refused_with_their_name(self, name: str, h200: Device) -> None:
        a100 = find_device("model:a100-sxm-80gb")
        (kernel,) = accepted(name, self.usual, h200, 1)
        verdict = self.generator.check(self.usual, kernel, a100)
        assert verdict or verdict.rule in ("architecture", "shared_memory", "smem", "registers"), verdict

    def test_rules_read_no_parameter_that_they_do_not_declare(self, name: str, h200: Device) -> None:
        """Candidates that agree in a rule's declared parameters get the same verdict from it; no other
        parameter appears in its reason."""
        family, space, draw = self.generator, families.load_space(name), random.Random(0)
        problems = [problem for problem in _FIELDS if not refusal(family.rules, name, problem)]
        for problem in draw.sample(problems, 5):
            table = CandidateTable.kernels(name, space.compile_values)
            rows = np.array(draw.sample(range(len(table)), min(len(table), 2000)))
            narrow = {parameter: values[:3] for parameter, values in space.launch_values.items()}
            launched = table.with_launches(rows[:400], narrow)
            for candidates, alive in ((table, rows), (launched, np.arange(len(launched))[::7])):
                for rule in family.rules:
                    firsts, group = candidates.groups(rule, alive)
                    alike = candidates.candidates(firsts)
                    said = [rule(problem, one, h200) is None for one in alike]
                    places = np.array(draw.sample(range(len(alive)), min(len(alive), 60)))
                    others = candidates.candidates(alive[places])
                    for other, number in zip(others, group[places], strict=True):
                        is_allowed = rule(problem, other, h200) is None
                        assert is_allowed == said[number], (rule.name, problem, alike[number], other)
                    alive = alive[np.array(said, dtype=bool)[group]]  # a rule is asked what others let pass
                    if not len(alive):
                        break

    def test_rules_read_nothing_of_a_problem_that_they_do_not_declare(self, name: str, h200: Device) -> None:
        family, draw = self.generator, random.Random(1)
        kernels = [
            launch for kernel in drawn(name, 120) for launch in (kernel, draw.choice(launches(name, kernel)))
        ]
        compared = dict.fromkeys((rule.name for rule in family.rules), 0)
        for kernel in kernels:
            asked = _FIELDS
            for rule in family.rules:
                said = [rule(problem, kernel, h200) is None for problem in asked]
                for (item, is_allowed), (other, others) in itertools.pairwise(zip(asked, said, strict=True)):
                    if agree(rule, item, other):
                        assert is_allowed == others, (rule.name, item, other, kernel)
                        compared[rule.name] += 1
                asked = [*itertools.compress(asked, said)]  # a rule is asked what others let pass
        assert sum(map(bool, compared.values())) > len(compared) // 2

    def test_a_rule_that_does_not_declare_the_device_is_not_asked_about_it(
        self, name: str, h200: Device
    ) -> None:
        family, problem = self.generator, self.usual
        for kernel in accepted(name, problem, h200, 5):
            for rule in family.rules:
                if "device" not in rule.reads:
                    assert rule(problem, kernel, None) is None  # type: ignore[arg-type]

    def test_launch_parameters_that_no_rule_reads_are_free(self, name: str, h200: Device) -> None:
        family, problem = self.generator, self.usual
        for kernel in accepted(name, problem, h200, 20):
            first, *others = launches(name, kernel)
            for launch in others:
                changed = {p for p, v in launch.launch_params if first[p] != v}
                if not changed & parameters_read(family.rules):
                    assert family.check(problem, launch, h200) == family.check(problem, first, h200)

    def test_one_object_serves_every_shape(self, name: str, h200: Device) -> None:
        family = self.generator
        for kernel in accepted(name, self.usual, h200, 5):
            keys = [family.kernel_key(Problem.parse(shape), kernel, h200) for shape in SHAPES]
            assert keys[0] == keys[1] == keys[2]
            assert json.loads(json.dumps(keys[0])) == keys[0]
            assert keys[0]["family"] == name and keys[0]["source"] == families.kernel_source_hash(name)
            assert not {"m", "n", "k", "batch"} & set(keys[0])

    def test_labels_are_short_and_distinct(self, name: str, h200: Device) -> None:
        family = self.generator
        kernels = accepted(name, self.usual, h200, 1000)
        labels = {family.label(kernel) for kernel in kernels}
        assert len(labels) == len(kernels) and max(map(len, labels)) < 40
        named = [family.label(launch) for launch in launches(name, kernels[0])]
        assert len(set(named)) == len(named), "launches are told apart, too"

    def test_load_without_an_object_names_the_remedy(self, name: str, h200: Device) -> None:
        (kernel,) = accepted(name, self.usual, h200, 1)
        with pytest.raises(ArtifactError, match="run tunegemm tune"):
            self.generator.load(self.usual, launches(name, kernel)[0], h200, None)

    def test_a_good_kernel_compiles(self, compile_pool: CompilePool, h200: Device) -> None:
        compiles_clean(self.generator, compile_pool, [(self.usual, self.known.candidate())], h200)

    def test_each_rule_names_its_numbers(self, h200: Device) -> None:
        for rule, problem, change in self.known.objections:
            verdict = self.generator.check(problem, self.known.candidate(change), h200)
            assert verdict.rule == rule, (problem, change, verdict)
            assert any(character.isdigit() for character in verdict.reason), verdict

    def test_every_rule_can_object(self, name: str) -> None:
        """No rule is dead: each has an example, or a test elsewhere. Rules of epilogues and of rows in groups
        need none.
        """
        if self.examples is None:
            pytest.skip(f'{name} has no Examples; CONTRIBUTING.md, "Adding things", explains them')
        examples, rules = self.examples, self.generator.rules
        seen = {case.rule for case in examples.rejected} | {rule for rule, *_ in examples.objections}
        assert {rule.name for rule in rules} - {"epilogue", "rows_together"} == seen | examples.elsewhere
        fused = Problem.parse(SHAPES[0], epilogue="relu")
        takes_none = refusal(rules, name, fused) == f"{name} stores products as they are, without relu"
        assert takes_none == ("epilogue" in {rule.name for rule in rules})


class CompileTests(Suite):
    """For a family whose kernels are compiled: compiles accepted and rejected kernels, for some minutes."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each rejected example is a test."""
        if "rejected" in metafunc.fixturenames:
            cases = metafunc.cls.examples.rejected if metafunc.cls.examples else ()
            names = [f"{case.rule}-{number}" for number, case in enumerate(cases)]
            metafunc.parametrize("rejected", cases, ids=names)

    @pytest.mark.timeout(600)
    def test_what_is_accepted_compiles_clean_and_to_the_byte(
        self, compile_pool: CompilePool, h200: Device, name: str
    ) -> None:
        examples = self.known
        each = -(-SAMPLE // len(examples.problems))
        pairs = [(p, kernel) for p in examples.problems for kernel in accepted(name, p, h200, each)]
        assert len(pairs) == each * len(examples.problems)
        pairs += [(p, examples.candidate(corner)) for p, corner in examples.corners]
        compiles_clean(self.generator, compile_pool, pairs, h200)

    def test_what_is_rejected_fails(
        self, compile_pool: CompilePool, h200: Device, rejected: Rejection
    ) -> None:
        examples, family = self.known, self.generator
        problem, kernel = rejected.problem or examples.problems[0], examples.candidate(rejected.change)
        assert family.check(problem, kernel, h200).rule == rejected.rule
        (result,) = compile_all(compile_pool, [(problem, kernel)], h200)
        if rejected.outcome not in (TOO_LARGE, OTHERWISE):
            assert rejected.outcome in result.failure
        elif rejected.outcome == OTHERWISE and result.artifact is None:
            assert "spills" in result.failure
        else:
            assert result.artifact is not None, result.failure
            smem_bytes, limits = result.artifact.resources.smem_bytes, h200.architecture
            blocks = kernel.params.get("occupancy", kernel.params.get("ctas_per_sm", 1))
            if rejected.outcome == OTHERWISE:
                assert smem_bytes != family.smem_bytes(problem, kernel)
            else:
                assert smem_bytes > limits.smem_bytes_per_block or (
                    int(blocks) * (smem_bytes + 1024) > limits.smem_bytes_per_sm
                )
