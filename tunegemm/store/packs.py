"""Packs: tuned records and their compiled kernels in one file, for hosts that compile and tune nothing.

A pack is an uncompressed tar of `manifest.json`, then exactly the entries that it lists, in its order, each
with its size and SHA-256 (``records/GPU.json`` as in db/records, ``objects/ab/cdef.o`` and ``.json`` as in
the object store), and the manifest's own SHA-256. Unpacked it is a folder of the same layout, so that a
kernel passes the checks of `ArtifactStore` whenever it is loaded. Not compressed: the same records give the
same bytes everywhere, no entry can grow while it is read, and the entry at which a file is cut or edited can
be named.

The hashes tell of damage, not of malice: objects are native code, and the maker of a pack is trusted as the
author of a package is. `install` takes the SHA-256 of the whole file for those who fetch it from elsewhere.
Nothing here loads torch or SQLAlchemy.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import tunegemm
from tunegemm.compile.artifacts import Artifact, ArtifactStore, Key, digest
from tunegemm.errors import BadValueError, PackError, one_line
from tunegemm.files import cause, kind, replacing
from tunegemm.generate.families import kernel_source_hash
from tunegemm.resources import data_path, user_path
from tunegemm.store.checks import record_objection
from tunegemm.store.record import Record
from tunegemm.store.shipped import read_shipped
from tunegemm.store.validity import is_patch
from tunegemm.untrusted import decoded, line, shown, whole

_log = logging.getLogger(__name__)

FORMAT = "tunegemm-pack/1"
_DSL = "cutlass_dsl"
_MANIFEST, _CLOSING = "manifest.json", "manifest.sha256"
_ENTRY = re.compile(
    r"records/[A-Za-z0-9][A-Za-z0-9.-]{0,120}\.json|objects/[0-9a-f]{2}/[0-9a-f]{62}\.(o|json)"
)
#: Beside the entries of a loaded pack: the name of its file.
_LOADED_FROM = "loaded_from"
#: An object is some 50 kB, a record 1 kB: a file a thousand times larger is not one of our packs.
_LARGEST_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class Pack:
    """An unpacked pack in one of the user's folders."""

    folder: Path
    """Its name is the start of the SHA-256 of the file."""
    version: str
    """The version of the tunegemm that made it."""
    toolchain: Mapping[str, str]
    """Compilers of its objects, by their names in kernel keys, which hold these values."""
    records: tuple[Record, ...]
    is_package: bool = False
    """Whether it lies in the package: `shipped`."""

    @property
    def name(self) -> str:
        """Its name for `tunegemm unload`."""
        return self.folder.name

    def find(self, key: Key) -> Artifact | None:
        """Its object for a kernel key, whatever compilers are here. Raises as `ArtifactStore.find`."""
        return self.store.find(self._key(key))

    def suits(self, key: Key) -> bool:
        """Whether its object for a kernel key works with the DSL runtime library here, if there is one.

        Triton's objects need none.
        """
        there, here = self.toolchain.get(_DSL, ""), str(key.get(_DSL, ""))
        return not (there and here) or is_patch(_DSL, there, here)

    def __contains__(self, key: Key) -> bool:
        """Whether `find` would look at an object."""
        return digest(self._key(key)) in self._names

    def each_key(self) -> Iterator[Key]:
        """The key of each of its objects."""
        return self.store.each_key()

    def _key(self, key: Key) -> Key:
        return {**key, **{name: version for name, version in self.toolchain.items() if name in key}}

    @cached_property
    def _names(self) -> set[str]:
        return self.store.names()

    @property
    def store(self) -> ArtifactStore:
        """Its objects, by the compilers that they are of."""
        return ArtifactStore(self.folder, is_package=self.is_package)

    def objects(self) -> int:
        """The number of kernels in it."""
        return sum(1 for _ in self.folder.glob("objects/*/*.o"))


def user_folder() -> Path:
    """The folder into which `tunegemm load` puts packs."""
    return user_path("data") / "packs"


