"""How the evaluator fetches what it compares, by the names that published tasks use (`registry.py`)."""

from . import browser, commands, files, programs, rules, screen
from .registry import GETTERS, Getter, Place

__all__ = ["GETTERS", "Getter", "Place", "browser", "commands", "files", "programs", "rules", "screen"]
