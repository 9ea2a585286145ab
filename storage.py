"""Where a study is kept: an SQLite file or a database server, the locks between its workers, checks of its contents.

Several workers may train trials of one study at the same time. Two questions must then have one answer for all of them:

  * Who chooses next? Choosing a point and asking for its trial happen under one lock (`choosing`), so no two workers
    start the same point.
  * Is a running trial alive? Its worker holds a claim on it (`claim`) until it ends. A trial whose worker died has no
    claim; `fail_dead` marks it as failed without a reason, and the search tries its point again.

`FileLocks` answers both with locks that the kernel drops when a process ends, so a killed worker is noticed at once.
`ServerLocks` answers them through the database, which all machines can reach: a row lock, and Optuna's heartbeats.
"""

import argparse
import contextlib
import fcntl
import importlib.util
import math
import re
import sqlite3
import statistics
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import optuna
import sqlalchemy
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import URL

from study import PRUNERS, facts_of, score_of
from utils import InputError, atomic_path, writable_directory

STUDY = "sweep"  # the one study in a file or database
URL_FORM = re.compile(r"[A-Za-z][\w+.-]*://.*", re.DOTALL)
SQLITE_TIMEOUT = 60  # seconds that a worker waits for another one's write
HEARTBEAT = 10  # seconds between two signs of life of a trial in a database
GRACE = 60  # seconds without one after which the trial counts as dead
BROKEN = (  # what Optuna and SQLAlchemy raise on reading a study that something else wrote or damaged
    optuna.exceptions.OptunaError, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error, ValueError, LookupError, TypeError,
    AttributeError, AssertionError, ArithmeticError, RuntimeError,
)  # fmt: skip


