"""From pydantic's errors to lines that a person can act on: file, key, value, what is allowed."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from geotrain.errors import Problem

Files = Mapping[str, tuple[Path, str]]
"""Where each top-level table stands and how its keys start there; "" is the rest."""

_VALUE_CHARS = 60
_OWN_ERROR = "geotrain"

_TYPES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a string in quotes",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "path_type": "must be a path in quotes",
}
_LIMITS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a validator found, with its key relative to the field that it validates."""

    key: str
    """Relative and dotted, such as "[1].layers"; empty for the field itself."""
    value: Any
    allowed: str


def refuse(findings: Sequence[Finding]) -> NoReturn:
    """End a validator with every finding at once; pydantic would keep only one message."""
    message = "; ".join(finding.allowed for finding in findings)
    # Braces in a message would be read as placeholders, so it travels as a value itself.
    raise PydanticCustomError(
        _OWN_ERROR, "{message}", {"message": message, "findings": list(findings)}
    )


def written(value: Any) -> str:
    """A value as one would write it in the file, shortened."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= _VALUE_CHARS else text[: _VALUE_CHARS - 3] + "..."


def dotted(loc: Sequence[int | str]) -> str:
    """`("run", "regions", 1, "layers")` as `run.regions[1].layers`."""
    key = ""
    for piece in loc:
        if isinstance(piece, int):
            key += f"[{piece}]"
        else:
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", piece) is not None
            key += ("." if key else "") + (piece if bare else json.dumps(piece))
    return key


def as_problem(finding: Finding, file: Path, prefix: str) -> Problem:
    """A finding told with its file and whole key."""
    return Problem(
        file=str(file),
        key=_join(prefix, finding.key),
        value="" if finding.value is None else written(finding.value),
        allowed=finding.allowed,
    )


def problems_of(error: ValidationError, model: type[BaseModel], files: Files) -> list[Problem]:
    """Every problem that pydantic or one of our validators found, in the file's own words.

    Args:
        error: What validating a whole config raised.
        model: The class that was validated, for the keys that would have been valid.
        files: Where each top-level table stands.
    """
    details = error.errors(include_url=False)
    suggested = {
        (*detail["loc"][:-1], nearest)
        for detail in details
        if detail["type"] == "extra_forbidden"
        and (nearest := _sibling(model, detail["loc"])) is not None
    }
    problems: list[Problem] = []
    for detail in details:
        # A misspelt required key would otherwise be told twice.
        if detail["type"] == "missing" and detail["loc"] in suggested:
            continue
        problems += _problems_of_one(detail, model, files)
    return problems


def _problems_of_one(
    detail: ErrorDetails, model: type[BaseModel], files: Files
) -> Iterator[Problem]:
    loc = detail["loc"]
    if len(loc) > 1 and loc[0] in files:
        file, prefix = files[str(loc[0])]
        key = _join(prefix, dotted(loc[1:]))
    else:
        file, _ = files[""]
        key = dotted(loc) or "the file"
    if detail["type"] == _OWN_ERROR:
        for finding in detail["ctx"]["findings"]:
            yield as_problem(finding, file, key)
        return
    yield Problem(
        file=str(file),
        key=key,
        value="" if detail["type"] == "missing" else written(detail["input"]),
        allowed=_allowed(detail, model),
    )


def _join(prefix: str, key: str) -> str:
    glue = "." if prefix and key and not key.startswith("[") else ""
    return f"{prefix}{glue}{key}"


def _allowed(detail: ErrorDetails, model: type[BaseModel]) -> str:
    kind, loc, ctx = detail["type"], detail["loc"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(model, loc)
    description, default = _field(model, loc)
    if kind == "missing":
        return f"is missing; {description}"
    if kind == "literal_error":
        choices = re.findall(r"'([^']*)'", ctx["expected"])
        near = difflib.get_close_matches(str(detail["input"]), choices, n=1)
        text = f"must be {ctx['expected']}" + (f'; did you mean "{near[0]}"?' if near else "")
    elif kind in _LIMITS:
        name, sign = _LIMITS[kind]
        text = f"must be {sign} {ctx[name]}"
    elif kind == "string_pattern_mismatch":
        text = f"is not allowed; {description}"
    else:
        text = _TYPES.get(kind, detail["msg"].replace("Input should be", "must be"))
    return text + default


def _unknown_key(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    nearest = _sibling(model, loc)
    if nearest is not None:
        return f'is not a known key; did you mean "{nearest}"?'
    elsewhere = [key for key in _all_keys(model, "") if key.split(".")[-1] == loc[-1]]
    if elsewhere:
        return f'is not a known key here; did you mean "{elsewhere[0]}"?'
    parent = _model_at(model, loc[:-1])
    return f"is not a known key; the keys here are {', '.join(parent.model_fields)}"


def _sibling(model: type[BaseModel], loc: tuple[int | str, ...]) -> str | None:
    near = difflib.get_close_matches(str(loc[-1]), _model_at(model, loc[:-1]).model_fields, n=1)
    return near[0] if near else None


def _model_at(model: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    kind: Any = model
    for piece in loc:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            kind = kind.model_fields[str(piece)].annotation
            if type(None) in get_args(kind):  # X | None
                kind = get_args(kind)[0]
        else:  # list[X] or dict[str, X], by index or name
            kind = get_args(kind)[-1]
    assert isinstance(kind, type) and issubclass(kind, BaseModel)
    return kind


def _field(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[str, str]:
    """A field's description, and a hint at its default where it has one."""
    names = list(loc)
    # An error inside a list or table of plain values belongs to the field that holds it.
    while names and isinstance(names[-1], int):
        names.pop()
    try:
        field = _model_at(model, names[:-1]).model_fields[str(names[-1])]
    except (AssertionError, KeyError, IndexError):
        return "", ""
    description = " ".join((field.description or "").split()).rstrip(".")
    if field.is_required() or field.default_factory is not None or field.default is None:
        return description, ""
    return description, f"; remove the key to use {written(field.default)}"


def _all_keys(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        kind: Any = field.annotation
        inner = (get_args(kind) or (kind,))[-1]
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            nested = ".<name>." if getattr(kind, "__origin__", None) is dict else "."
            yield from _all_keys(inner, prefix + name + nested)
