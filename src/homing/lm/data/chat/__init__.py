"""Prepares conversations as token shards with a loss mask. Runs on the user's machine; the trainer reads the result.

    read_rows       a file, packed or plain        -> numbered JSON values
    formats         a value in any of five forms   -> a conversation
    rules           a conversation                 -> the same, normalized, or the fault found in it
    template        Jinja, in a sandbox            -> the text that a model reads
    render          conversation + template        -> ids and mask; text that spells a marker stays text
    prompt_ids      a growing conversation         -> the prompt for its next answer
    check_chats     files                          -> what is kept, cut and skipped, line by line
    chat_settings   what is requested              -> checked, and compared with what was done before
    prepare         conversations                  -> shards (ids, mask, index) and a manifest, complete or absent

The trainer reads the shards with `lm/data/shards/pack_chats`, which packs the conversations into rows and isolates them
from each other.
"""
