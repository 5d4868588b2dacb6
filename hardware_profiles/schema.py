"""What every document has in common: frozen fields, no unknown names, and errors a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError


class Schema(BaseModel):
    """A frozen record that refuses unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for a near miss, else the empty string."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean '{close[0]}'?)" if close else ""


def readable(error: ValidationError, model: type[BaseModel], most: int = 5) -> str:
    """A pydantic error in plain words: one line per field with what was given and what is allowed."""
    problems = error.errors()
    lines = [_problem(problem, model) for problem in problems[:most]]
    if len(problems) > most:
        lines.append(f"and {len(problems) - most} more")
    return "\n".join(lines)


def _problem(problem: Any, model: type[BaseModel]) -> str:
    path = [str(part) for part in problem["loc"]]
    field = ".".join(path) or "the document"
    given = repr(problem.get("input"))
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
