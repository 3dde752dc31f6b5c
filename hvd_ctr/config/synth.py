"""The data generator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hvd_ctr.config.base import Frozen


class SynthConfig(Frozen):
    """Data that `hvd-ctr synth` makes: Criteo's shape, power-law ids, labels drawn from a known teacher."""

    out_dir: str = Field(description="Folder for the files: train-NNN, eval-NNN and teacher.json.")
    format: Literal["criteo", "parquet"] = Field(default="criteo", description="File format to write.")
    gzip: bool = Field(default=False, description="Write criteo files as .gz.")
    train_rows: int = Field(default=1_000_000, ge=1, description="Rows to train on.")
    eval_rows: int = Field(default=100_000, ge=1, description="Rows to evaluate on.")
    files: int = Field(default=4, ge=1, description="Number of training files (evaluation: one file).")
    scale: float = Field(
        default=0.01,
        gt=0,
        le=100,
        description="Number of ids of each feature, as a multiple of Criteo-Kaggle's; at least 3.",
    )
    exponent: float = Field(
        default=1.1,
        gt=0,
        description="Exponent of the power law of the ids: share of the k-th most frequent id ~ k^-exponent.",
    )
    seed: int = Field(default=1, ge=0, description="Seed of ids, labels and teacher.")
    teacher_strength: float = Field(
        default=1.0,
        ge=0,
        description="Multiplies the teacher's logit spread; 0: labels are noise. 1 gives an AUC of about 0.82.",
    )
    missing_rate: float = Field(
        default=0.14,
        ge=0,
        le=0.5,
        description="Mean share of empty fields; fields differ as in Criteo-Kaggle, whose mean is 0.14.",
    )
    strip_rate: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share of the lines that end in empty fields which have these cut off (criteo only).",
    )
