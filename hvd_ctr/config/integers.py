"""Integers written with an exponent, such as 1e4, which YAML 1.1 takes for text."""

from __future__ import annotations

import re
import typing
from decimal import Decimal
from typing import Any

from pydantic.fields import FieldInfo

_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]{1,2}")


def holds_integers_only(annotation: Any) -> bool:
    """Whether a field of this type holds integers and no text: int, int | None, or a list of such."""
    arguments = [a for a in typing.get_args(annotation) if a is not Ellipsis and not isinstance(a, FieldInfo)]
    if not arguments:
        return annotation in (int, type(None))
    return typing.get_origin(annotation) is not dict and all(map(holds_integers_only, arguments))


def read_integer(value: Any) -> Any:
    """1e4 as 10000: YAML takes a number with an exponent and no point for text. Anything else as it is."""
    if isinstance(value, list):
        return [read_integer(entry) for entry in value]
    if isinstance(value, str) and _EXPONENT.fullmatch(value.strip()):
        number = Decimal(value.strip())
        return int(number) if number == number.to_integral_value() else value
    return value