def first_line(error: BaseException) -> str:
    """An error as part of a line."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0])


def printable(text: str) -> str:
    """Text from a study, which may be anything, as part of a line."""
    return "".join(c if c.isprintable() else "?" for c in textwrap.shorten(text, 200, placeholder=" ..."))


# --- locks ------------------------------------------------------------------------------------------------------------


class Locks(Protocol):
    """Who chooses, and whose trials are alive."""

    def choosing(self) -> contextlib.AbstractContextManager[None]:
        """Exclude all other workers while a trial is chosen. Not reentrant."""

    def claim(self, trial: optuna.Trial) -> None:
        """Mark the trial as alive. Call it while choosing, right after the trial was asked for."""

    def release(self, trial: optuna.Trial) -> None:
        """End the claim."""

    def fail_dead(self, study: optuna.Study) -> None:
        """Mark running trials without a claim as failed. Call it while choosing."""


class FileLocks:
    """Locks on single bytes of a file beside the study: byte 0 to choose, byte 1 + n for trial n.

    They are POSIX record locks: the kernel releases them when the process ends, even by kill -9. They are not inherited
    by child processes, and closing any handle of the file would release all of them: so there is one handle. A process
    can always lock what it has locked already, so it must know its own claims.
    """

    def __init__(self, path: Path):
        self.path, self.mine = path.with_name(f".{path.name}.lock"), set[int]()
        try:
            self.file = self.path.open("a+b")
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> InputError:
        return InputError(
            f"{self.path}: must be a file that can be locked, beside the study; {error.strerror}. Use a --study on "
            "another disk."
        )

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX, 1, 0)
        except OSError as error:  # a file system without locks
            raise self._error(error) from error
        try:
            yield
        finally:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, 0)

    def claim(self, trial: optuna.Trial) -> None:
        fcntl.lockf(self.file, fcntl.LOCK_EX, 1, 1 + trial.number)
        self.mine.add(trial.number)

    def release(self, trial: optuna.Trial) -> None:
        self.mine.discard(trial.number)
        fcntl.lockf(self.file, fcntl.LOCK_UN, 1, 1 + trial.number)

    def fail_dead(self, study: optuna.Study) -> None:
        for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if trial.number in self.mine:
                continue
            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + trial.number)
            except OSError:  # its worker holds it
                continue
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, 1 + trial.number)
            study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


class ServerLocks:
    """A row lock to choose, and Optuna's heartbeats as claims: all through the database, so on any number of machines.

    The row is the one of Optuna's table version_info, which nothing else locks: Optuna locks the study's row when it
    creates a trial. PostgreSQL and MySQL release a row lock at the end of the transaction and when the connection
    breaks. A claim must survive a short loss of the connection, so it is a heartbeat and not a lock.
    """

    def __init__(self, storage: RDBStorage):
        self.storage = storage
        self.stops: dict[int, threading.Event] = {}

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        version_info = sqlalchemy.table("version_info", sqlalchemy.column("version_info_id"))
        with self.storage.engine.begin() as connection:
            connection.execute(sqlalchemy.select(version_info).with_for_update())
            yield

    def claim(self, trial: optuna.Trial) -> None:
        self.storage.record_heartbeat(trial._trial_id)  # before others may choose: without one, a trial counts as dead
        stop = self.stops[trial.number] = threading.Event()
        threading.Thread(target=self._beat, args=(trial._trial_id, stop), daemon=True).start()

    def _beat(self, trial_id: int, stop: threading.Event) -> None:
        while not stop.wait(HEARTBEAT):
            with contextlib.suppress(*BROKEN):  # the connection may come back within the grace period
                self.storage.record_heartbeat(trial_id)

    def release(self, trial: optuna.Trial) -> None:
        self.stops.pop(trial.number).set()

    def fail_dead(self, study: optuna.Study) -> None:
        with warnings.catch_warnings(action="ignore"):  # Optuna calls it experimental
            optuna.storages.fail_stale_trials(study)
        heartbeats = sqlalchemy.table("trial_heartbeats", sqlalchemy.column("trial_id"))
        with self.storage.engine.connect() as connection:
            known = set(connection.scalars(sqlalchemy.select(heartbeats.c.trial_id)))
        for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
            if trial._trial_id not in known:  # its worker died between asking and claiming
                study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


# --- the two places ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudyFile:
    """A study in an SQLite file: for any number of workers on one machine."""

    path: Path

    @property
    def shown(self) -> str:
        return str(self.path)

    @property
    def plot(self) -> Path:
        return self.path.with_suffix(".png")

    @property
    def recipe(self) -> Path:
        return self.path.with_name(f"{self.path.stem}-best.txt")

    @property
    def files(self) -> list[Path]:
        return [self.path, self.plot]

    @property
    def run_prefix(self) -> str:
        """How the names of the trials' runs begin."""
        return self.path.stem

    def open(self, args: argparse.Namespace) -> tuple[optuna.Study, Locks]:
        writable_directory(self.path.parent, "the folder of --study")
        facts, locks = facts_of(args), FileLocks(self.path)
        with locks.choosing():
            if not self.path.exists():
                _refuse_plot(self)
                self._create(facts)
            self._check_copy(args, facts)
            study = _load(self.shown, lambda: _sqlite(self.path, checked=True), args)
            locks.fail_dead(study)
        return study, locks

    def _create(self, facts: dict[str, Any]) -> None:
        """Create the file completely or not at all, so that a kill leaves no partial study."""
        with atomic_path(self.path) as temporary:
            storage = _sqlite(temporary)
            optuna.create_study(study_name=STUDY, storage=storage, direction="maximize").set_user_attr("facts", facts)
            _close(storage)

    def _check_copy(self, args: argparse.Namespace, facts: dict[str, Any]) -> None:
        """Check the study on a copy: Optuna adds what it misses to any database that it opens."""
        remedy = "It was not changed; use another --study."
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy.db"
            try:
                _copy_database(self.path, copy)
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise InputError(
                    f"--study {self.path}: must be a study's database, but {first_line(error)}. {remedy}"
                ) from error
            except _DamagedError as error:
                raise InputError(
                    f"--study {self.path}: must be an intact database, but it is damaged. {remedy}"
                ) from error
            before = _rows_by_table(copy)
            study = _load(self.shown, lambda: _sqlite(copy), args, remedy)
            _close(study._storage._backend)
            if _rows_by_table(copy) != before:
                raise InputError(f"--study {self.path}: must be a complete study; tables are missing. {remedy}")
            _check_contents(self.shown, study, args, facts, remedy)


class _DamagedError(Exception):
    """The database can be read, but its structure is damaged."""


