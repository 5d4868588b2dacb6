"""Load, save and check: the manners that Graph, Plan and Timeline share."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ValidationError

from autopar.errors import DocumentError
from hardware_profiles.schema import Schema, readable


class Document(Schema):
    """A JSON document with a format line such as ``autopar-plan/1``.

    ``kind`` and ``version`` are the two halves of that line; a reader accepts its own version and older ones.
    """

    kind: ClassVar[str]
    version: ClassVar[int]
    format: str

    @classmethod
    def format_line(cls) -> str:
        """The format line that this version writes."""
        return f"autopar-{cls.kind}/{cls.version}"

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and check a document; raises DocumentError naming the file, the field and what is allowed."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentError(f"{path}: cannot be read as a {cls.kind}: {error}") from None
        return cls.from_json(text, origin=str(path))

    @classmethod
    def from_json(cls, text: str, origin: str = "<text>") -> Self:
        """The document in ``text``; ``origin`` is named in errors."""
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise DocumentError(
                f"{origin}: not complete JSON ({error}); the file may be cut off: write it again with autopar"
            ) from None
        cls._check_format(data, origin)
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise DocumentError(f"{origin}: not a valid {cls.kind}:\n{readable(error, cls)}") from None

    @classmethod
    def _check_format(cls, data: Any, origin: str) -> None:
        line = data.get("format") if isinstance(data, dict) else None
        if not isinstance(line, str) or not line.startswith(f"autopar-{cls.kind}/"):
            raise DocumentError(
                f"{origin}: format is {line!r}, expected '{cls.format_line()}'; is this a {cls.kind} file?"
            )
        number = line.rpartition("/")[2]
        if not number.isdecimal() or not 1 <= int(number) <= cls.version:
            raise DocumentError(
                f"{origin}: format {line} is newer than this autopar reads ('{cls.format_line()}'); upgrade autopar "
                f"or write the {cls.kind} again with this version"
            )

    def to_json(self) -> str:
        """The document as JSON text; ``from_json`` gives an equal document back."""
        return self.model_dump_json(indent=1)

    def save(self, path: str | Path) -> None:
        """Write the document whole or not at all: a crash or a full disk leaves an older file as it was."""
        write_atomically(path, self.to_json() + "\n")


def write_atomically(path: str | Path, text: str) -> None:
    """Write ``text`` beside ``path`` and rename; raises DocumentError if the place cannot be written."""
    target = Path(path)
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise DocumentError(f"{path}: cannot be written: {error.strerror or error}") from None
