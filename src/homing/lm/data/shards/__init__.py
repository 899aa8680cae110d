"""Token shards: documents to shards, and shards to rows.

    write  ids -> shards with an index, complete or absent
    read   shards -> rows of tokens, in an order that is a pure function of (seed, epoch, index)

wire/shard_manifest.py defines the format.
"""
