"""Packs: written, verified and served from, with real compiled kernels; bad ones are refused by name."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import resource
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.commands import printed as run
from tests.support.forks import Forks
from tests.support.processes import environment
from tunegemm.choose.snapshot import read_snapshot
from tunegemm.compile.artifacts import ArtifactStore
from tunegemm.compile.triton_object import read_object
from tunegemm.describe.device import Fingerprint, find_device
from tunegemm.describe.problem import Problem
from tunegemm.describe.space import Candidate
from tunegemm.errors import ArtifactError, PackError
from tunegemm.generate import families
from tunegemm.generate.cublaslt import TORCH_MM
from tunegemm.report.explain import candidate_of
from tunegemm.store import Record, packing, packs
from tunegemm.store.layers import read_records
from tunegemm.store.shipped import write_records
from tunegemm.store.validity import judge_stored

DEVICE = find_device("model:h200")
CUTE, TRITON, TORCH = (Problem.parse(shape) for shape in ("512x512x512", "768x512x512", "64x64x64"))


def record(problem: Problem, candidate: Candidate) -> Record:
    source = families.kernel_source_hash(candidate.family)
    at = datetime(2026, 11, 21, tzinfo=UTC)
    label = families.get(candidate.family).label(candidate)
    return Record(
        problem, candidate, DEVICE.fingerprint, label, 9.0, 10.0, 10 / 9, 0.01, 1e-3, True, at, source
    )


RECORDS = [
    record(CUTE, candidate_of("cute_sm90")),
    record(TRITON, candidate_of("triton_tma")),
    record(TORCH, TORCH_MM),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> packing.Packed:
    """A pack of two kernels, compiled here."""
    return packing.pack(RECORDS, tmp_path_factory.mktemp("made") / "a.pack", workers=1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A serving host: no databases, no objects, no shipped records."""
    monkeypatch.delenv("TUNEGEMM_DB", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("TUNEGEMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tunegemm.store.shipped.data_path", lambda *_: tmp_path / "none")
    monkeypatch.chdir(tmp_path)
    yield tmp_path


def test_the_same_records_give_the_same_bytes(made: packing.Packed, tmp_path: Path) -> None:
    assert (made.records, made.objects, made.left_out) == (3, 2, {})
    again = packing.pack(reversed(RECORDS), tmp_path / "b.pack")
    assert again.compiled == 0 and again.path.read_bytes() == made.path.read_bytes()
    assert again.sha256 == made.sha256 == hashlib.sha256(made.path.read_bytes()).hexdigest()


def test_an_entry_of_64_mib_is_listed_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 64 << 20)
    packs.write_manifest(tmp_path, toolchain={})
    os.truncate(tmp_path / "large", (64 << 20) + 1)
    with pytest.raises(PackError, match=r"entry large has over 67108864 B; pack fewer records"):
        packs.write_manifest(tmp_path, toolchain={})


def test_a_loaded_pack_serves_records_and_kernels(made: packing.Packed, home: Path) -> None:
    assert len(read_snapshot()) == 0
    packs.install(made.path)
    found = read_snapshot().find(CUTE, DEVICE.fingerprint)
    assert found is not None and found.layer == "pack"
    for one in RECORDS[:2]:
        key = families.get(one.candidate.family).kernel_key(one.problem, one.candidate, DEVICE)
        artifact = packs.find(key)
        assert artifact is not None and artifact.path.is_relative_to(packs.user_folder())
        assert artifact.resources.registers > 0
    assert read_object(artifact.path.read_bytes())[1].startswith(b"\x7fELF")


@pytest.mark.parametrize("is_shipped", [False, True])
def test_kernels_of_packs_and_of_the_package_are_packed_as_they_are(
    made: packing.Packed, home: Path, monkeypatch: pytest.MonkeyPatch, is_shipped: bool
) -> None:
    """Their records are, too: nothing is compiled for them again, nor said to be missing."""
    pack = packs.install(made.path, home if is_shipped else None)
    monkeypatch.setattr(packs, "shipped", lambda: pack if is_shipped else None)
    again = packing.pack(RECORDS, home / "again.pack", compile_missing=False)
    assert again.compiled == 0 and again.path.read_bytes() == made.path.read_bytes()


def test_tritons_kernels_do_without_triton_and_cutes_not(home: Path) -> None:
    """The pack's compiler is part of the key, not the one that is here."""
    without = replace(DEVICE.fingerprint, triton="", cutlass_dsl="")
    usable = [judge_stored(replace(one, layer="pack"), without).usable for one in RECORDS]
    assert usable == [False, True, True]
    assert not judge_stored(replace(RECORDS[1], layer="user"), without).usable


