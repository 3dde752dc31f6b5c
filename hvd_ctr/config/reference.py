"""Renders docs/config.md from the field descriptions, so that the reference cannot drift from the code."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from hvd_ctr.config.loader import models_in
from hvd_ctr.config.schema import TrainConfig


def render_reference() -> str:
    """docs/config.md: every key of the YAML file with type, default and meaning."""
    out = [
        "# Configuration reference",
        "",
        "Written by `python -m hvd_ctr.config`; change the descriptions in hvd_ctr/config/schema.py, not this file.",
        "A run file may name a `base:` file (relative to itself) and hold differences only. Any key can be set on the",
        "command line: `--set train.global_batch=8192`. Unknown keys are errors.",
    ]
    for prefix, model in _sections(TrainConfig, ""):
        out += [
            "",
            f"## {prefix or 'Top level'}",
            "",
            (model.__doc__ or "").strip(),
            "",
            "| key | type | default | meaning |",
            "| --- | --- | --- | --- |",
        ]
        for name, field in model.model_fields.items():
            if field.is_required():
                default = "needed"
            elif field.default_factory is not None:
                default = "{}" if _type_name(field.annotation).startswith("mapping") else "see below"
            else:
                default = (
                    "`"
                    + yaml.safe_dump(_plain(field.default), default_flow_style=True).replace("...", "").strip()
                    + "`"
                )
            meaning = (field.description or "").replace("|", "\\|")
            out.append(f"| `{name}` | {_type_name(field.annotation)} | {default} | {meaning} |")
    return "\n".join(out) + "\n"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, model
    for name, field in model.model_fields.items():
        kind = _type_name(field.annotation)
        suffix = "[]" if kind.startswith("list") else ".<name>" if kind.startswith("mapping") else ""
        for inner in models_in(field.annotation):
            yield from _sections(inner, f"{prefix}.{name}{suffix}".lstrip("."))


def _type_name(annotation: Any) -> str:
    """Type in the words of a YAML user."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if a is type(None) else _type_name(a) for a in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of {_type_name(arguments[0])} to {_type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}[annotation]
