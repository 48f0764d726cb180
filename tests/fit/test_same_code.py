"""Which kernels are the same machine code: what is compared, and what becomes of records."""

from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from fit.same_code import cubin_of, rekey, shipped
from tunegemm.generate.families import kernel_source_hash
from tunegemm.store.shipped import read_shipped, write_records

RECORDS = Path(__file__).parents[2] / "db" / "records"


def elf(machine: int, code: bytes) -> bytes:
    """An ELF file with one section of bytes and one that has none in the file."""
    sections = 64 + len(code)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, sections, 0, 64, 56, 0, 64, 2, 0
    )
    rows = [(1, 64, len(code)), (8, 64, 1 << 30)]
    table = [struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, size, 0, 0, 1, 0) for kind, at, size in rows]
    return header + code + b"".join(table)


def test_the_cubin_is_cut_out_whole() -> None:
    cubin = elf(190, b"\x01\x02\x03" * 11)
    assert cubin_of(elf(62, b"host code" + b"x" * 40)[:96] + cubin + b"what follows") == cubin
    for content in (elf(62, b"host code"), cubin + cubin):
        with pytest.raises(ValueError, match="cubins in an object, not one"):
            cubin_of(content)


def test_records_of_the_same_kernels_get_todays_hash(tmp_path: Path) -> None:
    """The others stay as they are, to the byte."""
    chosen = [record for record in read_shipped(RECORDS)[0] if record.candidate.family != "cublaslt"][:40]
    old = [replace(record, kernel_source="0" * 16) for record in chosen]
    write_records(old, tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    sources = dict.fromkeys(("cute_sm90", "skinny", "gluon_wgmma", "triton_tma"), "0" * 16)
    everything = {job.key: True for job in shipped()}
    assert rekey({}, sources, tmp_path) == (0, len(old))
    assert rekey(everything, dict.fromkeys(sources, "1" * 16), tmp_path) == (0, len(old)), "of other sources"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
    jobs = {job.key: job.family == "skinny" for job in shipped()}
    changed, left = rekey(jobs, sources, tmp_path)
    after = read_shipped(tmp_path)[0]
    skinny = [record for record in after if record.candidate.family == "skinny"]
    assert (changed, left) == (len(skinny), len(old) - len(skinny)) and changed > 0 and left > 0
    assert {record.kernel_source for record in skinny} == {kernel_source_hash("skinny")}
    assert all(r.kernel_source == "0" * 16 for r in after if r.candidate.family != "skinny")


def test_the_shipped_files_are_as_they_would_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    shutil.copytree(RECORDS, folder)
    write_records(read_shipped(folder)[0], folder)
    for path in RECORDS.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
