"""What a recipe may set on `rz/OSWorld-v0`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..options import EnvOptions
from .actions.calls import Coordinates

Side = Annotated[int, Field(ge=320, le=8192)]  # pixels


class OsworldOptions(EnvOptions):
    """The defaults are OSWorld's own, but for `max_turns`, which is 15 there as well.

    taskset             a task's .json, a .jsonl with a task in each row, or a folder with .json files
    feasible_only       leave out tasks that cannot run on the backend (`rz-agent env osworld list`)
    split               the name of the one split that they are in
    backend             "desktop": a desktop in a sandbox of this run, for each episode;
                        "http": machines that run OSWorld's server, at `servers`
    action_space        how the policy writes what it does: "pyautogui", "computer_13" or "nemotron"
    coordinates         nemotron only: positions as shares of the screen, thousandths of it, or pixels
    screen              width and height in pixels of a desktop
    screenshots         how many screenshots a turn is shown, the current one included
    accessibility_tree  whether the observation also says in words what is on the screen
    tree_chars          characters of that text at most
    pause_s             s after an action before the screen is looked at
    malformed_limit     replies in a row that cannot be read, after which the episode ends
    downloads           a folder with the files that tasks fetch from the web (docs/osworld.md)
    record              a folder for a page of each episode, with its screenshots; None: none
    servers             addresses of the http machines, http://host:5000
    password            what sudo takes on the http machines
    system_prompt       how to use the computer; None: the action space's own text, "": none
    revert              http: a command that makes a machine new, run before each episode; {server} in it is
                        the address; empty: machines are used as they are
    """

    max_turns: int | None = Field(default=15, ge=1)
    feasible_only: bool = True
    split: str = "train"
    backend: Literal["desktop", "http"] = "desktop"
    action_space: Literal["pyautogui", "computer_13", "nemotron"] = "pyautogui"
    coordinates: Coordinates = "relative"
    screen: tuple[Side, Side] = (1920, 1080)
    screenshots: int = Field(default=3, ge=1)
    accessibility_tree: bool = False
    tree_chars: int = Field(default=20_000, ge=1000)
    pause_s: float = Field(default=2.0, ge=0, le=60)
    malformed_limit: int = Field(default=5, ge=1)
    downloads: str | None = None
    record: str | None = None
    servers: tuple[str, ...] = ()
    system_prompt: str | None = None
    password: str = "password"
    revert: tuple[str, ...] = ()
