"""Renders docs/config.md from the field descriptions, so that the reference cannot drift from the code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from hvd_ctr.config.schema import TrainConfig
from hvd_ctr.config.type_names import models_in, type_name


def render_reference() -> str:
    """docs/config.md: every key of the YAML file with type, default and meaning."""
    out = [
        "# Configuration reference",
        "",
        "Written by `python -m hvd_ctr.config`; change the descriptions in hvd_ctr/config/, not this file.",
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
                default = "{}" if type_name(field.annotation).startswith("mapping") else "see below"
            else:
                default = (
                    "`"
                    + yaml.safe_dump(_plain(field.default), default_flow_style=True).replace("...", "").strip()
                    + "`"
                )
            meaning = (field.description or "").replace("|", "\\|")
            out.append(f"| `{name}` | {type_name(field.annotation)} | {default} | {meaning} |")
    return "\n".join(out) + "\n"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    yield prefix, model
    for name, field in model.model_fields.items():
        kind = type_name(field.annotation)
        suffix = "[]" if kind.startswith("list") else ".<name>" if kind.startswith("mapping") else ""
        for inner in models_in(field.annotation):
            yield from _sections(inner, f"{prefix}.{name}{suffix}".lstrip("."))