def test_other_compilers_here_find_the_packs_objects(
    made: packing.Packed, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs.install(made.path)
    family = families.get("triton_tma")
    monkeypatch.setattr("tunegemm.compile.triton_object.package_version", lambda _: "")
    key = family.kernel_key(TRITON, RECORDS[1].candidate, DEVICE)
    assert key["triton"] == "" and packs.find(key) is not None
    assert packs.find({**key, "source": "another"}) is None


def test_an_object_for_another_runtime_library_is_not_launched(made: packing.Packed, home: Path) -> None:
    """Of the DSL, whose minor versions promise nothing. A tuning may try it: it compares results."""
    packs.install(made.path)
    key = families.get("cute_sm90").kernel_key(CUTE, RECORDS[0].candidate, DEVICE)
    for version, found in (("4.8.99+cu12", True), ("4.9.0+cu13", False), ("5.8.1", False), ("", True)):
        assert (packs.find({**key, "cutlass_dsl": version}) is not None) == found
    (pack,) = packs.loaded([])
    assert {**key, "cutlass_dsl": "4.9.0+cu13"} in pack


_SERVE = """
import importlib.abc, sys
BLOCKED = {"alembic", "click", "numpy", "nvmath", "optuna", "pandas", "psutil", "rich", "sqlalchemy"}
BLOCKED |= {"triton", "typer"}
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(name, name=name)
for name in [name for name in sys.modules if name.partition(".")[0] in BLOCKED]:  # torch may have some
    del sys.modules[name]
sys.meta_path.insert(0, Block())
from tunegemm.generate import families
from tunegemm.describe.device import find_device
from tunegemm.choose.snapshot import read_snapshot
from tunegemm.store import packs
from tunegemm.describe.problem import Problem
snapshot, device = read_snapshot(), find_device("model:h200")
assert not snapshot.warnings, snapshot.warnings
found = {}
for shape in ("512x512x512", "768x512x512"):
    problem = Problem.parse(shape)
    record = snapshot.find(problem, device.fingerprint)
    family = families.get(record.candidate.family)
    assert family.unavailable(launching=True) is None
    assert family.check(problem, record.candidate, device)
    found[family.name] = packs.find(family.kernel_key(problem, record.candidate, device)).path
from tunegemm.generate.cute_launch import load_function
assert callable(load_function(found["cute_sm90"]))
assert "cutlass" not in sys.modules
print(sorted(found))
"""


def test_serving_needs_only_torch_and_the_loaders(made: packing.Packed, home: Path, forks: Forks) -> None:
    places = environment(TUNEGEMM_PACK=str(made.path))
    done = forks.run(_SERVE, env=places)
    assert done.stdout == "['cute_sm90', 'triton_tma']\n", done.stderr


Entries = list[tuple[tarfile.TarInfo, bytes]]


def rewrite(source: Path, target: Path, change: Callable[[Entries], object]) -> Path:
    with tarfile.open(source) as tar:
        entries = [(member, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    change(entries)
    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as tar:
        for header, content in entries:
            if header.isreg():
                header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return target


def edited(position: int, change: Callable[[bytes], bytes]) -> Callable[[Entries], None]:
    def apply(entries: Entries) -> None:
        entries[position] = entries[position][0], change(entries[position][1])

    return apply


def manifest(change: Callable[[dict], object]) -> Callable[[Entries], None]:  # type: ignore[type-arg]
    def apply(content: bytes) -> bytes:
        data = json.loads(content)
        change(data)
        return json.dumps(data).encode()

    return edited(0, apply)


def outside(entries: Entries) -> None:
    """A consistent pack whose entry would be written beside the folder."""
    manifest(lambda data: data["entries"][0].update(name="objects/../../evil.json"))(entries)
    entries[1][0].name = "objects/../../evil.json"


def link(entries: Entries) -> None:
    entries[1][0].type, entries[1][0].linkname = tarfile.SYMTYPE, "/etc/passwd"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (edited(1, lambda content: content[:-1] + b"\0"), r"entry objects/\w\w/\w+\.json was changed"),
        (edited(2, lambda content: content + b" "), r"entry objects/\w\w/\w+\.o is missing or was changed"),
        (edited(-2, lambda content: content.replace(b"512", b"513")), r"entry records/NVIDIA-H200\.json was"),
        (lambda entries: entries.pop(3), r"entry objects/\w\w/\w+\.json is missing"),
        (lambda entries: entries.append(entries[-2]), r"has entries that manifest\.json does not list"),
        (lambda entries: entries.pop(), r"manifest\.json was changed, or the end is missing"),
        (manifest(lambda data: data.update(tunegemm="9")), r"manifest\.json was changed"),
        (lambda entries: entries.reverse(), "not a pack, or repacked"),
        (
            lambda entries: setattr(entries[0][0], "name", "../evil.json"),
            "not a pack, or repacked",
        ),
        (lambda entries: setattr(entries[0][0], "mtime", 1), "not a pack, or repacked"),
        (manifest(lambda data: data.update(format="tunegemm-pack/2")), "'tunegemm-pack/2'; this tunegemm re"),
        (manifest(lambda data: data.pop("toolchain")), r"manifest.json cannot be read \('toolchain'\)"),
        (manifest(lambda data: data["entries"].append(data["entries"][0])), "an entry twice"),
        (manifest(lambda data: data["entries"][0].update(bytes=3)), r"\.json is missing or was changed"),
        (manifest(lambda data: data["entries"][0].update(bytes=-1)), r"\.json -1 is not a whole number"),
        (manifest(lambda data: data["entries"][0].update(bytes=1 << 40)), r"\.json 1099511627776 is not"),
        (outside, r"entry 'objects/\.\./\.\./evil\.json' is neither a record nor an object"),
        (link, r"\.json is missing or was changed"),
    ],
)
def test_an_edited_pack_is_refused(
    made: packing.Packed, home: Path, change: Callable[[Entries], object], named: str
) -> None:
    bad = rewrite(made.path, home / "bad.pack", change)
    with pytest.raises(PackError, match=named) as raised:
        packs.install(bad)
    assert "\n" not in str(raised.value)
    assert list(packs.user_folder().iterdir()) == [] and not list(home.rglob("evil*"))


def test_a_cut_pack_is_refused(made: packing.Packed, home: Path) -> None:
    """Wherever it is cut, the entry that is not whole is named."""
    content = made.path.read_bytes()
    with tarfile.open(made.path) as tar:
        members = tar.getmembers()
    cut = home / "cut.pack"
    for member in members:
        head, body = member.offset, member.offset_data
        for end in (head, head + 100, body, body + member.size - 1):
            cut.write_bytes(content[:end])
            is_cut_at_first = end < members[0].offset_data
            named = "not a pack" if is_cut_at_first else rf"(within|entry) {member.name}|the end is missing"
            with pytest.raises(PackError, match=named):
                packs.install(cut)
    cut.write_bytes(b"no tar at all" * 100)
    with pytest.raises(PackError, match="not a pack"):
        packs.install(cut)
    assert list(packs.user_folder().iterdir()) == []


def test_any_changed_byte_is_found(made: packing.Packed, home: Path) -> None:
    content, generator, bad = made.path.read_bytes(), random.Random(0), home / "bad.pack"
    with tarfile.open(made.path) as tar:
        headers = [member.offset for member in tar]
    for number in range(100):
        changed = bytearray(content)
        place = generator.choice(headers) + generator.randrange(512) if number % 2 else None
        place = generator.randrange(len(content)) if place is None else place
        changed[place] ^= 1 << generator.randrange(8)
        bad.write_bytes(changed)
        with pytest.raises(PackError):
            packs.install(bad)
    assert list(packs.user_folder().iterdir()) == []


def test_a_kernel_altered_after_loading_is_refused(made: packing.Packed, home: Path) -> None:
    pack = packs.install(made.path)
    for path in pack.folder.glob("objects/*/*.o"):
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    key = families.get("cute_sm90").kernel_key(CUTE, RECORDS[0].candidate, DEVICE)
    with pytest.raises(ArtifactError, match="its bytes changed"):
        packs.find(key)


def test_installing_at_once_gives_one(made: packing.Packed, home: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        loaded = list(threads.map(lambda _: packs.install(made.path), range(16)))
    assert len({pack.folder for pack in loaded}) == 1
    assert [path.name for path in packs.user_folder().iterdir()] == [loaded[0].name]


def test_a_full_disk_keeps_the_old_pack(made: packing.Packed, tmp_path: Path) -> None:
    out = tmp_path / "a.pack"
    out.write_bytes(b"the old one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = tmp_path / "content"
    (folder / "records").mkdir(parents=True)
    (folder / "records" / "A.json").write_bytes(bytes(1 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))  # what the kernel refuses as a full disk does
    try:
        with pytest.raises(PackError, match=r"a\.pack: File too large; choose another --out"):
            packs.write(folder, out, toolchain={}, fingerprints=[])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert out.read_bytes() == b"the old one" and {path.name for path in tmp_path.iterdir()} == {
        "a.pack",
        "content",
    }


def test_records_of_other_compilers_and_sources_are_left_out(tmp_path: Path, home: Path) -> None:
    older: Fingerprint = replace(DEVICE.fingerprint, cutlass_dsl="4.2.0")
    records = [
        replace(RECORDS[0], fingerprint=older),
        replace(RECORDS[1], kernel_source="0" * 16),
        RECORDS[2],
    ]
    packed = packing.pack(records, tmp_path / "a.pack")
    assert packed.records == 1 and packed.objects == 0
    assert [reason.partition(" (")[0] for reason in packed.left_out] == [
        "cutlass_dsl 4.2.0", "kernel sources of triton_tma changed since",
    ]  # fmt: skip
    with pytest.raises(PackError, match=r"no record to pack: cutlass_dsl 4\.2\.0"):
        packing.pack(records[:1], tmp_path / "b.pack")


def test_a_bad_pack_in_the_environment_costs_only_itself(
    made: packing.Packed, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs.install(made.path)
    monkeypatch.setenv("TUNEGEMM_PACK", str(home / "none.pack"))
    snapshot = read_snapshot()
    assert len(snapshot) == 3 and snapshot.warnings == (
        f"{home / 'none.pack'}: No such file or directory; give a file from `tunegemm pack`",
    )


def test_the_commands(made: packing.Packed, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(RECORDS, home / "none")
    out, _ = run("pack", "--out", "t.pack", "--shape", TORCH.shape, "--gpu", "h200", "--no-compile")
    assert "wrote t.pack: 1 record of NVIDIA H200, 0 kernels (0 compiled now)" in out
    _, told = run("pack", "--out", "c.pack", "--no-compile", code=2)
    assert f"2 of 2 kernels are missing in {ArtifactStore().root}" in told and not Path("c.pack").exists()
    _, told = run("pack", "--out", "c.pack", "--families", "gluon_wgmma", code=2)
    assert "none of 3 records matches 'gluon_wgmma'; `tunegemm leaderboard" in told
    _, told = run("pack", "--out", "c.pack", "--gpu", "b200", "--shape", TORCH.shape, code=2)
    assert f"none of 3 records matches 'b200', '{TORCH.shape}'" in told
    Path("shapes.json").write_text(json.dumps([{"m": 64, "n": 64, "k": 64, "layout": "tn", "dtype": "bf16"}]))
    _, told = run("pack", "--out", "c.pack", "--from", "none.json", code=2)
    assert "none.json: No such file" in told

    _, told = run("load", made.path, "--sha256", "0" * 64, code=2)
    assert f"its SHA-256 is {made.sha256}, not 000" in told
    out, _ = run("load", made.path, "--sha256", made.sha256.upper())
    name = made.sha256[:16]
    assert f"as {name}: 3 records of NVIDIA H200, 2 kernels" in out
    out, _ = run("db", "layers")
    assert f"pack          3 records  {packs.user_folder() / name}" in out
    assert {one.layer for one in read_records()[0]} == {"system", "pack"}
    _, told = run("unload", "ffff", code=2)
    assert f"pack 'ffff' is not loaded; loaded: {name}" in told
    assert f"{name} ({made.path.name})" in told
    for known in (name[:6], made.path.name, made.path.stem):
        assert run("unload", known)[0] == f"unloaded {name}\n"
        run("load", made.path)
    run("unload", name)
    assert {one.layer for one in read_records()[0]} == {"system"}
    run("unload", code=2)


def test_of_a_problem_the_record_of_the_narrowest_layer_is_packed() -> None:
    """A database that is opened by name is narrower than every layer."""
    layers = ["project", "", "system", "user", "pack"]
    same = [replace(RECORDS[0], layer=layer) for layer in layers]
    assert [each.layer for each in packing.distinct(same[2:])] == ["user"]
    assert [each.layer for each in packing.distinct(same)] == [""]


def test_families_that_cannot_be_launched_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = {"cute_sm90": "lacks x", "triton_tma": None}
    monkeypatch.setattr(
        families,
        "get",
        lambda name: SimpleNamespace(unavailable=lambda launching: lacks[name] if launching else ""),
    )
    assert packing.cannot_launch(RECORDS) == {"cute_sm90": "lacks x"}
