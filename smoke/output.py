"""How the suite's commands put their results where a person asked for them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(path: Path, text: str) -> None:
    """Put a text at a path, all or nothing; a device or a pipe is written directly.

    Args:
        path: Where.
        text: What.

    Raises:
        OSError: If it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_json(path: str | None, document: Mapping[str, Any], indent: int = 2) -> None:
    """Put a document where ``--json`` says.

    Args:
        path: Where; ``-`` is standard output; nowhere if None.
        document: What.
        indent: Blanks for each level.

    Raises:
        OSError: If it cannot be written.
    """
    if path is None:
        return
    text = json.dumps(document, indent=indent, sort_keys=True, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write(Path(path), text)
