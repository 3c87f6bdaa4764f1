"""Metrics on settings of GIMP, VLC and LibreOffice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from .reading import opened, text_of
from .registry import METRICS, chosen

Rules = Mapping[str, Any]
_OOR = "{http://openoffice.org/2001/registry}"
# Option of VLC -> its value where the file does not say.
VLC_DEFAULTS = {
    "qt-bgcone": "1",
    "qt-max-volume": "125",
    "qt-minimal-view": "0",
    "one-instance-when-started-from-file": "1",
    "qt-slider-colours": "153;210;153;20;210;20;255;199;15;245;39;29",
}


@METRICS.add("check_config_status")
def check_config_status(result: str | None, rules: Rules) -> float:
    """Some line `(key ... value)` of GIMP's settings has this `key` (or both) first, this `value` last."""
    if result is None:
        return 0.0
    keys = [rules["key"]] if isinstance(rules["key"], str) else list(rules["key"])
    for line in text_of(result).splitlines():
        words = [] if line.startswith("#") else line.strip().lstrip("(").rstrip(")").split()
        if words[: len(keys)] == keys and words[-1] == rules["value"]:
            return 1.0
    return 0.0


def vlc_option(result: str, name: str) -> str | None:
    """What VLC's file says of an option, else its default; None where there is neither."""
    found = VLC_DEFAULTS.get(name)
    for line in text_of(result).splitlines():
        key, separated, value = line.partition("=")
        if separated and key.strip() == name:
            found = value.strip()
    return found


def _add_vlc(metric: str, option: str, rule: str) -> None:
    @METRICS.add(metric)
    def has_option(result: str | None, rules: Rules) -> float:
        return float(result is not None and vlc_option(result, option) == str(rules[rule]))


_add_vlc("is_vlc_recordings_folder", "input-record-path", "recording_file_path")
_add_vlc("check_qt_bgcone", "qt-bgcone", "expected_qt_bgcone")
_add_vlc("check_qt_max_volume", "qt-max-volume", "expected_qt_max_volume")
_add_vlc("check_qt_minimal_view", "qt-minimal-view", "expected_qt_minimal_view")
_add_vlc(
    "check_one_instance_when_started_from_file",
    "one-instance-when-started-from-file",
    "expected_one_instance_when_started_from_file",
)


@METRICS.add("check_global_key_play_pause")
def check_global_key_play_pause(result: str | None, rules: Rules) -> float:
    """Whether a global key plays and pauses is `expected_global_key_play_pause` (1 or 0)."""
    if result is None:
        return 0.0
    is_set = "1" if vlc_option(result, "global-key-play-pause") else "0"
    return float(is_set == str(rules["expected_global_key_play_pause"]))


@METRICS.add("check_qt_slider_colours")
def check_qt_slider_colours(result: str | None, rules: Rules) -> float:
    """The volume slider has the expected colours ("match"), or dark ones only ("blackish": all below 100)."""
    if result is None:
        return 0.0
    colours = vlc_option(result, "qt-slider-colours") or ""
    if chosen("rules.type", rules["type"], ("match", "blackish")) == "match":
        return float(colours == rules["expected_qt_slider_colours"])
    values = colours.split(";")
    return float(all(value.isdecimal() and int(value) < 100 for value in values))


@METRICS.add("is_vlc_fullscreen")
def is_vlc_fullscreen(result: Mapping[str, int] | None, screen: Mapping[str, int] | None) -> float:
    """The window is as large as the screen."""
    return float(bool(result and screen) and result == screen)


def _libreoffice(result: str, path: str, name: str) -> str | None:
    """A property of LibreOffice's registrymodifications.xcu; None where it is not said."""
    tree = opened(result, ElementTree.parse)
    for item in tree.iter("item"):
        for prop in item.iter("prop") if item.get(f"{_OOR}path") == path else ():
            if prop.get(f"{_OOR}name") == name:
                return prop.findtext("value")
    return None


@METRICS.add("find_default_font")
def find_default_font(result: str | None, rules: Rules) -> float:
    """Writer's default font is `font_name`."""
    if not result:
        return 0.0
    font = _libreoffice(result, "/org.openoffice.Office.Writer/DefaultFont", "Standard")
    return float(font == rules["font_name"])


@METRICS.add("check_presenter_console_disable")
def check_presenter_console_disable(result: str | None) -> float:
    """Impress shows no presenter console."""
    if not result:
        return 0.0
    enabled = _libreoffice(result, "/org.openoffice.Office.Impress/Misc/Start", "EnablePresenterScreen")
    return float((enabled or "").lower() == "false")


@METRICS.add("check_auto_saving_time")
def check_auto_saving_time(result: str | None, rules: Rules) -> float:
    """LibreOffice saves by itself every `minutes`."""
    if not result:
        return 0.0
    found = _libreoffice(result, "/org.openoffice.Office.Common/Save/Document", "AutoSaveTimeIntervall")
    return float(found == str(rules["minutes"]))
