"""Prepares conversations as token shards with a loss mask. Runs on the user's machine; the trainer reads the result.

    read_rows       a file, compressed or plain    -> numbered JSON values
    messages        a value in any of five forms   -> a conversation
    rules           a conversation                 -> the normalized conversation, or the fault found in it
    template        Jinja, in a sandbox            -> the text that a model reads
    render          conversation + template        -> ids and mask; text that looks like a marker stays text
    prompt_ids      a conversation in progress     -> the prompt for its next answer
    check_chats     files                          -> which lines are kept, cut or skipped
    chat_settings   the request                    -> the input files, and the settings for the manifest
    prepare         conversations                  -> shards (ids, mask, index), and a manifest that is written last

The trainer reads the shards with `lm/data/shards/pack_chats`, which packs the conversations into rows and isolates them
from each other.
"""
