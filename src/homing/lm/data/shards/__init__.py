"""Token shards: documents to shards, and shards to rows.

    write_shards             ids -> shards with an index, complete or absent
    read_shards              shards -> the tokens of each document
    pack_text, pack_chats    tokens -> rows, in an order that is a pure function of (seed, epoch, index)

wire/shard_manifest.py defines the format.
"""
