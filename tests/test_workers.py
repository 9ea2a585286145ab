"""Several workers on one study: they share its points, survive each other's death, and need a file or a database."""

import importlib.util
import itertools
import json
import multiprocessing
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from conftest import ROOT, Finished, run_script, the_error, write_task_files
from optuna.trial import FrozenTrial, TrialState

import storage
import sweep
import trials
from storage import FileLocks, StudyFile, StudyServer, place_of, without_password
from study import SEARCHES, FixedPointSampler, Wait, next_sampler, read_space
from trials import visible_gpus, with_trials, worker_environment
from utils import InputError

pytestmark = pytest.mark.usefixtures("one_thread")

SIX = ["--search", "lr=1e-3,1e-2,1e-4", "batch_size=4,8"]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def wait_until(true: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def finished_points(found: list[FrozenTrial]) -> dict[tuple, float]:
    """The score of each point; no point may have been finished twice."""
    finished = [t for t in found if t.state == TrialState.COMPLETE]
    scores = {tuple(sorted(t.params.items())): t.value for t in finished}
    assert len(scores) == len(finished)
    return scores


# --- choosing while others train --------------------------------------------------------------------------------------


def flags_of_search(*terms: str, **own: object) -> Namespace:
    flags = Namespace(lr=1e-3, hidden_dropout_prob=0.3)
    return Namespace(**{"space": read_space(list(terms)), "trials": None, "seeds": [1], "flags": flags} | own)


def begin(study: optuna.Study, args: Namespace) -> optuna.Trial:
    study.sampler = next_sampler(args, study)
    return study.ask(args.space)


@pytest.fixture
def study() -> optuna.Study:
    return optuna.create_study(direction="maximize")


def test_grid_skips_running_points_and_waits_for_the_last(study: optuna.Study) -> None:
    args = flags_of_search("lr=1e-3,1e-4", "hidden_dropout_prob=.2,.3", method="grid")
    begun = [begin(study, args) for _ in range(4)]
    assert len({tuple(trial.params.values()) for trial in begun}) == 4
    for trial in begun[1:]:
        assert isinstance(next_sampler(args, study), Wait)
        study.tell(trial, 0.5)
    study.tell(begun[0], state=TrialState.FAIL)  # killed: its point is tried again
    assert begin(study, args).params == begun[0].params


def test_coordinate_shares_a_stage_and_waits_before_the_next_one(study: optuna.Study) -> None:
    args = flags_of_search("lr=1e-3,1e-4", "hidden_dropout_prob=.2,.3", method="coordinate")
    first, second = begin(study, args), begin(study, args)
    assert [t.params for t in (first, second)] == [{"lr": lr, "hidden_dropout_prob": ".3"} for lr in ("1e-3", "1e-4")]
    study.tell(first, 0.5)
    assert isinstance(next_sampler(args, study), Wait)
    study.tell(second, 0.6)
    assert begin(study, args).params == {"lr": "1e-4", "hidden_dropout_prob": ".2"}


def test_tpe_gives_two_workers_different_points(study: optuna.Study) -> None:
    args = flags_of_search("lr=1e-6..1e-2:log", method="tpe", trials=30)
    for _ in range(15):  # ten random ones, then those of the estimator
        pair = [begin(study, args) for _ in range(2)]
        assert pair[0].params != pair[1].params
        for trial in pair:
            study.tell(trial, trial.params["lr"])
    assert next_sampler(args, study) is None


@pytest.mark.parametrize("method", SEARCHES)
def test_running_trials_count_towards_the_limit(method: str, study: optuna.Study) -> None:
    args = flags_of_search("lr=1e-3,1e-4,1e-5", method=method, trials=2)
    begun = [begin(study, args) for _ in range(2)]
    assert isinstance(next_sampler(args, study), Wait)
    for trial in begun:
        study.tell(trial, 0.5)
    assert next_sampler(args, study) is None


class NoLocks:
    """Locks for one process, in which nothing dies."""

    choosing = staticmethod(threading.Lock)

    def fail_dead(self, study: optuna.Study) -> None:
        pass


@pytest.mark.parametrize(("ending", "expected"), [({"values": 0.7}, [{"overall": 0.7}]), ({"state": "FAIL"}, None)])
def test_a_trial_waits_for_the_same_point_of_another_worker(
    ending: dict, expected: list | None, study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tpe may choose a point of lists twice. If the other worker dies, this one trains the point."""
    monkeypatch.setattr(trials, "POLL", 0.01)
    study.sampler = FixedPointSampler({"lr": "1e-3"})
    first, second = (study.ask(read_space(["lr=1e-3,1e-4"])) for _ in range(2))
    first.set_user_attr("scores", [{"overall": 0.7}])
    if "state" in ending:
        ending = {"state": TrialState.FAIL}
    thread = threading.Timer(0.1, lambda: study.tell(first, **ending))
    thread.start()
    assert trials.scores_of_twin(second, study, NoLocks()) == expected
    thread.join()
    assert trials.scores_of_twin(first, study, NoLocks()) == expected


def test_tpe_without_other_workers_draws_the_points_that_it_always_drew(study: optuna.Study) -> None:
    args = flags_of_search("lr=1e-6..1e-2:log", method="tpe", trials=30)
    for number in range(15):
        expected = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.TPESampler(seed=args.seeds[0] + number)
        )
        expected.add_trials(study.trials)
        trial = begin(study, args)
        assert expected.ask(args.space).params == trial.params
        study.tell(trial, -abs(trial.params["lr"] - 1e-4))


# --- the share of a worker --------------------------------------------------------------------------------------------


def test_workers_take_the_gpus_in_turn_and_share_the_threads() -> None:
    given = [worker_environment(number, 4, ["2", "5"])["CUDA_VISIBLE_DEVICES"] for number in range(4)]
    assert given == ["2", "5", "2", "5"]
    assert worker_environment(3, 4, []) == {"OMP_NUM_THREADS": "4"}


def test_workers_use_only_the_gpus_that_their_starter_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(use_gpu=True) == ["0", "1", "2"]
    assert visible_gpus(use_gpu=False) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    assert visible_gpus(use_gpu=True) == ["6", "7"]


# --- claims -----------------------------------------------------------------------------------------------------------


def hold(path: Path, number: int, ready: object) -> None:
    """In another process: claim a trial, and never end."""
    locks = FileLocks(path)
    locks.claim(Namespace(number=number))
    ready.set()
    time.sleep(600)


def test_a_trial_of_a_live_process_is_left_alone_and_that_of_a_dead_one_is_failed_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, path = context.Event(), tmp_path / "s.db"
    other = context.Process(target=hold, args=(path, 0, ready), daemon=True)
    other.start()
    study, locks = optuna.create_study(), FileLocks(path)
    study.ask()
    study.ask()  # nobody claims the second
    assert ready.wait(60)
    locks.fail_dead(study)
    assert [t.state for t in study.trials] == [TrialState.RUNNING, TrialState.FAIL]
    other.kill()
    other.join()
    locks.fail_dead(study)
    assert [t.state for t in study.trials] == [TrialState.FAIL, TrialState.FAIL]


def test_a_worker_does_not_take_its_own_trial_for_dead(tmp_path: Path) -> None:
    """It looks for dead trials while it waits for the same point of another worker."""
    study, locks = optuna.create_study(), FileLocks(tmp_path / "s.db")
    trial = study.ask()
    locks.claim(trial)
    locks.fail_dead(study)
    assert study.trials[0].state == TrialState.RUNNING
    locks.release(trial)
    locks.fail_dead(study)
    assert study.trials[0].state == TrialState.FAIL


def test_a_study_beside_which_nothing_can_be_locked_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".s.db.lock").mkdir()
    with pytest.raises(InputError, match="must be a file that can be locked, beside the study; Is a directory"):
        FileLocks(tmp_path / "s.db")


# --- whole sweeps -----------------------------------------------------------------------------------------------------


@pytest.fixture
def flags(tiny_checkpoint: Path, task_files: Path, tmp_path: Path) -> list[str]:
    """The flags of a search of six points that trains for real."""
    shared = ["--model", tiny_checkpoint, "--data", task_files, "--predictions", tmp_path / "p", "--option", "finetune"]
    return [*SIX, "--", *map(str, shared), "--epochs", "3"]


def trials_in(path: Path) -> list[FrozenTrial]:
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{path}").trials


def test_two_workers_find_the_same_trials_and_scores_as_one(
    flags: list[str], run_main: Callable[..., Finished], tmp_path: Path
) -> None:
    alone = run_main(sweep, "--study", tmp_path / "one.db", *flags, "--runs", tmp_path / "runs")
    assert alone.status == 0, alone.err
    two = ["--workers", "2", "--study", tmp_path / "two.db", *flags, "--runs", tmp_path / "runs"]
    result = run_script("sweep.py", *two, **ONE_THREAD)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\ntrial | lr ") == result.stdout.count("\nbest: ") == 1  # one table, one result
    ours, theirs = trials_in(tmp_path / "two.db"), trials_in(tmp_path / "one.db")
    assert finished_points(ours) == finished_points(theirs)
    assert len(ours) == len(theirs) == 6
    assert {t.number: str(t.user_attrs["scores"]) for t in ours} == {
        t.number: str(next(o for o in theirs if o.params == t.params).user_attrs["scores"]) for t in ours
    }
    recipes = [(tmp_path / f"{name}-best.txt").read_text() for name in ("one", "two")]
    flags_of_best = [[line for line in text.splitlines() if line[0] != "#"] for text in recipes]
    assert flags_of_best[0] == flags_of_best[1]
    assert (tmp_path / "two.png").is_file()
    runs = {folder.name for folder in (tmp_path / "runs").iterdir()}
    assert runs == {f"{name}-{number}" for name in ("one", "two") for number in range(6)}
    assert "6 trials so far" in run_main(sweep, *two[2:]).out
    assert len(trials_in(tmp_path / "two.db")) == 6


def start(*given: object) -> subprocess.Popen:
    command = [sys.executable, "sweep.py", *map(str, given)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | ONE_THREAD, **pipes)


def workers_of(pid: int) -> list[int]:
    """The worker processes that a sweep started."""
    listed = subprocess.run(["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    return [int(row[0]) for row in rows if int(row[1]) == pid and "spawn_main" in row[2]]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_killed_worker_loses_only_its_trial(flags: list[str], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    process = start("--workers", 2, "--study", tmp_path / "s.db", *flags, "--runs", runs)
    wait_until(lambda: len(list(runs.glob("*/log.jsonl"))) >= 3 or process.poll() is not None)
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "died (exit status -9); its trial is repeated." in err
    found = trials_in(tmp_path / "s.db")
    assert len(finished_points(found)) == 6
    lost = [t for t in found if t.state != TrialState.COMPLETE]
    assert len(lost) <= 1  # none if the kill came between two trials
    assert all(t.state == TrialState.FAIL and "reason" not in t.user_attrs for t in lost)
    assert out.count("killed, so repeated") == len(lost)


@pytest.mark.slow
def test_ctrl_c_and_the_death_of_the_starter_end_all_workers_and_the_study_continues(
    flags: list[str], tmp_path: Path
) -> None:
    command = ["--workers", 2, "--study", tmp_path / "s.db", *flags, "--runs", tmp_path / "runs"]

    def begun(count: int) -> bool:
        return len(list((tmp_path / "runs").glob("*/args.json"))) >= count

    first = start(*command)
    wait_until(lambda: begun(2))
    workers = workers_of(first.pid)
    os.killpg(first.pid, signal.SIGINT)  # as a terminal does
    _, err = first.communicate(timeout=60)
    assert first.returncode == 130
    assert [line for line in err.splitlines() if not line.startswith("note: ")] == ["error: stopped by SIGINT"]
    assert len(workers) == 2
    assert not any(map(is_running, workers))
    assert not [t for t in trials_in(tmp_path / "s.db") if t.state == TrialState.RUNNING]
    assert not (tmp_path / "s-best.txt").exists()

    second = start(*command)
    wait_until(lambda: begun(4))
    workers = workers_of(second.pid)
    second.kill()
    wait_until(lambda: not any(map(is_running, workers)), seconds=30)
    second.communicate()

    result = run_script("sweep.py", *command, **ONE_THREAD)
    assert result.returncode == 0, result.stderr
    assert len(finished_points(trials_in(tmp_path / "s.db"))) == 6


def test_a_mistake_of_a_worker_ends_the_script_in_one_line(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "runs" / "s-1").mkdir(parents=True)
    result = run_script(
        "sweep.py", "--workers", "2", "--study", tmp_path / "s.db", *flags, "--runs", tmp_path / "runs", **ONE_THREAD
    )
    error = the_error(Finished(result.returncode, result.stdout, result.stderr))
    assert "s-1: the run of the next trial would go there, but it exists" in error


# --- many short trials, on a file and on PostgreSQL -------------------------------------------------------------------


def driver_is_missing() -> bool:
    return importlib.util.find_spec("psycopg") is None


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """A new PostgreSQL server on a socket in a temporary directory; the URL's database is to be filled in."""
    folders = [Path(path).parent for path in [shutil.which("pg_ctl")] if path]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    programs = next((f for f in folders if (f / "initdb").exists() and (f / "pg_ctl").exists()), None)
    if programs is None:
        pytest.skip("needs PostgreSQL's initdb and pg_ctl, which are not installed")
    if driver_is_missing():
        pytest.skip("needs psycopg: pip install 'psycopg[binary]'")
    folder, who = Path(tempfile.mkdtemp(prefix="pg")), {}
    if os.geteuid() == 0:  # initdb refuses to run as root
        names = {entry.pw_name for entry in pwd.getpwall()}
        user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
        os.chown(folder, user.pw_uid, user.pw_gid)
        who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}

    def run(program: str, *given: str) -> None:
        with (folder / "output.txt").open("w") as output:  # the server keeps it open, so it cannot be a pipe
            command = [str(programs / program), "-D", str(folder / "data"), *given]
            done = subprocess.run(command, stdout=output, stderr=output, cwd=folder, timeout=120, **who)
        assert done.returncode == 0, (folder / "output.txt").read_text()

    run("initdb", "--auth=trust", "--username=me", "--no-sync")
    run("pg_ctl", "start", "--wait", "-o", f"-F -k {folder} -h ''", "-l", str(folder / "log.txt"))
    yield f"postgresql://me:{PASSWORD}@/DATABASE?host={folder}"
    run("pg_ctl", "stop", "--mode=immediate")
    shutil.rmtree(folder)


PASSWORD = "geheim1"  # the server trusts everyone on its socket; it must not be shown all the same


def new_database(url: str, name: str) -> str:
    import psycopg

    host = url.partition("host=")[2]
    with psycopg.connect(host=host, user="me", dbname="postgres", autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return url.replace("DATABASE", name)


@pytest.fixture(params=["file", pytest.param("server", marks=pytest.mark.slow)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """--study: a file, or an empty database on a PostgreSQL server."""
    if request.param == "file":
        return str(tmp_path / "s.db")
    number = next(DATABASES)
    return new_database(request.getfixturevalue("postgresql"), f"study_{os.getpid()}_{number}")


DATABASES = itertools.count()

# A worker whose trials are short, or endless on request. It starts when it reads a line.
SHORT = """
import random, sys, time
import multitask_classifier, storage, sweep, trials

def train(flags, on_epoch=None):
    (flags.runs / flags.name).mkdir(parents=True)  # fails if another worker has the directory
    time.sleep(600 if ENDLESS else random.random() / 20)
    return dict.fromkeys(["sst", "para", "sts", "overall"], flags.lr * 100 + flags.batch_size / 1000)

ENDLESS = sys.argv.pop(1) == "endless"
multitask_classifier.train_multitask = train
trials.POLL, storage.HEARTBEAT, storage.GRACE = 0.1, 1, 4
args = trials.with_trials(sweep.get_args(sys.argv[1:]))
print("ready", flush=True)
sys.stdin.readline()
trials.work(args, *args.study.open(args))
"""


@pytest.fixture
def short_worker(tiny_checkpoint: Path, task_files: Path, tmp_path: Path) -> Callable[..., subprocess.Popen]:
    def run(place: str, kind: str = "short") -> subprocess.Popen:
        search = ["--study", place, "--search", "lr=1e-3,1e-4,1e-5", "batch_size=1,2,3,4,5,6,7,8"]
        search += ["--model", tiny_checkpoint, "--data", task_files, "--runs", tmp_path / "runs"]
        command = [sys.executable, "-c", SHORT, kind, *map(str, search)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=os.environ | ONE_THREAD, **pipes)

    return run


def go(process: subprocess.Popen) -> None:
    process.stdin.write("go\n")
    process.stdin.flush()


def trials_at(place: str) -> list[FrozenTrial]:
    found = place_of(place)
    url = f"sqlite:///{found.path}" if isinstance(found, StudyFile) else found.url.render_as_string(hide_password=False)
    return optuna.load_study(study_name="sweep", storage=url).trials


def test_processes_that_start_together_train_every_point_once(place: str, short_worker: Callable) -> None:
    """They also create the study together: on several machines nobody is first."""
    workers = [short_worker(place) for _ in range(3)]
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        go(worker)
    ends = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0, 0], [err for _, err in ends]
    found = trials_at(place)
    assert len(found) == len(finished_points(found)) == 24
    assert [t.number for t in found] == list(range(24))
    assert sum("score" in out for out, _ in ends) >= 2, "one did all the work"


def test_a_dead_process_is_noticed_and_its_point_is_tried_again(
    place: str, short_worker: Callable, tmp_path: Path
) -> None:
    stuck, other = short_worker(place, "endless"), short_worker(place)
    stuck.stdout.readline()
    go(stuck)
    wait_until(lambda: (tmp_path / "runs").is_dir() and any((tmp_path / "runs").iterdir()))
    other.stdout.readline()
    go(other)
    wait_until(lambda: sum(t.state == TrialState.COMPLETE for t in trials_at(place)) == 23)
    time.sleep(6)  # longer than the grace period: the trial is alive, so it is left alone
    assert [t.state for t in trials_at(place)] == [TrialState.RUNNING] + [TrialState.COMPLETE] * 23
    stuck.kill()
    stuck.communicate()
    out, err = other.communicate(timeout=60)
    assert other.returncode == 0, err
    found = trials_at(place)
    assert [t.state for t in found] == [TrialState.FAIL] + [TrialState.COMPLETE] * 24
    assert found[0].params == found[-1].params
    assert "waiting for trial 0, which other workers are training" in out


def test_a_search_on_postgresql_is_like_one_in_a_file_and_shows_no_password(
    postgresql: str,
    flags: list[str],
    run_main: Callable[..., Finished],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = new_database(postgresql, "whole")
    recipe = tmp_path / "best.txt"
    monkeypatch.chdir(tmp_path)  # the plot goes to runs/
    shared = ["--runs", tmp_path / "runs", "--write_recipe", recipe, "--trials", "3"]
    finished = run_main(sweep, "--study", url, *flags, *shared)
    assert finished.status == 0, finished.err
    assert "postgresql://me@/whole: 0 trials so far" in finished.out
    file = run_main(sweep, "--study", "s.db", *flags, *shared[:2], "--trials", "3")
    assert file.status == 0, file.err
    assert finished_points(trials_at(url)) == finished_points(trials_at("s.db"))
    assert (tmp_path / "runs" / "whole.png").is_file()
    assert recipe.read_text().startswith("# Written by sweep.py: the best trial of postgresql://me@/whole, trial ")
    assert "3 trials so far" in run_main(sweep, "--study", url, *flags, *shared).out
    assert PASSWORD not in finished.out + finished.err
    for path in filter(Path.is_file, tmp_path.rglob("*")):
        assert PASSWORD.encode() not in path.read_bytes(), path
    other = run_main(sweep, "--study", url, *flags, *shared, "--epochs", "5")
    assert "--study postgresql://me@/whole: was started with --epochs 3 (now 5)." in the_error(other)


def test_a_database_of_another_program_is_refused_and_not_changed(
    postgresql: str,
    flags: list[str],
    run_main: Callable[..., Finished],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import psycopg

    monkeypatch.chdir(tmp_path)
    url = new_database(postgresql, "songs")
    with psycopg.connect(host=url.partition("host=")[2], user="me", dbname="songs", autocommit=True) as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
        error = the_error(run_main(sweep, "--study", url, *flags))
        assert "postgresql://me@/songs: must be an empty database or a study's, found tables of another" in error
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
    assert tables == [("songs",)]


# --- the flag --study -------------------------------------------------------------------------------------------------


def test_a_path_is_a_file_and_a_url_is_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "psycopg")
    assert place_of("runs/mine.db") == StudyFile(Path("runs/mine.db"))
    assert place_of("sqlite:///runs/mine.db") == StudyFile(Path("runs/mine.db"))
    for scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        place = place_of(f"{scheme}://me:secret@host:5433/search?sslmode=require")
        assert isinstance(place, StudyServer)
        assert place.url.drivername == "postgresql+psycopg"
        assert (place.url.password, place.url.query) == ("secret", {"sslmode": "require"})
        assert place.shown == "postgresql://me@host:5433/search"
        assert (place.run_prefix, place.plot, place.recipe) == (
            "search", Path("runs/search.png"), Path("runs/search-best.txt"),
        )  # fmt: skip


def test_an_older_driver_is_used_if_it_is_the_one_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "psycopg2")
    assert place_of("postgresql://me@host/search").url.drivername == "postgresql+psycopg2"


WRONG_URLS = {
    "postgresql://me:secret@host:port/db": "must be a URL such as postgresql://user@host/database, found one that",
    "postgresql://me:secret@host": "must name a database, found none.",
    "": "--study must be a file or a URL, found ''. Write for example runs/study.db.",
    "sqlite://": "--study must be a file or a URL, found ''.",
    "https://me:secret@host/db": "needs a driver of SQLAlchemy for https (Can't load plugin: ",
    "mysql://me:secret@host/db": "needs a driver of SQLAlchemy for mysql (No module named 'MySQLdb'). Install it",
}


@pytest.mark.parametrize("url", WRONG_URLS)
def test_a_wrong_url_is_refused_in_one_line_without_its_password(
    url: str, flags: list[str], run_main: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "mysql" in url and importlib.util.find_spec("MySQLdb"):
        pytest.skip("the driver of MySQL is installed")
    monkeypatch.setattr("storage._postgresql_driver", lambda scheme: "postgresql+psycopg")
    monkeypatch.chdir(tmp_path)
    finished = run_main(sweep, "--study", url, *flags)
    assert WRONG_URLS[url] in the_error(finished)
    assert "secret" not in finished.out + finished.err
    assert not (tmp_path / "s.db").exists()


def test_a_missing_driver_says_what_to_install(
    flags: list[str], run_main: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None)
    error = the_error(run_main(sweep, "--study", "postgresql://me:secret@host/db", *flags))
    assert error.endswith("needs the driver psycopg, which is not installed. Run pip install 'psycopg[binary]'.")
    assert "secret" not in error


@pytest.mark.skipif(driver_is_missing(), reason="needs psycopg: pip install 'psycopg[binary]'")
def test_a_server_that_does_not_answer_is_one_line(
    flags: list[str], run_main: Callable[..., Finished], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = the_error(run_main(sweep, "--study", "postgresql://me:secret@127.0.0.1:1/db", *flags))
    assert "--study postgresql://me@127.0.0.1:1/db: the database must be reachable, but connection" in error
    assert "secret" not in error


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("postgresql://me:secret@host/db?password=secret", "postgresql://me@host/db"),
        ("--study=postgresql://me:secret@host:5433/db", "--study=postgresql://me@host:5433/db"),
        ("postgresql://me:secret@host:port/db", "postgresql://..."),
        ("runs/study.db", "runs/study.db"),
        ("lr=1e-4,1e-5", "lr=1e-4,1e-5"),
    ],
)
def test_a_recorded_command_has_no_password(token: str, expected: str) -> None:
    assert without_password(token) == expected


def test_a_file_of_any_name_can_be_a_study(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """SQLAlchemy reads ? and % of a URL as something else."""
    write_task_files(tmp_path / "data")
    path = tmp_path / "a study? 100%.db"
    given = ["--study", path, *SIX, "--", "--model", tiny_checkpoint, "--data", tmp_path / "data"]
    args = with_trials(sweep.get_args([*map(str, given)]))
    study, _ = args.study.open(args)
    assert json.loads(json.dumps(study.user_attrs["facts"]["flags"]["method"])) == "grid"
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".db")] == [path.name]
