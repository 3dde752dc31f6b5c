"""The tier behind the device cache: memory or disk."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hvd_ctr.config.base import Frozen


class HostConfig(Frozen):
    """Where the rows live that are not cached on the device. Changes speed and memory, never results."""

    kind: Literal["ram", "disk"] = Field(
        default="ram",
        description="ram: in memory; disk: in a file on each rank's host, with a second-level cache of it in memory.",
    )
    path: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "disk: existing folder on a local disk of each host. Each rank keeps one file per dim there, sparse at "
            "first, and removes it at the end."
        ),
    )
    ram_bytes: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Memory for rows, optimizer state, index and buffers of this tier, in bytes per rank and per group of "
            "tables with one dim; each row takes up to 34 bytes of it for the index. null: no limit (ram only)."
        ),
    )
    direct_io: bool = Field(
        default=True,
        description=(
            "disk: bypass the page cache of the operating system where the file system can. false: memory of the "
            "machine that nobody else uses speeds up reads, beyond ram_bytes."
        ),
    )

    @model_validator(mode="after")
    def _fits_kind(self) -> HostConfig:
        if self.kind == "ram" and self.path is not None:
            raise ValueError(f"kind is ram but path is {self.path!r}; path belongs to kind: disk")
        if self.kind == "disk" and self.path is None:
            raise ValueError("kind is disk but path is missing; set it to a folder on a local disk of each host")
        if self.kind == "disk" and self.ram_bytes is None:
            raise ValueError("kind is disk but ram_bytes is missing; set it to the bytes of memory for this tier")
        return self
