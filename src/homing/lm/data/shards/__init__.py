"""Writes documents to token shards, and packs shards into rows.

    write_shards             ids -> shards with an index
    read_shards              shards -> the tokens of each document
    pack_text, pack_chats    tokens -> rows, in an order that is a pure function of (seed, epoch, index)

wire/shard_manifest.py defines the format.
"""
