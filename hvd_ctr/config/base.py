"""What all models of the configuration have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from hvd_ctr.config.integers import holds_integers_only, read_integer


class Frozen(BaseModel):
    """Cannot be changed, refuses unknown keys, reads integers with exponents."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _integers_with_exponents(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        integers = {name for name, field in cls.model_fields.items() if holds_integers_only(field.annotation)}
        return {name: read_integer(value) if name in integers else value for name, value in data.items()}
