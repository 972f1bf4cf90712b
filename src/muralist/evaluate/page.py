"""The page's HTML. Whatever comes from a file, prompts and names above all, passes through `escape`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from muralist.evaluate.charts import Chart, clip_chart, score_charts, speed_chart
from muralist.evaluate.measures import MEASURES, best, measured, title
from muralist.evaluate.results import Run, Score
from muralist.evaluate.thumbnails import Choice
from muralist.words import duration

_LONGEST_TEXT = 1000  # of a prompt or an error: some are books
_FAILURES_SHOWN = 300
_DIFFERENT = "These runs were not measured in the same way, so their scores may not be comparable."


class Picture(NamedTuple):
    """A picture on the page."""

    thumbnail: str | None  # a data URI; None if it could not be read
    original: str | None  # its address, where it is near


Pictures = Mapping[tuple[int, int], Picture]  # by number of the run, and number of the picture there


def page(runs: Sequence[Run], choice: Choice, pictures: Pictures, style: str, script: str, plotly: str) -> str:
    """Return the whole page as one text."""
    maker = _Page(runs, choice, pictures)
    name = " · ".join(run.name for run in runs)
    sections = [(key, heading, body) for key, heading, body in maker.sections() if body]
    links = "".join(f'<a href="#{key}">{escape(heading)}</a>' for key, heading, _ in sections)
    bodies = "".join(
        f'<section id="{key}"><h2>{escape(heading)}</h2>{body}</section>' for key, heading, body in sections
    )
    policy = "default-src 'none'; img-src data: file: 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(name)}: evaluation</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<header><p class="product">muralist · evaluation</p><h1>{maker.heading()}</h1><p class="facts">{maker.facts()}</p></header>
<nav aria-label="Sections">{links}</nav>
<main>{bodies}</main>
{_VIEWER}
<script type="application/json" id="thumbnail-data">{_json(maker.used)}</script>
<script type="application/json" id="chart-data">{_json(maker.charts)}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


_VIEWER = """<dialog id="viewer" aria-label="Enlarged picture">
<button type="button" class="close" aria-label="Close">×</button>
<div class="stage"><button type="button" class="previous" aria-label="Previous picture">‹</button>
<img alt=""><button type="button" class="next" aria-label="Next picture">›</button></div>
<p class="prompt"></p><p class="facts"><span class="about"></span> <a target="_blank">original</a></p>
</dialog>"""


class _Page:
    """The parts of the page; pictures and charts they use are collected on the way."""

    def __init__(self, runs: Sequence[Run], choice: Choice, pictures: Pictures) -> None:
        self.runs, self.choice, self.pictures = runs, choice, pictures
        self.used: list[str] = []  # every thumbnail once, however often it is shown
        self.charts: list[Chart] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def heading(self) -> str:
        """Say what was evaluated."""
        return "<span> · </span>".join(f"{self._dot(number)}{escape(run.name)}" for number, run in enumerate(self.runs))

    def facts(self) -> str:
        """Say how much of it, against what, in how long; for several runs, they are compared further down."""
        if len(self.runs) > 1:
            return f"{len(self.runs)} runs side by side"
        results = self.runs[0].results
        count = len(self.runs[0].files) if results.images.count is None else results.images.count
        facts = [_images(count)]
        if results.reference and results.reference.path:
            size = f" ({_images(results.reference.count)})" if results.reference.count is not None else ""
            facts.append(f"against {escape(results.reference.path)}{size}")
        if results.seconds is not None:
            facts.append(f"measured in {duration(results.seconds)}")
        return " · ".join(facts)

    def sections(self) -> Iterable[tuple[str, str, str]]:
        """Yield every section as (id, heading, body); one without a body has nothing to say."""
        yield "scores", "Scores", self._warnings() + self._scores() + self._missing()
        yield "side-by-side", "Side by side", self._rows()
        yield "extremes", "Best and worst by CLIP score", self._extremes()
        yield "pictures", "Pictures", self._grids()
        yield "failures", "Failures", self._failures()
        yield "speed", "Speed", self._speed()
        yield "settings", "Settings and versions", self._settings()

    def _warnings(self) -> str:
        found = self._by_text([[escape(text) for text in run.results.warnings] for run in self.runs])
        if self._measured_differently():
            found.insert(0, f"{_DIFFERENT} Their settings below show what differs.")
        return "".join(f'<p class="warning" role="note">{text}</p>' for text in found)

    def _measured_differently(self) -> bool:
        results = [run.results for run in self.runs]
        references = {result.reference.path if result.reference else None for result in results}
        return len(references) > 1 or len({result.images.count for result in results}) > 1

    def _scores(self) -> str:
        if not (metrics := measured(self.runs)):
            return "<p>Nothing was measured.</p>"
        rows = "".join(self._score_row(metric) for metric in metrics)
        heads = "".join(f"<th>{self._dot(number)}{escape(run.name)}</th>" for number, run in enumerate(self.runs))
        table = f"<thead><tr><th>Score</th>{heads}</tr></thead><tbody>{rows}</tbody>"
        charts = "".join(
            f"<figure><figcaption>{escape(name)} {self._direction(metric)}</figcaption>{self._chart(chart)}</figure>"
            for metric, (name, chart) in zip(metrics, score_charts(self.runs), strict=False)
        )
        charts = charts and f'<div class="small-charts">{charts}</div>'
        return f'<div class="wide"><table class="scores">{table}</table></div>{charts}'

    def _score_row(self, metric: str) -> str:
        winner = best(metric, self.runs)
        cells = []
        for number, run in enumerate(self.runs):
            cell = _score_cell(run.scores.get(metric))
            if winner and winner.run == number:
                word = "best" if winner.clear else "best, not clearly"
                hint = "" if winner.clear else ' title="its interval, if known, touches another"'
                cells.append(f'<td class="best">{cell}<span class="mark"{hint}>★ {word}</span></td>')
            else:
                cells.append(f"<td>{cell}</td>")
        meaning = MEASURES[metric].meaning if metric in MEASURES else ""
        name = f"<b>{escape(title(metric))}</b> {self._direction(metric)}<small>{escape(meaning)}</small>"
        return f"<tr><th>{name}</th>{''.join(cells)}</tr>"

    def _direction(self, metric: str) -> str:
        if metric not in MEASURES:
            return ""
        return f'<span class="direction">{"higher" if MEASURES[metric].higher_is_better else "lower"} is better</span>'

    def _missing(self) -> str:
        texts = []
        for run in self.runs:
            titles: dict[str, list[str]] = {}  # by reason, since several often lack the same file
            for missing in run.results.missing:
                titles.setdefault(missing.reason, []).append(title(missing.metric))
            texts.append([f"<b>{escape(', '.join(of))}</b>: {escape(reason)}" for reason, of in titles.items()])
        items = "".join(f"<li>{text}</li>" for text in self._by_text(texts))
        return items and f'<h3>Not measured</h3><ul class="missing">{items}</ul>'

    def _rows(self) -> str:
        if not self.choice.rows:
            return ""
        rows = "".join(
            f'<div class="row" data-group>{self._text(self.runs[0].prompts[row[0]] or self.runs[0].files[row[0]])}'
            f"<div>{''.join(self._figure(number, index, named=True) for number, index in enumerate(row))}</div></div>"
            for row in self.choice.rows
        )
        return f"<p>The same prompt and seed, by every run.</p>{_filter_box()}<div class='rows'>{rows}</div>"

    def _extremes(self) -> str:
        blocks = ""
        for number in range(len(self.runs)):
            for word, chosen in (("Best", self.choice.best[number]), ("Worst", self.choice.worst[number])):
                if chosen:
                    figures = "".join(self._figure(number, index) for index in chosen)
                    blocks += f'<h3>{self._of(number)}{word}</h3><div class="strip" data-group>{figures}</div>'
        chart = clip_chart(self.runs)
        return blocks and blocks + (self._chart(chart) if chart else "")

    def _grids(self) -> str:
        blocks = ""
        for number, (run, shown) in enumerate(zip(self.runs, self.choice.shown, strict=True)):
            if shown:
                figures = "".join(self._figure(number, index) for index in shown)
                count = f"all {len(shown):,} pictures"
                if len(shown) < len(run.files):
                    count = f"{len(shown):,} of {len(run.files):,} pictures, evenly chosen, with the best and worst"
                summary = f"<summary>{self._of(number)}<small>{count}</small></summary>"
                # Where rows have shown pictures already, each run's own wait until they are asked for.
                state = "" if self.choice.rows else " open"
                blocks += f'<details{state}>{summary}<div class="grid" data-group>{figures}</div></details>'
        # With side-by-side rows the box stands there, above everything it filters.
        return blocks and ("" if self.choice.rows else _filter_box()) + blocks

    def _figure(self, number: int, index: int, named: bool = False) -> str:
        run, picture = self.runs[number], self.pictures[number, index]
        prompt, file, score = run.prompts[index], run.files[index], run.clip_scores[index]
        about = file if score is None else f"{file} · CLIP score {_short(score)}"
        if len(self.runs) > 1:
            about = f"{run.name} · {about}"
        if picture.thumbnail is None:
            seen = '<span class="absent">This picture could not be read.</span>'
        else:
            original = f' data-original="{escape(picture.original)}"' if picture.original else ""
            place = self._numbers.setdefault((number, index), len(self._numbers))
            if place == len(self.used):
                self.used.append(picture.thumbnail)
            data = f'data-picture="{place}" data-about="{escape(about)}"{original}'
            seen = f'<button type="button" aria-label="Enlarge {escape(file)}"><img alt="" {data}></button>'
        badge = "" if score is None else f'<span class="badge">{_short(score)}</span>'
        label = f'<span class="run">{self._of(number)}</span>' if named else ""
        text = self._text(prompt or file)
        hidden = text if not named else text.replace("<p ", "<p hidden ", 1)
        words = escape(f"{prompt} {file}"[:_LONGEST_TEXT].lower())
        return f'<figure data-words="{words}">{seen}{badge}<figcaption>{label}{hidden}</figcaption></figure>'

    def _failures(self) -> str:
        rows, count, unreadable = "", 0, ""
        for number, run in enumerate(self.runs):
            count += len(run.results.failures)
            for failure in run.results.failures[: _FAILURES_SHOWN // len(self.runs)]:
                values = (failure.id, failure.seed, failure.prompt, failure.error, failure.gpu)
                cells = "".join(f"<td>{escape(_cut(value or ''))}</td>" for value in values)
                rows += f"<tr>{f'<td>{self._of(number)}</td>' if len(self.runs) > 1 else ''}{cells}</tr>"
            if names := run.results.images.unreadable:
                shown = ", ".join(escape(_cut(str(name))) for name in names[:50])
                more = f" and {len(names) - 50:,} more" if len(names) > 50 else ""
                unreadable += f"<p>{self._of(number)}{_images(len(names))} could not be read: {shown}{more}.</p>"
        if not count:
            return unreadable or "<p>None are recorded.</p>"
        run_head = "<th>Run</th>" if len(self.runs) > 1 else ""
        head = f"<tr>{run_head}<th>Id</th><th>Seed</th><th>Prompt</th><th>Error</th><th>GPU</th></tr>"
        many = f"<p>{count:,} prompt{' has' if count == 1 else 's have'} no picture"
        many += "." if rows.count("<tr>") == count else f"; {rows.count('<tr>'):,} of them are shown."
        table = f'<table class="failures"><thead>{head}</thead><tbody>{rows}</tbody></table>'
        return f'{many}</p><div class="wide">{table}</div>{unreadable}'

    def _speed(self) -> str:
        if (chart := speed_chart(self.runs)) is None:
            return ""
        totals = []
        for number, run in enumerate(self.runs):
            if run.results.speed:
                rate = sum(one.images_per_second or 0.0 for one in run.results.speed.values())
                gpus = len(run.results.speed)
                words = f"{_short(rate)} images per second on {gpus} GPU{'s' if gpus > 1 else ''}"
                totals.append(f"<li>{self._of(number)}{words}</li>")
        return f'<ul class="plain">{"".join(totals)}</ul>{self._chart(chart)}'

    def _settings(self) -> str:
        columns = [_facts_of(run) for run in self.runs]
        rows = ""
        for name in dict.fromkeys(name for column in columns for name in column):
            values = [column.get(name, "–") for column in columns]
            mark = ' class="differs"' if len(set(values)) > 1 else ""
            rows += f"<tr{mark}><th>{escape(name)}</th>{''.join(f'<td>{escape(_cut(value))}</td>' for value in values)}</tr>"
        heads = "".join(f"<th>{self._dot(number)}{escape(run.name)}</th>" for number, run in enumerate(self.runs))
        head = f"<thead><tr><th>Setting</th>{heads}</tr></thead>" if len(self.runs) > 1 else ""
        return f'<div class="wide"><table class="settings">{head}<tbody>{rows}</tbody></table></div>' if rows else ""

    def _by_text(self, texts: Sequence[Sequence[str]]) -> list[str]:
        """Put before each text the runs that say it, and none before one that all of them say."""
        found = []
        for text in dict.fromkeys(text for said in texts for text in said):
            speakers = [number for number, said in enumerate(texts) if text in said]
            names = "" if len(speakers) == len(self.runs) else "".join(map(self._of, speakers))
            found.append(f"{names}{text}")
        return found

    def _chart(self, chart: Chart) -> str:
        self.charts.append(chart)
        return f'<div class="chart" data-chart="{len(self.charts) - 1}"></div>'

    def _dot(self, number: int) -> str:
        return f'<i class="dot run-{number % 6}"></i>' if len(self.runs) > 1 else ""

    def _of(self, number: int) -> str:
        """Name the run, where there are several."""
        return (
            f'<span class="of">{self._dot(number)}{escape(self.runs[number].name)}</span> '
            if len(self.runs) > 1
            else ""
        )

    @staticmethod
    def _text(prompt: str) -> str:
        return f'<p class="prompt">{escape(_cut(prompt))}</p>'


def _filter_box() -> str:
    return (
        '<div class="filter"><input type="search" id="filter" placeholder="Filter by prompt or file name" '
        'aria-label="Filter pictures by prompt or file name"><output id="found" for="filter"></output></div>'
    )


def _score_cell(score: Score | None) -> str:
    if score is None:
        return "–"
    interval = f'<span class="interval">{_short(score.low)} – {_short(score.high)}</span>' if score.has_interval else ""
    note = f"<small>{escape(score.note)}</small>" if score.note else ""
    return f'<span class="value">{_short(score.value)}</span>{interval}{note}'


def _facts_of(run: Run) -> dict[str, str]:
    """Return everything that was set, and what it ran on, under dotted names."""
    results = run.results
    facts: dict[str, Any] = {"images": results.images.folder, "images counted": results.images.count}
    facts |= _sizes("image sizes", results.images.sizes)
    if results.reference:
        facts |= {"reference": results.reference.path, "reference images": results.reference.count}
        facts |= _sizes("reference sizes", results.reference.sizes)
    facts |= _flat(results.settings, "") | _flat(results.versions, "version of ")
    if results.seconds is not None:
        facts["time taken"] = duration(results.seconds)
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}


def _sizes(name: str, sizes: Mapping[str, int]) -> dict[str, str]:
    said = ", ".join(f"{size} ({count:,})" for size, count in sizes.items())
    return {name: said} if said else {}


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _images(count: int) -> str:
    return f"{count:,} image{'' if count == 1 else 's'}"


def _short(value: float | None) -> str:
    if value is None:
        return "?"
    if 1e-4 <= abs(value) < 1000:
        return f"{value:#.4g}"
    return f"{value:,.1f}" if abs(value) < 1e6 and (value == 0 or abs(value) > 1) else f"{value:.2e}"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def _json(value: Any) -> str:
    """JSON that no text inside it can end."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
