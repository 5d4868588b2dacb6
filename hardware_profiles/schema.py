"""What every document has in common: frozen fields, no unknown names, and errors a person can act on."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, ValidationInfo, field_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

NUMBERS = (int, float, int | None, float | None)


class Schema(BaseModel):
    """A frozen record that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Facts(Schema):
    """A record that people write by hand: numbers are finite, and ``true`` is not 1."""

    model_config = ConfigDict(allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[info.field_name or ""].annotation
        given = value.values() if annotation == dict[str, float] and isinstance(value, dict) else (value,)
        if annotation in (*NUMBERS, dict[str, float]) and any(isinstance(item, bool) for item in given):
            raise ValueError("must be a number, not true or false")
        return value


class OrText:
    """Marks a field that a file may fill by a name: only its JSON Schema shows it, for the loader puts the record there."""

    def __init__(self, meaning: str) -> None:
        self.meaning = meaning

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Either the name or what the model itself asks for."""
        return {"anyOf": [{"type": "string", "description": self.meaning}, handler(core)]}


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_SHORT.maxlevel = 3


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for a near miss, else the empty string."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""


def readable(error: ValidationError, model: type[BaseModel], most: int = 5, within: str = "") -> str:
    """A pydantic error in plain words: one line per field with what was given and what is allowed.

    `within` is the path of the model in its document.
    """
    problems = error.errors()
    # An item that failed leaves its list too short: only the item's own problem helps.
    inner = {problem["loc"][:size] for problem in problems for size in range(len(problem["loc"]))}
    problems = [problem for problem in problems if problem["type"] != "too_short" or problem["loc"] not in inner]
    lines = [f"{within}.{line}" if within else line for line in (_problem(item, model) for item in problems[:most])]
    if len(problems) > most:
        lines.append(f"and {len(problems) - most} more")
    return "\n".join(lines)


def _problem(problem: Any, model: type[BaseModel]) -> str:
    path = [str(part) for part in problem["loc"]]
    field = ".".join(path) or "the document"
    given = _SHORT.repr(problem.get("input"))
    given = given if len(given) <= 60 else given[:57] + "..."
    if problem["type"] == "extra_forbidden":
        owner = _model_at(model, problem["loc"][:-1])
        names = sorted(_field_names(owner)) if owner else []
        allowed = f"; allowed: {', '.join(names)}" if names else ""
        return f"{field}: unknown field{did_you_mean(path[-1], names)}{allowed}"
    if problem["type"] == "missing":
        return f"{field}: missing"
    if problem["type"] == "literal_error":
        expected = problem["ctx"]["expected"]
        names = [name.strip(" '") for name in expected.replace(" or ", ", ").split(",")]
        return f"{field}: {given} is not allowed{did_you_mean(str(problem.get('input')), names)}; allowed: {expected}"
    message = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{field}: {message}, given {given}"


def _field_names(model: type[BaseModel]) -> Iterable[str]:
    return (field.alias or name for name, field in model.model_fields.items())


def _model_at(model: type[BaseModel], path: tuple[Any, ...]) -> type[BaseModel] | None:
    """The model class that a location inside a document belongs to, found by walking annotations."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        fields = getattr(current, "model_fields", {})
        matching = [field for name, field in fields.items() if part in (name, field.alias)]
        if matching:
            current = _model_inside(matching[0].annotation)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _model_inside(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_inside(argument)
        if found is not None:
            return found
    return None
