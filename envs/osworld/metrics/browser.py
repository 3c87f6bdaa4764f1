"""Metrics on the browser: where it is, and how it is set."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from .registry import METRICS, chosen

Rules = Mapping[str, Any]


def _kind(rules: Rules, *known: str) -> str:
    return chosen("rules.type", rules["type"], known)


@METRICS.add("is_expected_active_tab_approximate")
def is_expected_active_tab_approximate(result: Any, rules: Rules) -> float:
    """The tab shows `url`, whatever its query."""
    _kind(rules, "url")
    shown = _url(result)
    return float(shown is not None and _without_query(shown) == _without_query(rules["url"]))


@METRICS.add("is_expected_url_pattern_match")
def is_expected_url_pattern_match(result: Any, rules: Rules) -> float:
    """Every pattern of `expected` is found in the tab's URL."""
    shown = _url(result)
    return float(shown is not None and all(re.search(pattern, shown) for pattern in rules["expected"]))


def _url(tab: Any) -> str | None:
    """A tab is a URL, or an object that has one."""
    url = tab.get("url") if isinstance(tab, Mapping) else tab
    return url if isinstance(url, str) and url else None


def _without_query(url: str) -> str:
    try:
        return urlunsplit(urlsplit(url)._replace(query=""))
    except ValueError:  # a bracket in the address bar
        return url


@METRICS.add("check_enabled_experiments")
def check_enabled_experiments(result: Sequence[str] | None, rules: Rules) -> float:
    """The flags that were changed are `names`, in their order, whatever they were set to."""
    _kind(rules, "names")
    return float([flag.split("@")[0] for flag in result or []] == list(rules["names"]))


@METRICS.add("check_font_size")
def check_font_size(result: Mapping[str, Any] | None, rules: Rules) -> float:
    """The default font size is `value`, or between `min` and `max`, both outside."""
    size = (result or {}).get("default_font_size")
    if not isinstance(size, int | float):
        return 0.0
    if _kind(rules, "value", "range") == "value":
        return float(size == rules["value"])
    return float(rules["min"] < size < rules["max"])


@METRICS.add("is_expected_installed_extensions")
def is_expected_installed_extensions(result: Sequence[str] | None, rules: Rules) -> float:
    """Every extension of `expected` is installed."""
    return float(bool(result) and set(rules["expected"]) <= set(result or ()))


@METRICS.add("is_expected_bookmarks")
def is_expected_bookmarks(result: Mapping[str, Any] | None, rules: Rules) -> float:
    """The bookmark bar has exactly these folders, or pages, or pages in its folder Liked Authors."""
    bar = ((result or {}).get("bookmark_bar") or {}).get("children", [])
    kind = _kind(
        rules, "bookmark_bar_folders_names", "bookmark_bar_websites_urls", "liked_authors_websites_urls"
    )
    if not bar:
        return 0.0
    if kind == "bookmark_bar_folders_names":
        return float({node["name"] for node in bar if node["type"] == "folder"} == set(rules["names"]))
    if kind == "bookmark_bar_websites_urls":
        return float(_pages(bar) == set(rules["urls"]))
    liked = [node for node in bar if node["type"] == "folder" and node["name"] == "Liked Authors"]
    choices = [[url] if isinstance(url, str) else url for url in rules["urls"]]
    return float(
        bool(liked) and any(set(urls) == _pages(liked[0]["children"]) for urls in itertools.product(*choices))
    )


def _pages(nodes: Sequence[Mapping[str, Any]]) -> set[str]:
    return {node["url"] for node in nodes if node["type"] == "url"}


@METRICS.add("is_shortcut_on_desktop")
def is_shortcut_on_desktop(result: Mapping[str, str] | None, rules: Rules) -> float:
    """Some launcher on the desktop has this `name`, or this `exec`."""
    kind = _kind(rules, "name", "exec")
    line = f"{kind.capitalize()}={rules[kind]}"
    return float(any(line in content.splitlines() for content in (result or {}).values()))


@METRICS.add("check_history_deleted")
def check_history_deleted(result: Sequence[Sequence[Any]] | None, rules: Rules) -> float:
    """No page of the history has one of `keywords` in its URL."""
    _kind(rules, "keywords")
    if result is None:
        return 0.0
    return float(not any(keyword in str(row[0]) for keyword in rules["keywords"] for row in result))
