"""Adapters through a shared directory: written whole, named once, verified before they are loaded.

    <root>/<version>/adapter_model.safetensors, adapter_config.json, manifest.json
    <root>/LATEST.json

A version is written into a temporary sibling, fsynced, renamed, and only then named by LATEST.json,
which is replaced atomically. Readers go LATEST -> manifest -> digests -> load and never list the
directory, so a writer that dies at any point leaves at most a `.tmp-` directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save as safetensors_bytes
from torch import Tensor

from wayfinder.errors import AdapterFileError, SyncError

FORMAT = 1
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
MANIFEST = "manifest.json"
LATEST = "LATEST.json"


@dataclass(frozen=True, slots=True)
class Publication:
    """One published version."""

    version: int
    path: str
    digest: str  # sha256 of the weights file
    num_tensors: int


def publish(
    root: Path,
    version: int,
    tensors: Mapping[str, Tensor],
    config: Mapping,
    *,
    base_model: str,
    step: int,
) -> Publication:
    """Write version `version` below `root`, which exists, and point LATEST.json at it.

    A version that lies there whole is left as it is, one that was damaged is written again. Raises
    AdapterFileError when the file system refuses; SyncError when there is nothing to publish or
    the version exists with other content (versions are never rewritten).
    """
    if not tensors:
        raise SyncError(f"adapter version {version}: no adapter tensors to publish")
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise SyncError(f"adapter version {version}: values that are not finite in {broken[:3]}")
    files = {
        WEIGHTS: safetensors_bytes(dict(sorted(tensors.items())), metadata={"format": "pt"}),
        CONFIG: _json(config),
    }
    digest = hashlib.sha256(files[WEIGHTS]).hexdigest()
    manifest = {
        "format": FORMAT,
        "version": version,
        "step": step,
        "base_model": base_model,
        "rank": config["r"],
        "num_tensors": len(tensors),
        "files": {
            name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in files.items()
        },
    }
    target = root / str(version)
    with _changing(root):
        _put_damaged_aside(target)
        if target.exists():
            if _read_manifest(target)["files"] != manifest["files"]:
                raise SyncError(
                    f"{target}: this version is published with other content; versions are never "
                    "rewritten. Use a fresh sync.dir for each run."
                )
        else:
            temporary = root / f".tmp-{version}-{uuid.uuid4().hex}"
            temporary.mkdir()
            try:
                for name, content in {**files, MANIFEST: _json(manifest)}.items():
                    _write(temporary / name, content)
                _sync_directory(temporary)
                temporary.rename(target)
            except OSError:
                # Tried again for minutes, the attempts would fill a disk that is nearly full.
                shutil.rmtree(temporary, ignore_errors=True)
                raise
            _sync_directory(root)
        pointer = root / f".tmp-{LATEST}-{uuid.uuid4().hex}"
        named = hashlib.sha256((target / MANIFEST).read_bytes()).hexdigest()
        _write(pointer, _json({"path": str(version), "manifest_sha256": named}))
        os.replace(pointer, root / LATEST)
        _sync_directory(root)
    return Publication(version, str(target), digest, len(tensors))


def _put_damaged_aside(target: Path) -> None:
    if not target.exists():
        return
    try:
        verify(target)
    except AdapterFileError:
        target.rename(target.with_name(f".tmp-damaged-{target.name}-{uuid.uuid4().hex}"))


def read_latest(root: Path) -> Publication:
    """The version that LATEST.json names, with all its digests verified."""
    pointer = root / LATEST
    try:
        latest = json.loads(pointer.read_bytes())
        name, digest = str(latest["path"]), latest["manifest_sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AdapterFileError(
            f"{pointer}: not readable as a pointer to an adapter: {error}"
        ) from error
    if not name.isdigit():
        raise SyncError(f"{pointer}: path {name!r} leaves the directory; expected a version number")
    path = root / name
    publication = verify(path)
    found = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
    if found != digest:
        raise AdapterFileError(
            f"{path / MANIFEST}: sha256 {found[:12]}; {LATEST} says {str(digest)[:12]}. The file "
            "was changed after it was published."
        )
    return publication


def verify(path: Path) -> Publication:
    """Check the digests of a published version. Raises AdapterFileError naming the file, SyncError
    when it is of another format."""
    manifest = _read_manifest(path)
    for name in (WEIGHTS, CONFIG):
        expected = _entry(manifest, path, "files", name)
        try:
            content = (path / name).read_bytes()
        except OSError as error:
            raise AdapterFileError(f"{path / name}: named by the manifest, but {error}") from error
        found = hashlib.sha256(content).hexdigest()
        if found != _entry(expected, path, "sha256"):
            raise AdapterFileError(
                f"{path / name}: {len(content)} bytes with sha256 {found[:12]}; the manifest says "
                f"{expected.get('bytes')} bytes with {str(expected['sha256'])[:12]}. The file was "
                "changed or cut after it was published."
            )
    if str(_entry(manifest, path, "version")) != path.name:
        raise AdapterFileError(
            f"{path / MANIFEST}: version {manifest['version']!r}, but the directory is {path.name}"
        )
    return Publication(
        manifest["version"],
        str(path),
        manifest["files"][WEIGHTS]["sha256"],
        _entry(manifest, path, "num_tensors"),
    )


def _entry(record: object, path: Path, *keys: str):
    """`record[key][key]...` of a manifest whose content nobody vouches for."""
    for key in keys:
        if not isinstance(record, dict) or key not in record:
            raise AdapterFileError(f"{path / MANIFEST}: no entry {'.'.join(keys)}")
        record = record[key]
    return record


def make_root(root: Path) -> None:
    """Make the directory that versions are published into. Once, when a job begins: made again in
    the place of a shared directory that is away for a while, it would hide what comes back."""
    with _changing(root):
        root.mkdir(parents=True, exist_ok=True)


def retire(root: Path, keep: int, in_use: set[int]) -> list[int]:
    """Delete all but the newest `keep` versions, never one that an engine still serves."""
    with _changing(root):
        versions = sorted(int(p.name) for p in root.iterdir() if p.name.isdigit())
        old = [v for v in versions[: max(0, len(versions) - keep)] if v not in in_use]
        for version in old:
            _remove(root / str(version))
    return old


def forget_after(root: Path, version: int) -> None:
    """Remove versions newer than `version`: a resumed run makes them again."""
    with _changing(root):
        for path in root.iterdir():
            if path.name.startswith(".tmp-"):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            elif path.name.isdigit() and int(path.name) > version:
                _remove(path)


def _remove(path: Path) -> None:
    """Renamed first: a reader never finds a version that is half deleted."""
    doomed = path.with_name(f".tmp-retired-{path.name}-{uuid.uuid4().hex}")
    path.rename(doomed)
    shutil.rmtree(doomed)


@contextmanager
def _changing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AdapterFileError(
            f"{root}: adapters cannot be written there: {error}. Free space there or make it "
            "writable (sync.dir chooses the place), then repeat the command."
        ) from error


def _read_manifest(path: Path) -> dict:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError) as error:
        raise AdapterFileError(f"{path / MANIFEST}: not readable: {error}") from error
    found = _entry(manifest, path, "format")
    if found != FORMAT:
        raise SyncError(f"{path / MANIFEST}: format {found!r}; this version reads {FORMAT}")
    return manifest


def _json(value: Mapping) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
