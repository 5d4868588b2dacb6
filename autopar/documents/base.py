"""Load, save and check: the manners that Graph, Plan and Timeline share."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, ValidationError

from autopar.errors import DocumentError
from hardware_profiles.schema import Schema, readable

MOST_PROBLEMS = 5
Count = Annotated[int, Field(ge=1)]
"""A whole number from 1."""
Amount = Annotated[float, Field(ge=0, le=1e24)]
"""Seconds, bytes, a share: not negative, and so far from overflow that sums and products stay finite."""


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
        except (ValueError, RecursionError) as error:
            raise DocumentError(
                f"{origin}: not complete JSON ({error}); the file may be cut off: write it again with autopar"
            ) from None
        cls._check_format(data, origin)
        try:
            document = cls.model_validate_json(text)
        except ValidationError as error:
            raise DocumentError(f"{origin}: not a valid {cls.kind}:\n{readable(error, cls)}") from None
        problems = list(islice(document.contradictions(), MOST_PROBLEMS))
        if problems:
            raise DocumentError(f"{origin}: not a valid {cls.kind}:\n" + "\n".join(problems))
        return document

    def contradictions(self) -> Iterator[str]:
        """What only the document as a whole shows to be wrong; asked of what comes from a file."""
        return iter(())

    @classmethod
    def _check_format(cls, data: Any, origin: str) -> None:
        line = data.get("format") if isinstance(data, dict) else None
        if not isinstance(line, str) or not line.startswith(f"autopar-{cls.kind}/"):
            raise DocumentError(
                f"{origin}: format is {line!r}, expected '{cls.format_line()}'; is this a {cls.kind} file?"
            )
        number = line.rpartition("/")[2]
        if not number.isdecimal() or number.startswith("0"):
            raise DocumentError(f"{origin}: format {line} does not exist, expected '{cls.format_line()}'")
        if len(number) > 9 or int(number) > cls.version:
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


def require_writable(path: str | Path) -> None:
    """Raise DocumentError where a file cannot be put, before minutes are spent on what it shall hold."""
    target = Path(path)
    try:
        if target.is_dir():
            raise DocumentError(f"{path}: cannot be written: it is a folder; give the name of a file in it")
        if target.exists() and not target.is_file():
            return  # a device or a pipe: written to, not replaced
        if not target.parent.is_dir():
            raise DocumentError(f"{path}: cannot be written: there is no folder {target.parent}; make it first")
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".autopar.")
        os.close(handle)
        Path(temporary).unlink()
    except (OSError, ValueError) as error:
        raise DocumentError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write ``content`` beside ``path`` and rename; raises DocumentError if the place cannot be written."""
    require_writable(path)
    target = Path(path)
    if target.exists() and not target.is_file():
        _write_to_device(target, content)
        return
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DocumentError(f"{path}: cannot be written: {error.strerror or error}") from None
        raise


def _write_to_device(target: Path, content: str | bytes) -> None:
    try:
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise DocumentError(f"{target}: cannot be written: {error.strerror or error}") from None