def _copy_database(path: Path, copy: Path) -> None:
    """Copy an SQLite file as of one moment, after looking at its structure. Raise if it is not a study's."""
    give_up = time.monotonic() + SQLITE_TIMEOUT
    with (
        contextlib.closing(
            sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", SQLITE_TIMEOUT, uri=True)
        ) as database,
        contextlib.closing(sqlite3.connect(copy)) as target,
    ):
        # A view in a file from elsewhere could compute forever.
        database.set_progress_handler(lambda: time.monotonic() > give_up, 100_000)
        entries = list(database.execute("SELECT type, name FROM sqlite_master"))
        if {kind for kind, _ in entries} - {"table", "index"}:
            raise sqlite3.DatabaseError("it has views or triggers")
        if not all(isinstance(name, str) for _, name in entries):
            raise sqlite3.DatabaseError("the name of a table is not text")
        for check in ("quick_check", "integrity_check"):  # the second may stop at what the first would have named
            if database.execute(f"PRAGMA {check}").fetchone() != ("ok",):
                raise _DamagedError
        database.execute("SELECT count(*) FROM studies")  # without that table, SQLite says so
        database.backup(target)


def _rows_by_table(path: Path) -> dict[str, int]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        quoted = {name: '"' + name.replace('"', '""') + '"' for name in names}
        return {name: database.execute(f"SELECT count(*) FROM {quoted[name]}").fetchone()[0] for name in names}


def _sqlite(path: Path, checked: bool = False) -> RDBStorage:
    """Optuna's storage in a file. checked: a copy has been opened, so its tables need no second look."""
    url = URL.create("sqlite", database=str(path)).render_as_string()
    wait = {"connect_args": {"timeout": SQLITE_TIMEOUT}}
    return RDBStorage(url, engine_kwargs=wait, skip_table_creation=checked, skip_compatibility_check=checked)


def _close(storage: RDBStorage) -> None:
    storage.remove_session()
    storage.engine.dispose()


@dataclass(frozen=True)
class StudyServer:
    """A study in a database server: for workers on any number of machines. The database holds this study alone."""

    url: URL

    @property
    def shown(self) -> str:
        """The URL without its password and options, which may hold one too."""
        url, scheme = self.url, self.url.drivername.partition("+")[0]
        return URL.create(scheme, url.username, None, url.host, url.port, url.database).render_as_string()

    @property
    def run_prefix(self) -> str:
        return re.sub(r"[^\w.-]", "_", Path(self.url.database).name)

    @property
    def plot(self) -> Path:
        return Path("runs") / f"{self.run_prefix}.png"

    @property
    def recipe(self) -> Path:
        return Path("runs") / f"{self.run_prefix}-best.txt"

    @property
    def files(self) -> list[Path]:
        return [self.plot]

    def open(self, args: argparse.Namespace) -> tuple[optuna.Study, Locks]:
        writable_directory(self.plot.parent, "the folder of the plot")
        facts, remedy = facts_of(args), "It was not changed; use another --study."
        storage = self._connect(remedy)
        locks = ServerLocks(storage)
        try:
            with locks.choosing():
                if not optuna.get_all_study_names(storage):
                    _refuse_plot(self)
                    optuna.create_study(study_name=STUDY, storage=storage, direction="maximize")
                study = _load(self.shown, lambda: storage, args, remedy)
                if not study.user_attrs and not study.trials:  # new; or its first worker died before this line
                    study.set_user_attr("facts", facts)
                _check_contents(self.shown, study, args, facts, remedy)
                locks.fail_dead(study)
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise unreachable(self.shown, error) from error
        return study, locks

    def _connect(self, remedy: str) -> RDBStorage:
        engine_kwargs = {"pool_pre_ping": True}  # a trial may take longer than the server keeps an idle connection
        url = self.url.render_as_string(hide_password=False)
        try:
            engine = sqlalchemy.create_engine(url)
            tables = set(sqlalchemy.inspect(engine).get_table_names())
            engine.dispose()
            if tables and "studies" not in tables:
                raise InputError(
                    f"--study {self.shown}: must be an empty database or a study's, found tables of another program. "
                    f"{remedy}"
                )
            with warnings.catch_warnings(action="ignore"):  # Optuna calls heartbeats experimental
                for attempt in range(5):
                    try:
                        return RDBStorage(
                            url, engine_kwargs, heartbeat_interval=HEARTBEAT, grace_period=GRACE,
                        )  # fmt: skip
                    except sqlalchemy.exc.SQLAlchemyError:  # another machine is creating the tables
                        if attempt == 4:
                            raise
                        time.sleep(1)
        except (ImportError, sqlalchemy.exc.NoSuchModuleError) as error:
            reason = first_line(error.__cause__ or error)
            raise InputError(
                f"--study {self.shown}: needs a driver of SQLAlchemy for {self.url.drivername} ({reason}). "
                "Install it; for PostgreSQL: pip install 'psycopg[binary]'."
            ) from error
        except sqlalchemy.exc.SQLAlchemyError as error:
            raise unreachable(self.shown, error) from error
        except RuntimeError as error:  # the tables of another version of Optuna
            raise InputError(f"--study {self.shown}: Optuna cannot read it ({first_line(error)}). {remedy}") from error


