"""What a person sees while a run goes on, and how they ask it to stop.

    Observer         what `train` tells: phases of the start, figures of each update, notes
    observer()       a live display on a terminal, one line for each update elsewhere

`train` calls these from one thread and reads `stop` between updates: once it is set the run saves a
checkpoint and returns. Nothing here waits and nothing here can fail a run; figures that are absent
are shown as a dash, never as 0.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.align import Align
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Figures = Mapping[str, object]


class Observer(Protocol):
    """Told by `train` what happens; asked by it whether to stop."""

    @property
    def stop(self) -> threading.Event:
        """Set when a person asked for the end: checkpoint, then return."""
        ...

    def phase(self, name: str, detail: str = "") -> None:
        """What is being done now, such as "starting the engine"."""
        ...

    def live(self, figures: Figures) -> None:
        """Figures between updates, such as {"episodes running": 96}; shown, not kept."""
        ...

    def update(self, figures: Figures) -> None:
        """The figures of a finished update, under their names of metrics.jsonl."""
        ...

    def note(self, text: str) -> None:
        """A warning or a piece of news that must stay readable."""
        ...


class _Clock:
    """Progress and the time left, from the updates seen by this process only (a resume starts anew)."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self._first: tuple[int, float] | None = None
        self._last = (0, 0.0)

    def tick(self, update: int) -> None:
        self.done = update
        self._last = (update, time.monotonic())
        self._first = self._first or self._last

    def left_s(self) -> float | None:
        if self._first is None or self._last[0] == self._first[0]:
            return None
        pace = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return max(0.0, pace * (self.total - self.done))


def number(value: object, digits: int = 3) -> str:
    """A figure for a person; a dash where there is none.

    >>> number(None), number(0.81234), number(1.5e-7), number(12345.6)
    ('-', '0.812', '1.50e-07', '12346')
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-"
    if isinstance(value, int) or abs(value) >= 10_000:
        return f"{value:.0f}"
    if value != 0 and abs(value) < 10**-digits:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{digits}f}"


def minutes(seconds: float | None) -> str:
    """Seconds as m:ss or h:mm:ss; a dash where unknown.

    >>> minutes(75), minutes(3675), minutes(None)
    ('1:15', '1:01:15', '-')
    """
    if seconds is None:
        return "-"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


class _Audited:
    """Audit totals over the updates this process saw: what a person asks is "0 of how many?"."""

    def __init__(self) -> None:
        self.tokens = self.differing = 0

    def add(self, figures: Figures) -> None:
        tokens, differing = figures.get("audit/tokens"), figures.get("audit/differing")
        self.tokens += int(tokens) if isinstance(tokens, int | float) else 0
        self.differing += int(differing) if isinstance(differing, int | float) else 0

    def __str__(self) -> str:
        return f"{self.differing} of {self.tokens} differ" if self.tokens else "-"


class LineObserver:
    """One line for each phase, note and update: for logs and pipes."""

    def __init__(self, out: TextIO, total_updates: int) -> None:
        self.stop = threading.Event()
        self._out, self._clock, self._audited = out, _Clock(total_updates), _Audited()
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def phase(self, name: str, detail: str = "") -> None:
        self._say(f"{name}{': ' if detail else ''}{detail}")

    def live(self, figures: Figures) -> None:
        """Nothing: a log of figures that no update stands behind would drown the ones that count."""

    def note(self, text: str) -> None:
        self._say(f"note: {text}")

    def update(self, figures: Figures) -> None:
        self._clock.tick(_update_of(figures))
        self._audited.add(figures)
        self._say(
            f"update {self._clock.done}/{self._clock.total}"
            f"  reward {number(figures.get('reward/mean'))}"
            f"  d3 {number(figures.get('is/d3'))}"
            f"  lag {number(figures.get('lag/mean'), 1)} (max {number(figures.get('lag/max'))})"
            f"  grad {number(figures.get('grad_norm'))}"
            f"  {number(figures.get('throughput/tokens_per_s'), 0)} tok/s"
            f"  audit {self._audited}"
            f"  left {minutes(self._clock.left_s())}"
        )

    def _say(self, text: str) -> None:
        print(f"[{minutes(time.monotonic() - self._start)}] {text}", file=self._out, flush=True)


class LiveObserver:
    """The same on a terminal: a display that stays in place, notes scrolling above it."""

    def __init__(self, console: Console, total_updates: int, title: str) -> None:
        self.stop = threading.Event()
        self._console, self._title = console, title
        self._clock, self._audited = _Clock(total_updates), _Audited()
        self._start = time.monotonic()
        self._phase = "starting"
        self._figures: dict[str, object] = {}
        self._between: dict[str, object] = {}
        self._rewards: list[float] = []
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def phase(self, name: str, detail: str = "") -> None:
        self._phase = f"{name}{': ' if detail else ''}{detail}"

    def live(self, figures: Figures) -> None:
        self._between = dict(figures)

    def note(self, text: str) -> None:
        self._console.print(Text(f"note: {text}", style="yellow"))

    def update(self, figures: Figures) -> None:
        self._clock.tick(_update_of(figures))
        self._audited.add(figures)
        self._figures = dict(figures)
        reward = figures.get("reward/mean")
        if isinstance(reward, int | float):
            self._rewards.append(float(reward))

    def _render(self) -> RenderableType:
        clock, figures = self._clock, self._figures
        spent = minutes(time.monotonic() - self._start)
        head = Text.assemble(
            (self._title, "bold"), f"  {self._phase}  {spent} spent, {minutes(clock.left_s())} left"
        )
        if self.stop.is_set():
            head.append("  stopping after a checkpoint (Ctrl-C again ends at once)", style="yellow")
        table = Table.grid(padding=(0, 3))
        table.add_row(
            f"update {clock.done}/{clock.total}",
            f"reward {number(figures.get('reward/mean'))} {spark(self._rewards)}",
            f"D3 {number(figures.get('is/d3'))}",
            f"lag {number(figures.get('lag/mean'), 1)} (max {number(figures.get('lag/max'))})",
        )
        bad = bool(self._audited.differing)
        table.add_row(
            f"grad norm {number(figures.get('grad_norm'))}",
            f"{number(figures.get('throughput/tokens_per_s'), 0)} tokens/s",
            f"cache {number(figures.get('cache/hit_share'), 2)}",
            Text(f"audit {self._audited}", style="bold red" if bad else "green"),
        )
        between = "  ".join(f"{name} {number(value, 1)}" for name, value in self._between.items())
        bar = ProgressBar(total=clock.total, completed=clock.done, width=min(60, self._console.width))
        return Group(head, Align.left(bar), table, Text(between, style="dim"))


def spark(values: list[float], width: int = 24) -> str:
    """The last values as a row of bars between 0 and their maximum.

    >>> spark([0.0, 0.5, 1.0])
    '▁▄█'
    """
    recent = values[-width:]
    top = max([*recent, 1e-9])
    return "".join("▁▂▃▄▅▆▇█"[max(0, min(7, int(value / top * 7.999)))] for value in recent)


def observer(out: TextIO, total_updates: int, title: str) -> LineObserver | LiveObserver:
    """The live display when `out` is a terminal, lines otherwise."""
    console = Console(file=out)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveObserver(console, total_updates, title)
    return LineObserver(out, total_updates)


def _update_of(figures: Figures) -> int:
    update = figures["update"]
    if not isinstance(update, int):
        raise TypeError(f"figures of an update need its number, got update = {update!r}")
    return update
