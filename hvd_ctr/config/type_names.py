"""Types of configuration fields in the words of a YAML user, for errors and the reference."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args

from pydantic import BaseModel


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models named in a type annotation, in order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from models_in(argument)


def type_name(annotation: Any) -> str:
    """Type in the words of a YAML user."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if a is type(None) else type_name(a) for a in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of {type_name(arguments[0])} to {type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[annotation]
