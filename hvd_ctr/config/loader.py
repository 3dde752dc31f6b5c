"""Reading and writing a run's YAML file: base files, overrides, errors that name key, source, received and allowed."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hvd_ctr.config.schema import ConfigError, TrainConfig, nearest
from hvd_ctr.config.type_names import models_in, type_name

# What pydantic's errors of these kinds allow, in the words of YAML.
_ALLOWED = {
    "dict_type": "a mapping of names to values",
    "model_type": "a section: a mapping of keys to values",
    "model_attributes_type": "a section: a mapping of keys to values",
    "string_type": "text",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a run's YAML file merged over its `base:` files, with overrides ``a.b=value`` (value in YAML) on top.

    Raises ConfigError, which names file, key, received and allowed value.
    """
    sources: dict[tuple[str, ...], str] = {}
    merged = _load_merged(Path(path), sources, ())
    for override in overrides:
        key, equals, text = override.partition("=")
        keys = tuple(k.strip() for k in key.split("."))
        if not equals or not all(keys):
            raise ConfigError(f"override {override!r}: expected key=value such as train.global_batch=8192")
        try:
            value = yaml.load(text, Loader=_StrictLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from error
        nested: Any = value
        for k in reversed(keys):
            nested = {k: nested}
        _merge(merged, nested, f"--set {override}", sources, ())
    return _validate(merged, str(path), sources)


def save_config(config: TrainConfig, path: str | Path) -> None:
    """Writes the fully resolved configuration; load_config of the file gives an equal object."""
    data = config.model_dump(mode="json")
    # Keys a table does not override stay out: written as null they would count as given when the file is read again.
    for name, table in config.embedding.tables.items():
        data["embedding"]["tables"][name] = table.model_dump(mode="json", exclude_unset=True)
    Path(path).write_text(yaml.safe_dump(data, sort_keys=False, default_flow_style=False, width=120), encoding="utf-8")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, which YAML loaders otherwise resolve silently to the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _load_merged(path: Path, sources: dict[tuple[str, ...], str], chain: tuple[Path, ...]) -> dict[str, Any]:
    """The mapping of a file over that of its base; fills sources: key path -> file it was last set in."""
    resolved = path.resolve()
    if resolved in chain:
        raise ConfigError(f"{path}: base: makes a circle: {' -> '.join(p.name for p in (*chain, resolved))}")
    try:
        with path.open(encoding="utf-8") as stream:
            content = yaml.load(stream, Loader=_StrictLoader)
    except OSError as error:
        named_by = f" (named as base: by {chain[-1]})" if chain else ""
        raise ConfigError(f"{path}: cannot read the configuration{named_by}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {error.start} ({error.reason}); "
            "save the file as UTF-8"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, received {type(content).__name__}")
    base = content.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{path}: base: received {base!r}; allowed: the path of one YAML file, relative to this one")
    merged = _load_merged(path.parent / base, sources, (*chain, resolved)) if base is not None else {}
    _merge(merged, content, str(path), sources, ())
    return merged


def _merge(
    into: dict[Any, Any], changes: dict[Any, Any], source: str, sources: dict[tuple[str, ...], str], at: tuple[str, ...]
) -> None:
    """Deep merge: mappings are merged, anything else (lists too) is replaced."""
    for key, value in changes.items():
        here = (*at, str(key))
        sources[here] = source
        if isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], value, source, sources, here)
        else:
            into[key] = value


def _validate(merged: dict[str, Any], path: str, sources: dict[tuple[str, ...], str]) -> TrainConfig:
    try:
        return TrainConfig.model_validate(merged)
    except ValidationError as error:
        lines = [_describe(e, path, sources) for e in error.errors(include_url=False)]
        raise ConfigError("\n".join(lines)) from None


def _describe(error: ErrorDetails, path: str, sources: dict[tuple[str, ...], str]) -> str:
    """One line for one pydantic error: where, received, allowed."""
    loc = tuple(str(part) for part in error["loc"])
    key = ".".join(loc) or "(whole file)"
    place = next((sources[loc[:n]] for n in range(len(loc), 0, -1) if loc[:n] in sources), path)
    model, field = _model_at(loc)
    if error["type"] == "extra_forbidden":
        known = tuple(model.model_fields)
        return f"{place}: {key}: unknown key{nearest(loc[-1], known)}; allowed here: {', '.join(known)}"
    if error["type"] == "missing":
        return f"{place}: {key}: missing; it is needed. {_meaning(model, field)}".rstrip()
    if error["type"] == "value_error":
        return f"{place}: {key}: {error['msg'].removeprefix('Value error, ')}"
    allowed = _allowed(error, model, field)
    received = reprlib.repr(error["input"])
    return f"{place}: {key}: received {received}; allowed: {allowed}. {_meaning(model, field)}".rstrip()


def _allowed(error: ErrorDetails, model: type[BaseModel], field: str | None) -> str:
    if error["type"] == "tuple_type" and field is not None:
        # [x] is how a list of one is written, where a single value was given.
        single = isinstance(error["input"], (str, int, float))
        kind = type_name(model.model_fields[field].annotation)
        return f"a {kind}{'' if kind.endswith('text') else 's'}" + (f", such as [{error['input']}]" * single)
    return _ALLOWED.get(error["type"], error["msg"].removeprefix("Input should be "))


def _meaning(model: type[BaseModel], field: str | None) -> str:
    return (model.model_fields[field].description or "") if field is not None else ""


def _model_at(loc: tuple[str, ...]) -> tuple[type[BaseModel], str | None]:
    """The innermost model on a key path and the name of its last known field on it."""
    model: type[BaseModel] = TrainConfig
    field: str | None = None
    parts = list(loc)
    while parts and parts[0] in model.model_fields:
        field = parts.pop(0)
        annotation = model.model_fields[field].annotation
        inner = next(models_in(annotation), None)
        if inner is not None and get_origin(annotation) in (tuple, dict):
            del parts[:1]  # position in the list, or name in the mapping
        if inner is not None and parts:
            model, field = inner, None
    return model, field