def unreachable(shown: str, error: BaseException) -> InputError:
    cause = getattr(error, "orig", None) or error.__cause__ or error
    cause = getattr(cause, "orig", None) or cause
    reason = first_line(cause).rstrip(".")
    return InputError(
        f"--study {shown}: the database must be reachable, but {reason}. Check it, and give the command again."
    )


def _refuse_plot(place: "StudyFile | StudyServer") -> None:
    if place.plot.exists():
        raise InputError(
            f"{place.plot}: the plot of a new study would go there, but the file exists. "
            "Move it, or use another --study."
        )


def place_of(text: str) -> StudyFile | StudyServer:
    """The place that --study names: a path is an SQLite file, SCHEME://... is a database of SQLAlchemy."""
    if not URL_FORM.fullmatch(text):
        if not Path(text).name:
            raise InputError(f"--study must be a file or a URL, found {text!r}. Write for example runs/study.db.")
        return StudyFile(Path(text))
    scheme = text.partition("://")[0]
    try:
        url = sqlalchemy.make_url(text)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:  # their messages may show the password
        raise InputError(
            f"--study {scheme}://...: must be a URL such as postgresql://user@host/database, found one that cannot be "
            "parsed. Correct it."
        ) from error
    if scheme.startswith("sqlite"):
        return place_of(url.database or "")
    if not url.database:
        raise InputError(
            f"--study {scheme}://...: must name a database, found none. Write postgresql://user@host/database."
        )
    if scheme in ("postgres", "postgresql"):
        url = url.set(drivername=_postgresql_driver(scheme))
    return StudyServer(url)


def _postgresql_driver(scheme: str) -> str:
    """The installed driver: psycopg, or psycopg2, which SQLAlchemy means by plain postgresql://."""
    for driver in ("psycopg", "psycopg2"):
        if importlib.util.find_spec(driver):
            return f"postgresql+{driver}"
    raise InputError(
        f"--study {scheme}://...: needs the driver psycopg, which is not installed. Run pip install 'psycopg[binary]'."
    )


def without_password(token: str) -> str:
    """A token of the command line as a run may record it."""
    flag, equals, value = token.partition("=") if token.startswith("--") else ("", "", token)
    if not URL_FORM.fullmatch(value):
        return token
    try:
        return flag + equals + StudyServer(sqlalchemy.make_url(value)).shown
    except (sqlalchemy.exc.ArgumentError, ValueError):
        return f"{flag}{equals}{value.partition('://')[0]}://..."


# --- checks: a study may come from anywhere ---------------------------------------------------------------------------


def _load(
    shown: str, storage: Callable[[], RDBStorage], args: argparse.Namespace, remedy: str = "Use another --study."
) -> optuna.Study:
    """The study with all its trials read once, so that one that cannot be read is noticed here."""
    try:
        opened = storage()
        if optuna.get_all_study_names(opened) != [STUDY]:
            raise InputError(f"--study {shown}: must be a study of sweep.py, found one of another program. {remedy}")
        study = optuna.load_study(study_name=STUDY, storage=opened, pruner=PRUNERS[args.pruner]())
        study.get_trials(deepcopy=False)
    except InputError:
        raise
    except BROKEN as error:
        raise InputError(f"--study {shown}: Optuna cannot read it ({first_line(error)}). {remedy}") from error
    return study


