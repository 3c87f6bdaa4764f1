"""A recorded episode as one HTML page that needs nothing else, and back.

    save(recording, path)        path ends in .html or .json
    load_recording(path)         of either

Invariants: whatever was said, the page loads nothing, runs nothing and shows it as text: all of it is
escaped, and the page's own policy forbids scripts and every source but its data URIs. Its images stand in it
once, as pictures; so a recording that is loaded from a page has none, and the rest of it is whole.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .recording import Recording, Said
from .tool_call import CLOSE, OPEN

_DATA = re.compile(r'<script type="application/json" id="recording">(.*?)</script>', re.S)
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; margin: 0; } h1 small { font-weight: normal; color: #777; }
table { border-collapse: collapse; margin: 1rem 0; }
td { padding: .1rem 1.5rem .1rem 0; vertical-align: top; }
td:first-child { color: #777; }
section { border-left: 4px solid #bbb; margin: 1rem 0; padding: .2rem 1rem; }
section > b { color: #555; font-size: .85rem; } section > b i { font-weight: normal; color: #999; }
pre { font: 13px/1.45 ui-monospace, monospace; margin: .3rem 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
img { max-width: 100%; border: 1px solid #ccc; display: block; margin: .4rem 0; }
details { color: #777; font-size: .85rem; }
hr { border: 0; border-top: 2px dashed #bbb; margin: 2rem 0; }
.assistant, .policy { border-color: #3b73c8; background: #f4f7fc; } .tool { border-color: #3a9a5c; }
.system { border-color: #a070c0; }
.call { background: #fff; border: 1px solid #d5dff0; padding: .3rem .6rem; }
.call + .call { margin-top: .4rem; } .bad { color: #b02020; } .thought { color: #888; font-style: italic; }
"""


def check_name(path: Path) -> None:
    """ConfigError for a file that `save` would not write, by its name."""
    if path.suffix not in (".html", ".json"):
        raise ConfigError(
            source="recording", key="file", value=str(path), remedy="Its name must end in .html or .json."
        )


def save(recording: Recording, path: Path) -> None:
    """Write it, whole or not at all; ConfigError where it cannot be written."""
    check_name(path)
    text = page(recording) if path.suffix == ".html" else json.dumps(recording.dump())
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8", errors="replace")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(
            source="recording", key="file", value=str(path), why=f"({error.strerror})", remedy="Name another."
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def load_recording(path: Path) -> Recording:
    """What `save` wrote; ConfigError for anything else."""
    try:
        text = path.read_text(encoding="utf-8")
        found = _DATA.search(text)
        return Recording.load(json.loads(found[1] if found else text))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            source="recording",
            key="file",
            value=str(path),
            why=f"is no recorded episode ({error})",
            remedy="Name a file that `rz-agent env run --record FILE` wrote.",
        ) from error


def page(recording: Recording) -> str:
    """The whole page."""
    title = f"{recording.environment}: {recording.task_id}"
    said = "\n".join(_said(recording))
    bare = replace(recording, said=tuple(replace(one, images=()) for one in recording.said))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(recording.environment)} <small>{escape(recording.task_id)}</small></h1>\n"
        f"{_table(recording)}\n{said}\n"
        f'<script type="application/json" id="recording">{_json(bare.dump())}</script>\n</body></html>\n'
    )


def _json(values: Mapping[str, Any]) -> str:
    """JSON in which no tag can begin or end."""
    text = json.dumps(values, ensure_ascii=True)
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _table(recording: Recording) -> str:
    ended = f"{recording.fate}: {recording.reason}" if recording.reason else recording.fate
    rows = {
        "reward": f"{recording.reward:g}",
        "ended": ended,
        **{name: f"{value:g}" for name, value in recording.figures.items()},
        **{f"option {name}": str(value) for name, value in recording.options.items()},
    }
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>{cells}</table>"


def _said(recording: Recording) -> Iterator[str]:
    turn = 0
    for number, one in enumerate(recording.said):
        if one.fresh and number:
            yield "<hr>"
        acts = one.role in ("assistant", "policy")
        turn += acts
        label = f"{one.role} {one.name}".strip()
        place = f" <i>turn {turn}</i>" if acts else ""
        body = _turn(one) if acts else _text(one)
        kind = re.sub(r"[^a-z]", "", one.role)
        yield f'<section class="{kind}"><b>{escape(label)}{place}</b>\n{body}</section>'


def _text(one: Said) -> str:
    pictures = "".join(
        f'<img alt="" src="data:image/png;base64,{base64.b64encode(png).decode()}">' for png in one.images
    )
    words = one.text.replace("[image]", "", len(one.images))
    return pictures + (f"<pre>{escape(words)}</pre>" if words.strip() else "")


def _turn(one: Said) -> str:
    """What was thought and said, then each call with its arguments; the text as it was sampled below."""
    if not one.calls:
        return _words(one.text)
    words = one.text
    for call in one.calls:
        raw = f"{OPEN}{call['raw']}"
        words = words.replace(raw + CLOSE, "", 1) if raw + CLOSE in words else words.replace(raw, "", 1)
    calls = "".join(map(_call, one.calls))
    return (
        f"{_words(words)}{calls}<details><summary>as sampled</summary><pre>{escape(one.text)}</pre></details>"
    )


def _words(text: str) -> str:
    thought, closed, rest = text.partition("</think>")
    if not closed:
        return f"<pre>{escape(text)}</pre>" if text.strip() else ""
    thought = thought.removeprefix("<think>").strip()
    shown = f'<pre class="thought">{escape(thought)}</pre>' if thought else ""
    return shown + (f"<pre>{escape(rest)}</pre>" if rest.strip() else "")


def _call(call: Mapping[str, Any]) -> str:
    if call["status"] != "ok":
        said = f"{call['status']}: {call['error']}"
        return (
            f'<div class="call"><b class="bad">{escape(said)}</b><pre>{escape(str(call["raw"]))}</pre></div>'
        )
    rows = "".join(
        f"{escape(str(name))}<pre>{escape(value if isinstance(value, str) else json.dumps(value))}</pre>"
        for name, value in call["arguments"].items()
    )
    return f'<div class="call"><b>{escape(str(call["name"]))}</b><br>{rows}</div>'
