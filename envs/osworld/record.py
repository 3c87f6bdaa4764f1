"""Episodes kept as pages, with the screenshots that a model which reads no images never sees.

record = Record(folder, task, options)       nothing is written yet
record.recorder                              hears the episode (`envs/recording.py`)
record.write()                               FOLDER/TASK-RANDOM.html
"""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from ..recording import Recorder
from ..recording_page import save
from ..task import Task
from .options import OsworldOptions


class Record:
    """Of one episode."""

    def __init__(self, folder: Path, task: Task, options: OsworldOptions) -> None:
        self._file = folder / f"{task.id}-{uuid4().hex[:8]}.html"
        chosen = options.model_dump(mode="json", exclude_defaults=True)
        self.recorder = Recorder("rz/OSWorld-v0", chosen, task)

    @property
    def over(self) -> bool:
        """Whether the episode has ended."""
        return self.recorder.recording.fate != "running"

    def write(self) -> None:
        """Write the page, making its folder. ConfigError where it cannot be written."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        save(self.recorder.recording, self._file)
