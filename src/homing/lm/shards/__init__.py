"""Documents to token shards and back to batches.

    write  ids -> shards with an index, whole or absent
    read   shards -> rows of tokens, in an order that is a pure function of (seed, epoch, index)

wire/data.py says what the bytes mean.
"""
