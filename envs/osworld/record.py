"""What an episode showed and what was said, kept as files: for runs whose journal has no images.

FOLDER/TASK/RANDOM/000.png, 001.png, ...     the screens in order
FOLDER/TASK/RANDOM/turns.jsonl               {"screen": the last one shown, "said": ...} a turn
"""

from __future__ import annotations

import json
from pathlib import Path
from uuid import uuid4


class Record:
    """Of one episode. Its folder is made with the first file."""

    def __init__(self, folder: Path, task_id: str) -> None:
        self._folder = folder / task_id / uuid4().hex[:8]
        self._screens = 0

    def screens(self, pngs: tuple[bytes, ...]) -> None:
        """What was shown."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for png in pngs:
            (self._folder / f"{self._screens:03}.png").write_bytes(png)
            self._screens += 1

    def turn(self, said: str) -> None:
        """What the policy answered."""
        with (self._folder / "turns.jsonl").open("a") as file:
            file.write(json.dumps({"screen": self._screens - 1, "said": said}) + "\n")
