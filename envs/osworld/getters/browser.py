"""What Chrome, or Debian's Chromium in its place, keeps in its profile.

A profile that was never written holds the defaults, as in OSWorld: an untouched browser searches with Google.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from ..machine import Machine
from .registry import GETTERS, Place

PROFILES = (".config/google-chrome", ".config/chromium", "snap/chromium/common/chromium")
FONT_SIZES = {"default_fixed_font_size": 13, "default_font_size": 16, "minimum_font_size": 13}
Settings = dict[str, Any]


async def profile_file(machine: Machine, name: str) -> bytes:
    """A file of the first profile that has it. FileNotFoundError where none has."""
    for folder in PROFILES:
        try:
            return await machine.read(f"{folder}/{name}")
        except FileNotFoundError:
            continue
    raise FileNotFoundError(f"no browser profile has {name}")


async def profile_copy(place: Place, name: str, copy: str) -> str:
    """The path of a copy of such a file; an empty one where it is missing."""
    try:
        content = await profile_file(place.machine, name)
    except FileNotFoundError:
        content = b""
    return place.keep(copy, content)


def settings_of(path: str) -> Settings:
    """The settings in such a file; empty where it is no JSON object."""
    try:
        settings = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _at(settings: Any, *keys: str, default: Any = None) -> Any:
    """The value below these keys, or the default where one is missing."""
    for key in keys:
        if not isinstance(settings, dict) or key not in settings:
            return default
        settings = settings[key]
    return settings


def _below(settings: Any, *keys: str) -> Settings:
    """The object below these keys; empty where there is none."""
    found = _at(settings, *keys)
    return found if isinstance(found, dict) else {}


def _text(value: object) -> str:
    return "true" if value else "false"


def _starts_fresh(settings: Settings) -> str:
    """Whether it opens the new-tab page: 5, or nothing said."""
    return _text("session" not in settings or _at(settings, "session", "restore_on_startup") == 5)


def _extensions(settings: Settings, *keys: str) -> list[Any]:
    """That property of every installed extension that has it."""
    found = [_at(extension, *keys) for extension in _below(settings, "extensions", "settings").values()]
    return [value for value in found if value is not None]


# name of the getter -> what it reads from the profile's Preferences
PREFERENCES: dict[str, Callable[[Settings], Any]] = {
    "default_search_engine": lambda s: _at(
        s, "default_search_provider_data", "template_url_data", "short_name", default="Google"
    ),
    "chrome_font_size": lambda s: FONT_SIZES | _below(s, "webkit", "webprefs"),
    "profile_name": lambda s: _at(s, "profile", "name"),
    "enable_do_not_track": lambda s: _text(_at(s, "enable_do_not_track")),
    "enable_enhanced_safety_browsing": lambda s: _text(_at(s, "safebrowsing", "enhanced")),
    "enable_safe_browsing": lambda s: _text(
        _at(s, "safebrowsing", "enhanced") or _at(s, "safebrowsing", "enabled")
    ),
    "new_startup_page": _starts_fresh,
    "find_unpacked_extension_path": lambda s: _extensions(s, "path"),
    "find_installed_extension_name": lambda s: _extensions(s, "manifest", "name"),
    "data_delete_automacally": lambda s: _text(
        _at(s, "profile", "default_content_setting_values") is not None
    ),
}
# the same for Local State, which all profiles share
LOCAL_STATE: dict[str, Callable[[Settings], Any]] = {
    "enabled_experiments": lambda s: _at(s, "browser", "enabled_labs_experiments", default=[]),
    "chrome_language": lambda s: _at(s, "intl", "app_locale", default="en-US"),
}


def setting(name: str, path: str) -> Any:
    """What the getter of that name reads in such a file."""
    return {**PREFERENCES, **LOCAL_STATE}[name](settings_of(path))


def _add(name: str, file: str) -> None:
    @GETTERS.add(name)
    async def read(place: Place, config: Mapping[str, Any]) -> Any:
        return await place.judge.call(setting, name, await profile_copy(place, file, "profile.json"))


for _name in PREFERENCES:
    _add(_name, "Default/Preferences")
for _name in LOCAL_STATE:
    _add(_name, "Local State")


@GETTERS.add("bookmarks")
async def bookmarks(place: Place, config: Mapping[str, Any]) -> Settings:
    """The roots of the bookmarks: `bookmark_bar` and its siblings."""
    path = await profile_copy(place, "Default/Bookmarks", "bookmarks.json")
    found: Settings = await place.judge.call(bookmark_roots, path)
    return found


def bookmark_roots(path: str) -> Settings:
    """See `bookmarks`."""
    return _below(settings_of(path), "roots")


@GETTERS.add("history")
async def history(place: Place, config: Mapping[str, Any]) -> list[list[Any]]:
    """[url, title, time] of every page in the history."""
    return await _rows(place, "History", str(config["dest"]), "SELECT url, title, last_visit_time FROM urls")


@GETTERS.add("cookie_data")
async def cookie_data(place: Place, config: Mapping[str, Any]) -> list[list[Any]]:
    """Every cookie's row, its host second."""
    return await _rows(place, "Cookies", str(config["dest"]), "SELECT * FROM cookies")


async def _rows(place: Place, file: str, copy: str, query: str) -> list[list[Any]]:
    path = place.keep(copy, await profile_file(place.machine, f"Default/{file}"))
    rows: list[list[Any]] = await place.judge.call(database_rows, path, query)
    return rows


def database_rows(path: str, query: str) -> list[list[Any]]:
    """What a query finds; bytes as the text of their hexadecimal digits."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as database:
            return [[v.hex() if isinstance(v, bytes) else v for v in row] for row in database.execute(query)]
    except sqlite3.DatabaseError as error:
        raise FileNotFoundError(f"the browser's {Path(path).name} is no database: {error}") from error
