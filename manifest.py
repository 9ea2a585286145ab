"""Where prediction files come from: manifest.json beside them says which run wrote each, and on which data.

The manifest is a help, not a requirement: without an entry, a file's origin is unknown, and everything else works.
"""

import contextlib
import fcntl
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from runs import commit
from submission import LATER_NAMES, PredictionFile, is_sample, of_one_run
from utils import InputError, read_json, sha256_of, warn, write_text

MANIFEST = "manifest.json"
RULE, REMEDY = "JSON with the origins of prediction files", "Predict again to write it anew."


class Source(NamedTuple):
    """What a writer of prediction files knows about them."""

    run: Path  # the run's directory, or the file of a saved model
    data: Path  # the file that was predicted
    data_sha256: str | None = None  # by default that of the file as it is now


class Origin(NamedTuple):
    """An entry of the manifest."""

    run: str
    script: str
    command: str
    commit: str | None
    data: str
    data_sha256: str | None
    rows: int
    time: str  # ISO 8601, in UTC
    sha256: str  # of the prediction file

    @property
    def age(self) -> str:
        """The time since the file was written, in words."""
        seconds = (datetime.now(UTC) - datetime.fromisoformat(self.time)).total_seconds()
        for name, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
            if seconds >= length:
                count = int(seconds // length)
                return f"{count} {name}{'s' * (count > 1)} ago"
        return "just now"


KINDS = {"commit": (str, type(None)), "data_sha256": (str, type(None)), "rows": (int,)}  # of all other fields: str


# --- write ------------------------------------------------------------------------------------------------------------


def record(path: Path, source: Source, rows: int, sha256: str | None = None) -> None:
    """Add the origin of a prediction file, which has just been written, to the manifest of its directory.

    sha256: of what was written, by default of the file. Another run may have replaced the file already, and the entry
    must not fit that one's contents.
    """
    origin = Origin(
        run=str(source.run),
        script=Path(sys.argv[0]).name,
        command=shlex.join(sys.argv),
        commit=commit(),
        data=str(source.data),
        data_sha256=source.data_sha256 or (sha256_of(source.data) if source.data.is_file() else None),
        rows=rows,
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        sha256=sha256 or sha256_of(path),
    )
    with _locked(path.parent):  # another run may write into the same directory
        entries = {name: entry._asdict() for name, entry in read_manifest(path.parent).items()}
        entries[path.name] = origin._asdict()
        files = {name: entries[name] for name in sorted(entries)}
        write_text(path.parent / MANIFEST, json.dumps({"files": files}, indent=2) + "\n")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the manifest. The directory itself is locked: that leaves no file behind."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: the last writer wins
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# --- read -------------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> dict[str, Origin]:
    """The origins by file name. What cannot be read is unknown: a note says so."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return {}
    try:
        files = read_json(path, RULE, REMEDY).get("files")
        if not isinstance(files, dict):
            raise InputError(f"{path}: must be {RULE}; files is not a table. {REMEDY}")
    except InputError as error:
        warn(f"{error} Until then it is unknown which run the files are from.")
        return {}
    origins = {name: _origin(entry) for name, entry in files.items()}
    if damaged := [name for name, origin in origins.items() if origin is None]:
        more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        warn(str(InputError(f"{path}: the entry of {damaged[0]}{more} is damaged or incomplete, so it is ignored.")))
    return {name: origin for name, origin in origins.items() if origin is not None}


def _origin(entry: Any) -> Origin | None:
    """The entry if it has every field, each of its kind; None otherwise. Fields of a newer version are ignored."""
    if not isinstance(entry, dict):
        return None
    fields = {name: entry.get(name) for name in Origin._fields}
    if not all(isinstance(value, KINDS.get(name, (str,))) for name, value in fields.items()):
        return None
    try:
        known = datetime.fromisoformat(fields["time"]).tzinfo is not None
    except ValueError:
        known = False
    return Origin(**fields) if known else None


class Found(NamedTuple):
    """A prediction file in a directory. Its origin is None if it is not known, or if the file changed since."""

    path: Path
    file: PredictionFile
    origin: Origin | None
    is_changed: bool = False  # after it was predicted


def find_files(folder: Path, wanted: Mapping[str, PredictionFile]) -> dict[str, Found]:
    """The wanted files that the directory has, by their earlier names. Of two names, the newer file counts."""
    origins = read_manifest(folder)
    found, older = {}, []
    for name, file in wanted.items():
        paths = [folder / other for other in (name, LATER_NAMES.get(name)) if other and os.path.lexists(folder / other)]
        paths.sort(key=lambda path: _written(path, origins), reverse=True)
        if paths:
            found[name] = _found(paths[0], file, origins)
            older += paths[1:]
    if older:
        rest = f" and {len(older) - 1} more" if len(older) > 1 else ""
        warn(f"{older[0]}{rest}: under the file's other name there is a newer one, which counts. Remove the older.")
    return found


def _written(path: Path, origins: Mapping[str, Origin]) -> float:
    """When the file was predicted or, if that is not known, changed: seconds since 1970."""
    if path.name in origins:
        return datetime.fromisoformat(origins[path.name].time).timestamp()
    return path.lstat().st_mtime


def _found(path: Path, file: PredictionFile, origins: Mapping[str, Origin]) -> Found:
    origin = origins.get(path.name)
    if origin is None or not path.is_file():
        return Found(path, file, None)
    is_changed = sha256_of(path) != origin.sha256
    return Found(path, file, None if is_changed else origin, is_changed)


# --- notes ------------------------------------------------------------------------------------------------------------


def report_origins(found: Mapping[str, Found], data: Path) -> None:
    """Write a note about each thing that is odd about where the files come from. data: the directory of the data."""
    for note in (*_unknown(found), *_mixtures(found), *_stale(found, data), *_sample(found, data)):
        warn(str(InputError(note)))  # one line, whatever the manifest has in it


def _unknown(found: Mapping[str, Found]) -> Iterator[str]:
    changed = [of.path.name for of in found.values() if of.is_changed]
    if changed:
        yield f"{listed(changed)}: changed after it was predicted, or copied here, so its run is unknown."
    unknown = [of.path for of in found.values() if of.origin is None and not of.is_changed]
    if unknown:
        names = listed([path.name for path in unknown]) if len(unknown) < len(found) else "these files"
        yield f"{unknown[0].parent / MANIFEST} does not know {names}, so it is unknown which run they are from."


def _mixtures(found: Mapping[str, Found]) -> Iterator[str]:
    groups: dict[str, dict[str, list[str]]] = {}  # the names, by group and run
    for name, of in found.items():
        if of.origin is not None:
            groups.setdefault(of_one_run(name), {}).setdefault(of.origin.run, []).append(of.path.name)
    for group, runs in groups.items():
        if len(runs) > 1:
            shown = "; ".join(f"{run} wrote {listed(names)}" for run, names in runs.items())
            yield f"{group} are from {len(runs)} different runs: {shown}. Predict all of them with one run."


def _stale(found: Mapping[str, Found], data: Path) -> Iterator[str]:
    for of in found.values():
        path = data / of.file.task.filename(of.file.split)
        if of.origin is None or of.origin.data_sha256 is None or not path.is_file():
            continue
        if sha256_of(path) != of.origin.data_sha256:
            yield f"{of.path}: was predicted on other data ({of.origin.data}) than {path} has now. Predict again."


def _sample(found: Mapping[str, Found], data: Path) -> Iterator[str]:
    files = [data / of.file.task.filename(of.file.split) for of in found.values()]
    if any(map(is_sample, files)):
        yield f"{data} has the project's sample data: its ids are on no leaderboard, where these files would score 0."


def listed(names: list[str], most: int = 3) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
