"""Files that another process reads at any time: it finds the old text or the new, never a half."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the file's text at once. Raises OSError."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
