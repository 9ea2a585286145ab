"""Timing for the benchmarks: two sides that take turns, and a result that compares them."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from tqdm import tqdm


@dataclass
class Result:
    name: str
    ours_ms: float
    peer: str
    peer_ms: float
    ratio: float
    target: float
    ok: bool
    note: str = ""

    @classmethod
    def of(
        cls, name: str, ours: list[float], peer: str, theirs: list[float], target: float, note: str = ""
    ) -> "Result":
        """Compare the medians of times in seconds."""
        a, b = (1000 * statistics.median(times) for times in (ours, theirs))
        return cls(name, round(a, 3), peer, round(b, 3), round(a / b, 3), target, a / b <= target, note)


def seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def take_turns(
    actions: dict[str, Callable[[], float]], rounds: int, label: str, warm_up: int = 3
) -> dict[str, list[float]]:
    """Each action returns its own time in seconds; all run once per round, one after the other."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for done in tqdm(range(warm_up + rounds), desc=label, leave=False, disable=None):
        for name, action in actions.items():
            spent = action()
            if done >= warm_up:
                times[name].append(spent)
    return times
