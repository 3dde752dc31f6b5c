"""The sharded embedding: tables over ranks, one fused exchange per dim and direction."""

from hvd_ctr.embedding.sharded_embedding import ShardedEmbedding, TableGroup

__all__ = ["ShardedEmbedding", "TableGroup"]
