"""Content-addressed store of compiled objects and the compiler's reports on them.

An entry is named by the SHA-256 of its kernel key: `NAME.o` is the object, `NAME.json` its key, its
resources and the object's own hash. The JSON is written last and by rename, so an entry is whole or absent.
Objects are native code: folders are 0700, and an object that is not ours or whose bytes changed is refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tunegemm.compile.ptxas import Resources
from tunegemm.errors import ArtifactError
from tunegemm.files import cause, foreign
from tunegemm.resources import user_path

Key = Mapping[str, str | int | bool]

#: What was begun so long ago was left by a killed process: a compile takes at most minutes.
_ABANDONED_S = 24 * 3600


@dataclass(frozen=True)
class Artifact:
    """One compiled object on disk."""

    path: Path
    """The object file."""
    resources: Resources
    """Registers, spills, shared memory and warnings from the compiler."""


def digest(key: Key) -> str:
    """The name of a kernel key."""
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()


class ArtifactStore:
    """The compiled objects of one user."""

    def __init__(self, root: Path | str | None = None, *, is_package: bool = False) -> None:
        """`root`: default `TUNEGEMM_CACHE_DIR`, else the user's cache directory. Created on first write.

        is_package: it lies in the package. The package's owner may write the code that runs here anyway, so
        the objects' owner is not checked.
        """
        root = root or os.environ.get("TUNEGEMM_CACHE_DIR") or user_path("cache")
        self.root = Path(root) / "objects"
        self._is_package = is_package

    def find(self, key: Key) -> Artifact | None:
        """The object of a key, hash-checked; None if there is none.

        Raises ArtifactError for an object (or its entry, or the store's folders) that another user owns or
        may write, that is a link, or that was altered.
        """
        entry = self._entry(key)
        if entry is None or "object_sha256" not in entry:
            return None
        try:
            result = entry["resources"]
            resources = Resources(**{**result, "warnings": tuple(result["warnings"])})
        except (KeyError, TypeError, AttributeError):
            return None  # damaged: it is compiled again
        path = self._path(key, ".o")
        content = self._read(path)
        if content is None:
            return None
        if hashlib.sha256(content).hexdigest() != entry["object_sha256"]:
            raise ArtifactError(f"{path}: its bytes changed since it was compiled; delete it and tune again")
        return Artifact(path, resources)

    def names(self) -> set[str]:
        """The `digest` of each object's key. `find` checks whether an object may be used."""
        return {path.parent.name + path.stem for path in self.root.glob("??/*.o")}

    def each_key(self) -> Iterator[Key]:
        """The key of each readable object. `find` checks whether an object may be used."""
        for path in self.root.glob("??/*.o"):
            with suppress(ArtifactError, OSError, ValueError, LookupError, TypeError):
                yield dict(json.loads(self._read(path.with_suffix(".json")) or b"{}")["key"])

    def failure(self, key: Key) -> str | None:
        """Why an earlier compile of this key failed, to avoid repeating it; None if it did not."""
        entry = self._entry(key)
        return None if entry is None else entry.get("failure")

    def scratch(self) -> Path:
        """A fresh path in the store's file system for an object that is being compiled, in a new folder that
        also has the compiler's files. Deletes what killed processes left.
        """
        with self._writing():
            self._make_root()
            for left in self.root.glob("new-*"):
                with suppress(OSError):  # another process deletes it
                    if left.stat().st_mtime < time.time() - _ABANDONED_S:
                        (shutil.rmtree if left.is_dir() else os.unlink)(left)
            return Path(tempfile.mkdtemp(prefix="new-", dir=self.root.absolute()), "object.o")

    def add(self, key: Key, scratch: Path, resources: Resources) -> Artifact:
        """Move a compiled object from `scratch` into the store, and delete its folder. Concurrent adds of one
        key agree.
        """
        path = self._path(key, ".o")
        with self._writing():
            scratch.chmod(0o600)
            content = scratch.read_bytes()
            path.parent.mkdir(mode=0o700, exist_ok=True)  # in the root that `scratch` has made
            scratch.replace(path)
            shutil.rmtree(scratch.parent, ignore_errors=True)
            self._write_entry(
                key, {"object_sha256": hashlib.sha256(content).hexdigest(), "resources": asdict(resources)}
            )
        return Artifact(path, resources)

    def add_failure(self, key: Key, reason: str) -> None:
        """Remember that this key does not compile."""
        with self._writing():
            self._make_root()
            self._path(key, ".json").parent.mkdir(mode=0o700, exist_ok=True)
            self._write_entry(key, {"failure": reason})

    def refuse_write(self, error: OSError) -> ArtifactError:
        """The error to raise if the store cannot be written, as on a full disk."""
        return ArtifactError(f"{self.root}: {cause(error, 'choose another folder by TUNEGEMM_CACHE_DIR')}")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.refuse_write(error) from None

    def check(self) -> None:
        """Raises ArtifactError, as `find` would, for a folder that another user owns or may write."""
        for folder in (self.root, *(self.root.glob("??") if self.root.is_dir() else ())):
            if folder.is_dir():
                _refuse_foreign(folder, folder.stat())

    def _path(self, key: Key, suffix: str) -> Path:
        name = digest(key)
        return self.root / name[:2] / (name[2:] + suffix)

    def _entry(self, key: Key) -> dict | None:  # type: ignore[type-arg]
        """The JSON beside an object. A truncated or foreign file counts as absent, and is compiled again."""
        content = self._read(self._path(key, ".json"))
        try:
            entry = None if content is None else json.loads(content)
        except ValueError:
            return None
        return entry if isinstance(entry, dict) and entry.get("key") == dict(key) else None

    def _read(self, path: Path) -> bytes | None:
        """The bytes of a file of the store; None if it is missing.

        Raises ArtifactError unless the file and the store's folders are the user's own (or root's) and
        nobody else may write them. So nobody can replace an object after it was checked.
        """
        try:
            # Not through a link, whose target is someone else's to change, and not waiting for a pipe.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            fault = "a symbolic link" if error.errno == errno.ELOOP else error.strerror
            raise ArtifactError(f"{path}: {fault}; delete it and tune again") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ArtifactError(f"{path}: not a regular file; delete it and tune again")
            if not self._is_package:
                _refuse_foreign(path, status)
                for folder in (path.parent, self.root):
                    _refuse_foreign(folder, folder.stat())
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)

    def _write_entry(self, key: Key, entry: dict) -> None:  # type: ignore[type-arg]
        path = self._path(key, ".json")
        handle, name = tempfile.mkstemp(dir=self.root, prefix="new-")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"key": dict(key)} | entry, file, sort_keys=True)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise

    def _make_root(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)


def _refuse_foreign(path: Path, status: os.stat_result) -> None:
    if why := foreign(path, status, (os.getuid(), 0)):
        is_ours = status.st_uid in (os.getuid(), 0)
        remedy = "run chmod go-w on it, and check its contents" if is_ours else "delete it and tune again"
        raise ArtifactError(f"{why}; {remedy}")