def loaded(warnings: list[str]) -> list[Pack]:
    """The packs in use: loaded ones, and the file that ``TUNEGEMM_PACK`` names.

    That file is unpacked beside the object store at first use. Adds a warning for each bad pack.
    """
    result = {}
    openings = [functools.partial(_open, folder) for folder in installed()]
    if file := os.environ.get("TUNEGEMM_PACK"):
        openings.append(functools.partial(install, Path(file), ArtifactStore().root.parent / "packs"))
    for opening in openings:
        try:
            pack = opening()
            result[pack.name] = pack
        except (PackError, OSError) as error:
            warnings.append(str(error))
    return list(result.values())


@functools.cache
def shipped() -> Pack | None:
    """The kernels of the shipped records, which `make kernels` compiles into the package; None without them.

    Their records are the system layer's. A damaged pack is reported once and not used.
    """
    try:
        folder = data_path("db", "kernels")
        facts = _parse((folder / _MANIFEST).read_bytes(), folder)
    except FileNotFoundError:
        return None
    except (OSError, PackError) as error:
        _log.warning("the kernels that ship with the package cannot be used: %s", error)
        return None
    return Pack(folder, facts["tunegemm"], facts["toolchain"], (), is_package=True)


def find(key: Key) -> Artifact | None:
    """The object for a kernel key: from the user's store, else a pack, else the package, if it suits the
    runtime library here.

    Raises as `ArtifactStore.find`.
    """
    if (result := ArtifactStore().find(key)) is not None:
        return result
    places = (*loaded([]), shipped())
    suited = (pack for pack in places if pack and pack.suits(key))
    return next((result for pack in suited if (result := pack.find(key)) is not None), None)


def install(file: Path, root: Path | None = None, *, sha256: str | None = None) -> Pack:
    """Verify a pack and unpack it into a folder of `root`, by default the user's; all of it or nothing.

    sha256: expected hash of the whole file. Raises PackError, which names the bad entry.
    """
    root = root or user_folder()
    digest = file_digest(file)
    if sha256 is not None and digest != sha256.lower():
        raise PackError(f"{file}: its SHA-256 is {digest}, not {sha256}; fetch it again")
    final = root / digest[:16]
    if not final.is_dir():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=root, prefix=".new-") as scratch:
                fresh = Path(scratch, "pack")
                _unpack(file, fresh)
                own(fresh)
                _check(_read_records(fresh, file), file)
                (fresh / _LOADED_FROM).write_text(file.name)
                if not final.is_dir():
                    fresh.rename(final)
        except OSError as error:
            if not final.is_dir():  # unless another process was first
                raise PackError(f"{root}: {cause(error, f'load {file} again')}") from None
    return _open(final)


def _loaded_from(folder: Path) -> str:
    """The name of the file that a pack was loaded from; empty if an older version did not record it."""
    try:
        return (folder / _LOADED_FROM).read_text()
    except (OSError, ValueError):
        return ""


def remove(name: str) -> str:
    """Delete a loaded pack and return its name.

    name: the pack's name or its beginning, or the name of the file that it was loaded from, with or without
    the suffix. Raises PackError, which lists the loaded packs.
    """
    files = {folder: _loaded_from(folder) for folder in installed()}
    chosen = [
        folder for folder, file in files.items()
        if name and (folder.name.startswith(name) or Path(name).name in (file, Path(file).stem))
    ]  # fmt: skip
    if len(chosen) != 1:
        fault = "matches several packs" if chosen else "is not loaded"
        listed = ", ".join(
            f"{folder.name} ({file})" if file else folder.name for folder, file in files.items()
        )
        raise PackError(f"pack {name!r} {fault}; loaded: {listed or 'none'}")
    try:
        with tempfile.TemporaryDirectory(dir=chosen[0].parent, prefix=".old-") as scratch:
            chosen[0].rename(Path(scratch, "pack"))  # atomic for other processes; deleted afterwards
    except OSError as error:
        raise PackError(f"{chosen[0]}: {error.strerror}; nothing was unloaded") from None
    forget()
    return chosen[0].name


def forget() -> None:
    """Loaded packs are read again, as in the next process."""
    _open.cache_clear()


