"""Where a file that tasks fetch from the web lies, when somebody has put it there.

    downloads/huggingface.co/datasets/xlangai/.../Book.xlsx     for https://huggingface.co/datasets/xlangai/.../Book.xlsx

That is the tree `wget --force-directories URL` writes. Nothing here reaches the network.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit


def downloaded(folder: Path | None, url: str) -> Path | None:
    """The file of this URL, or None where it is not in the folder (or there is no folder)."""
    parts = urlsplit(url)
    if folder is None or not parts.netloc:
        return None
    path = (folder / parts.netloc / unquote(parts.path).lstrip("/")).resolve()
    return path if path.is_file() and path.is_relative_to(folder.resolve()) else None


def is_url(text: str) -> bool:
    """Whether a task means the web by this text.

    >>> is_url("https://example.org/a.png"), is_url("/home/user/a.png"), is_url("chrome://settings")
    (True, False, False)
    """
    return text.startswith(("http://", "https://"))
