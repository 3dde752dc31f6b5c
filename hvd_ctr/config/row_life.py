"""Options of a table that decide when its rows come into being and when they end; several models share them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

_MOST_COUNT = (1 << 24) - 1  # kMostMinCount in tf_ops/core/options.h

_MIN_COUNT = (
    "A row is created with the min_count-th occurrence of its id, counted over the global batches. Until then a lookup "
    "gives the initial value, and gradients are dropped and counted (not_admitted). Takes 36 to 72 bytes of memory per "
    "id that has occurred, beside host.ram_bytes, and 4 bytes per key in the key exchange. 1: the first creates it."
)
_SWEEP = (
    "Rows are deleted after steps that are a multiple of this, never in between: so any pipeline depth, cache and "
    "number of ranks deletes the same ones. A sweep reads what is known of all ids."
)

MinCount = Annotated[int, Field(ge=1, le=_MOST_COUNT, description=_MIN_COUNT)]
OwnMinCount = Annotated[
    int | None, Field(ge=1, le=_MOST_COUNT, description="Occurrence of an id that creates its row.")
]
MaxIdleSteps = Annotated[
    int | None,
    Field(
        ge=1,
        description="Delete rows that were not trained for more steps, and forget the counts of ids without a row that "
        "did not occur for so long. A deleted id starts anew. Memory as for min_count. null: never.",
    ),
]
MaxRows = Annotated[
    int | None,
    Field(
        ge=1,
        description="Most rows of the table over all ranks after a sweep: the longest untrained ones are deleted, all "
        "of one step together (of one 256th of their age beyond 512 steps), so somewhat fewer may remain. Set it well "
        "above the distinct ids of a global batch. Memory as for min_count. null: no limit.",
    ),
]
SweepEverySteps = Annotated[int, Field(ge=1, description=_SWEEP)]
OwnSweepEverySteps = Annotated[int | None, Field(ge=1, description="Steps between two sweeps.")]