def write_manifest(folder: Path, *, toolchain: Mapping[str, str]) -> None:
    """Write the manifest that `shipped` reads into a folder of objects."""
    _, text = _manifest(folder, folder, toolchain, ())
    (folder / _MANIFEST).write_bytes(text)


def _manifest(
    folder: Path, out: Path, toolchain: Mapping[str, str], fingerprints: Iterable[Any]
) -> tuple[dict[str, bytes], bytes]:
    """The entries of a folder, and the manifest that lists them."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    contents = {name: (folder / name).read_bytes() for name in names}
    if large := [name for name, content in contents.items() if len(content) > _LARGEST_BYTES]:
        raise PackError(f"{out}: entry {large[0]} has over {_LARGEST_BYTES} B; pack fewer records at a time")
    manifest = {
        "format": FORMAT,
        "tunegemm": tunegemm.__version__,
        "toolchain": dict(toolchain),
        "fingerprints": list(fingerprints),
        "entries": [
            {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        ],
    }
    return contents, json.dumps(manifest, indent=1, sort_keys=True).encode() + b"\n"


def write(folder: Path, out: Path, *, toolchain: Mapping[str, str], fingerprints: Iterable[Any]) -> str:
    """Write the entries of a folder as a pack and return its SHA-256. `out` is replaced as a whole.

    fingerprints: of its records, as JSON objects. Raises PackError if the pack cannot be written; the
    previous file stays.
    """
    contents, text = _manifest(folder, out, toolchain, fingerprints)
    with replacing(out, PackError) as part:
        with part.open("wb") as stream:
            closing = hashlib.sha256(text).hexdigest().encode()
            for name, content in ((_MANIFEST, text), *contents.items(), (_CLOSING, closing)):
                padding = bytes(-len(content) % tarfile.BLOCKSIZE)
                stream.write(_header(name, len(content)) + content + padding)
            stream.write(bytes(2 * tarfile.BLOCKSIZE))  # the end of a tar
        return file_digest(part)


def file_digest(file: Path) -> str:
    """SHA-256 of a file. Raises PackError when it cannot be read."""
    try:
        status = file.stat()
        if result := kind(status.st_mode):
            raise PackError(f"{file}: {result}, not a file; give a file from `tunegemm pack`")
        return _digest(file.absolute(), status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise PackError(f"{file}: {cause(error, 'give a file from `tunegemm pack`')}") from None


@functools.lru_cache(maxsize=16)  # dispatch asks for each product that it meets
def _digest(file: Path, modified_ns: int, size: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def installed() -> list[Path]:
    """Folders of loaded packs."""
    try:
        places = sorted(user_folder().iterdir())
    except OSError:
        return []
    return [path for path in places if re.fullmatch(r"[0-9a-f]{16}", path.name)]


@functools.lru_cache(maxsize=256)  # a folder's name identifies its contents
def _open(folder: Path) -> Pack:
    try:
        facts = _parse((folder / _MANIFEST).read_bytes(), folder)
    except OSError as error:
        raise PackError(f"{folder}: {error.strerror}; delete it and load the pack again") from None
    return Pack(folder, facts["tunegemm"], facts["toolchain"], _read_records(folder, folder))


def _read_records(folder: Path, where: Path) -> tuple[Record, ...]:
    """All records of an unpacked pack. Raises PackError if one is bad, or if there is none."""
    records, problems = read_shipped(folder / "records", layer="pack")
    if problems or not records:
        reason = problems[0].removeprefix(f"{folder}/") if problems else "it holds no record"
        more = f" ({len(problems) - 1} more)" if problems[1:] else ""
        loaded = where == folder
        remedy = f"remove it with `tunegemm unload {folder.name}`" if loaded else "ask for a new pack"
        raise PackError(f"{where}: {reason}{more}; the pack is not used; {remedy}")
    return tuple(records)


def _check(records: Iterable[Record], file: Path) -> None:
    """Raises PackError for a record of this program's sources that must not be launched: once, when a pack is
    loaded. Dispatch checks each record again before its launch.
    """
    for record in records:
        is_todays = record.kernel_source == kernel_source_hash(record.candidate.family)
        if is_todays and (wrong := record_objection(record)):
            raise PackError(f"{file}: record of {record.problem}: {wrong}; the pack is not used")


def _unpack(file: Path, folder: Path) -> None:
    """Write the verified entries of a pack into an empty folder.

    Headers are compared with those of `write`, not parsed, so that they cannot ask for another place, a link
    or more memory than the file has bytes.
    """
    with file.open("rb") as stream:
        header = stream.read(tarfile.BLOCKSIZE)
        digits = header[124:135]
        num_bytes = int(digits, 8) if re.fullmatch(rb"[0-7]{11}", digits) else 0
        if header != _header(_MANIFEST, num_bytes) or num_bytes > _LARGEST_BYTES:
            raise PackError(
                f"{file}: not a pack, or repacked by another program; give a file from `tunegemm pack`"
            )
        text = _content(stream, file, _MANIFEST, num_bytes)
        manifest = _parse(text, file)
        _write(folder, _MANIFEST, text)
        for entry in manifest["entries"]:
            name, num_bytes = entry["name"], entry["bytes"]
            if stream.read(tarfile.BLOCKSIZE) != _header(name, num_bytes):
                raise PackError(f"{file}: entry {name} is missing or was changed; copy the pack again")
            content = _content(stream, file, name, num_bytes)
            if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                raise PackError(f"{file}: entry {name} was changed; copy the pack again")
            _write(folder, name, content)
        closing = hashlib.sha256(text).hexdigest().encode()
        is_there = stream.read(tarfile.BLOCKSIZE) == _header(_CLOSING, len(closing))
        if not is_there or _content(stream, file, _CLOSING, len(closing)) != closing:
            raise PackError(
                f"{file}: entry {_MANIFEST} was changed, or the end is missing; copy the pack again"
            )
        if stream.read(2 * tarfile.BLOCKSIZE).strip(b"\0") or stream.read(1):
            raise PackError(f"{file}: has entries that {_MANIFEST} does not list; copy the pack again")


def _header(name: str, num_bytes: int) -> bytes:
    """The tar header of an entry, without time or owner, so that it is always the same."""
    header = tarfile.TarInfo(name)
    header.size, header.mode = num_bytes, 0o644
    return header.tobuf(tarfile.USTAR_FORMAT)


def _content(stream: IO[bytes], file: Path, name: str, num_bytes: int) -> bytes:
    content = stream.read(num_bytes)
    if len(content) < num_bytes:
        raise PackError(f"{file}: cut within entry {name}; copy the pack again")
    if stream.read(-num_bytes % tarfile.BLOCKSIZE).strip(b"\0"):
        raise PackError(f"{file}: has data after entry {name}; copy the pack again")
    return content


def _parse(content: bytes, where: Path) -> dict[str, Any]:
    """A manifest with valid entry names and valid values."""
    try:
        manifest = decoded(content)
        if manifest["format"] != FORMAT:
            raise PackError(f"{where}: format {shown(manifest['format'])}; this tunegemm reads {FORMAT}")
        names = [line(entry["name"], "the name of an entry", 200) for entry in manifest["entries"]]
        if bad := [name for name in names if not _ENTRY.fullmatch(name)]:
            raise PackError(
                f"{where}: entry {bad[0]!r} is neither a record nor an object; a pack has no others"
            )
        if len(set(names)) != len(names):
            raise BadValueError("it lists an entry twice")
        line(manifest["tunegemm"], "version", 64)
        for name, version in manifest["toolchain"].items():
            line(version, line(name, "compiler", 64), 64)
        for entry in manifest["entries"]:
            whole(entry["bytes"], f"bytes of {entry['name']}", 0, _LARGEST_BYTES)
            line(entry["sha256"], "sha256", 64)
        return dict(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PackError(
            f"{where}: entry {_MANIFEST} cannot be read ({one_line(error)}); copy the pack again"
        ) from None


def _write(folder: Path, name: str, content: bytes) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def own(folder: Path) -> None:
    """Makes a folder writable by its owner only, whatever the umask: `ArtifactStore` rejects others."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
