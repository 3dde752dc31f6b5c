"""How tables and features are laid out: groups of one dim, and inside a group tables and features in exchange order.

Rows are sharded row-wise by hash of the key (TorchRec's RW, HugeCTR's distributed slot); which rank owns a key is
decided in the op library (tf_ops/core/hash.h) and nowhere else. Tables of one dim form a group: they share one MixCache
and travel together, so a step has one key exchange, one row exchange and one gradient exchange per dim, however many
tables there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvd_ctr.config import FeatureConfig, TableConfig


@dataclasses.dataclass(frozen=True)
class GroupLayout:
    """One dim's tables and features.

    Attributes:
        dim: D, floats per row.
        tables: T tables in order of first use by a feature.
        features: F features sorted by table (stable), the order in which ids are de-duplicated and keys travel.
        feature_tables: index into `tables` of each feature, non-decreasing.
    """

    dim: int
    tables: tuple[TableConfig, ...]
    features: tuple[FeatureConfig, ...]
    feature_tables: tuple[int, ...]

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of `features`."""
        return tuple(feature.name for feature in self.features)


def _check(features: Sequence[FeatureConfig]) -> None:
    if not features:
        raise ValueError("an embedding needs at least one feature, received none")
    seen: set[str] = set()
    tables: dict[str, TableConfig] = {}
    for feature in features:
        if feature.name in seen:
            raise ValueError(f"feature {feature.name!r} is given twice; feature names must be unique in one embedding")
        seen.add(feature.name)
        known = tables.setdefault(feature.table.name, feature.table)
        if known != feature.table:
            raise ValueError(
                f"table {feature.table.name!r} is configured in two ways: {known!r} and, for feature {feature.name!r}, "
                f"{feature.table!r}; features that share a table must pass the same TableConfig"
            )


def group_by_dim(features: Sequence[FeatureConfig]) -> list[GroupLayout]:
    """Groups features by the dim of their table, in order of first use.

    Raises:
        ValueError: no features, a feature name given twice, or one table name with two configurations.
    """
    _check(features)
    groups: list[GroupLayout] = []
    for dim in dict.fromkeys(feature.table.dim for feature in features):
        members = [feature for feature in features if feature.table.dim == dim]
        names = list(dict.fromkeys(feature.table.name for feature in members))
        tables = {feature.table.name: feature.table for feature in members}
        members.sort(key=lambda feature: names.index(feature.table.name))
        groups.append(
            GroupLayout(
                dim=dim,
                tables=tuple(tables[name] for name in names),
                features=tuple(members),
                feature_tables=tuple(names.index(feature.table.name) for feature in members),
            )
        )
    return groups
