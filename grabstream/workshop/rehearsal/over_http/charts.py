"""Charts as SVG, for a page without scripts: bars of each slice of time, and lines on a logarithmic scale.

Colours are classes (`c0` to `c7`), which the page gives for light and for dark. Every mark has a title, which
browsers show when it is pointed at.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Final, NamedTuple

WIDTH: Final = 720
HEIGHT: Final = 220
LEFT: Final = 76
RIGHT: Final = 8
TOP: Final = 12
BOTTOM: Final = 34
CLASSES: Final = 8
_INNER_WIDTH: Final = WIDTH - LEFT - RIGHT
_INNER_HEIGHT: Final = HEIGHT - TOP - BOTTOM


class Time(NamedTuple):
    """The axis of time: slices of a width."""

    slice_seconds: float
    slices: int

    @property
    def seconds(self) -> float:
        """The whole time."""
        return self.slice_seconds * self.slices

    def x(self, seconds: float) -> float:
        """Where a time is."""
        return LEFT + _INNER_WIDTH * seconds / self.seconds

    def span(self, place: int) -> str:
        """A slice in words."""
        start = place * self.slice_seconds
        return f"{start:g} to {start + self.slice_seconds:g} s"


Scale = Callable[[float], float]


def bars(
    time: Time,
    series: Mapping[str, Sequence[float]],
    described: str,
    line: Sequence[tuple[float, float]] = (),
) -> str:
    """Stacked bars, a series above the other; `line` is a curve over them, (seconds, rate)."""
    totals = [sum(values) for values in zip(*series.values(), strict=True)] or [0.0]
    maximum, step = nice(max([*totals, *(rate for _, rate in line)]))

    def y(value: float) -> float:
        return TOP + _INNER_HEIGHT * (1 - value / maximum)

    marks = []
    for place in range(time.slices):
        base = 0.0
        x, width = time.x(place * time.slice_seconds), _INNER_WIDTH / time.slices
        for number, (name, values) in enumerate(series.items()):
            value = values[place]
            if value > 0:
                marks.append(
                    f'<rect class="c{number % CLASSES}" x="{x:.1f}" y="{y(base + value):.1f}" '
                    f'width="{max(width - 1, 0.5):.1f}" height="{y(base) - y(base + value):.2f}">'
                    f"<title>{escape(name)}: {value:,.1f} a second, {time.span(place)}</title></rect>"
                )
                base += value
    if line:
        points = " ".join(f"{time.x(min(at, time.seconds)):.1f},{y(rate):.1f}" for at, rate in line)
        marks.append(f'<polyline class="plan" points="{points}"><title>planned</title></polyline>')
    ticks = [(step * number, f"{step * number:,.10g}") for number in range(round(maximum / step) + 1)]
    return _figure(time, described, ticks, y, marks)


def lines(time: Time, series: Mapping[str, Sequence[float | None]], described: str) -> str:
    """Lines over the middles of the slices, on a logarithmic scale; None: there is no value."""
    values = [value for one in series.values() for value in one if value is not None]
    low = math.floor(math.log10(max(min(values, default=1.0), 0.1)))
    high = max(math.ceil(math.log10(max(values, default=10.0))), low + 1)

    def y(value: float) -> float:
        return TOP + _INNER_HEIGHT * (high - math.log10(max(value, 10.0**low))) / (high - low)

    marks = []
    for number, (name, one) in enumerate(series.items()):
        colour = f"c{number % CLASSES}"
        for points in _runs(one):
            placed = [(time.x((place + 0.5) * time.slice_seconds), y(value)) for place, value in points]
            text = " ".join(f"{x:.1f},{height:.1f}" for x, height in placed)
            marks.append(f'<polyline class="line {colour}" points="{text}"></polyline>')
            marks += [
                f'<circle class="{colour}" cx="{x:.1f}" cy="{height:.1f}" r="2.5">'
                f"<title>{escape(name)}: {value:,.1f} ms, {time.span(place)}</title></circle>"
                for (x, height), (place, value) in zip(placed, points, strict=True)
            ]
    ticks = [(10.0**power, f"{10.0**power:,.10g}") for power in range(low, high + 1)]
    return _figure(time, described, ticks, y, marks)


def legend(names: Sequence[str]) -> str:
    """The names of the series, in the order of their colours."""
    shown = (
        f'<li><span class="swatch c{number % CLASSES}"></span>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(shown)}</ul>'


def _runs(values: Sequence[float | None]) -> Iterator[list[tuple[int, float]]]:
    """The stretches of places that have a value."""
    for is_there, group in groupby(enumerate(values), lambda one: one[1] is not None):
        if is_there:
            yield [(place, value) for place, value in group if value is not None]


def _figure(
    time: Time, described: str, ticks: Sequence[tuple[float, str]], y: Scale, marks: Sequence[str]
) -> str:
    grid = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{text}</text>'
        for value, text in ticks
    ]
    _, step = nice(time.seconds, 8)
    seconds = [step * number for number in range(int(time.seconds / step) + 1)]
    grid += [
        f'<text class="tick" x="{time.x(at):.1f}" y="{HEIGHT - BOTTOM + 18}" '
        f'text-anchor="middle">{at:g}</text>'
        for at in seconds
    ]
    grid.append(f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">seconds</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(described)}">'
        f"{''.join(grid)}{''.join(marks)}</svg>"
    )


def nice(maximum: float, steps_max: int = 5) -> tuple[float, float]:
    """A round maximum that is not below a value (0: 1), and the step of its ticks: 1, 2 or 5 times a power of
    10.
    """
    maximum = maximum or 1.0
    raw = maximum / steps_max
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    return step * max(1, math.ceil(maximum / step - 1e-9)), step