def _check_contents(
    shown: str, study: optuna.Study, args: argparse.Namespace, facts: dict[str, Any], remedy: str
) -> None:
    """Refuse a study that sweep.py did not write, or that belongs to other flags or data."""
    try:
        attributes = study.user_attrs
        if set(attributes) != {"facts"} or study.direction != optuna.study.StudyDirection.MAXIMIZE:
            raise InputError(f"--study {shown}: must be a study of sweep.py, found one of another program. {remedy}")
        then = attributes["facts"]
        tables = [then.get(key) for key in ("flags", "data_sha256")] if isinstance(then, dict) else [None]
        if not all(isinstance(table, dict) for table in tables):
            raise InputError(f"--study {shown}: must record the flags and data of its trials, but does not. {remedy}")
        _must_match(shown, then, facts)
        for number, trial in enumerate(study.get_trials(deepcopy=False)):
            problem = "its number is wrong" if trial.number != number else problem_of(trial, args)
            if problem:
                raise InputError(f"--study {shown}: trial {number} must be one of sweep.py, but {problem}. {remedy}")
    except BROKEN as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"--study {shown}: Optuna cannot read it ({first_line(error)}). {remedy}") from error


def problem_of(trial: FrozenTrial, args: argparse.Namespace) -> str | None:
    """What is wrong with a trial that was read from a study; None if it can be used."""
    known, reason = trial.state, trial.user_attrs.get("reason", "")
    if known == TrialState.WAITING or not (isinstance(reason, str) and reason.isprintable()):
        return "its state or its reason is wrong"
    killed = known in (TrialState.RUNNING, TrialState.FAIL) and not reason
    partial = killed and set(trial.params) <= set(args.space)  # killed before it had all its values
    if not partial and set(trial.params) != set(args.space):
        return f"it has the parameters {repr(list(trial.params))[:200]}"
    for key, value in trial.params.items():
        if trial.distributions[key] != args.space[key] or not _contains(args.space[key], value):
            return f"its value of {key} is not one of the search"
    if known == TrialState.PRUNED and not (_finite(trial.value) and trial.last_step is not None):
        return "it was pruned without a score"
    if known == TrialState.COMPLETE:
        return problem_of_scores(trial, args)
    return None


def _contains(distribution: optuna.distributions.BaseDistribution, value: Any) -> bool:
    return distribution._contains(distribution.to_internal_repr(value))


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def problem_of_scores(trial: FrozenTrial, args: argparse.Namespace) -> str | None:
    """A finished trial has the scores of every seed, and its value is their mean."""
    by_seed, wanted = trial.user_attrs.get("scores"), {*args.flags.tasks, "overall"}
    if not isinstance(by_seed, list) or len(by_seed) != len(args.seeds):
        return f"it does not have the scores of {len(args.seeds)} seeds"
    for scores in by_seed:
        if (
            not isinstance(scores, dict)
            or set(scores) - {"trained"} != wanted
            or not all(map(_finite, scores.values()))
        ):
            return f"its scores are not numbers for {', '.join(sorted(wanted))}"
    mean = statistics.fmean(map(score_of, by_seed))
    if not _finite(trial.value) or not math.isclose(trial.value, mean, abs_tol=1e-9):
        return f"its value {repr(trial.value)[:40]} is not the mean of its scores, {mean:.4f}"
    return None


def _must_match(shown: str, then: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> None:
    def text(value: Any) -> str:
        return printable(" ".join(map(str, value)) if isinstance(value, list) else str(value))

    flags, remedy = then["flags"], "or another --study."
    if flags.get("head") == "linear":  # older studies recorded the default by its name
        flags = flags | {"head": now["flags"]["head"]}
    other = [key for key, value in now["flags"].items() if key not in flags or flags[key] != value]
    if other:
        parts = [f"--{key} {text(flags.get(key))} (now {text(now['flags'][key])})" for key in other]
        raise InputError(f"--study {shown}: was started with {', '.join(parts)}. Give the same flags, {remedy}")
    changed = [name for name, found in now["data_sha256"].items() if then["data_sha256"].get(name) != found]
    if changed:
        raise InputError(f"--study {shown}: {', '.join(changed)} changed since. Give the same data, {remedy}")
