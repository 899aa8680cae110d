"""Conversations to token shards with a loss mask. Home side: the trainer reads the result and needs none of this.

    lines     a file, packed or plain        -> numbered JSON values
    forms     a value in any of five forms   -> a conversation
    rules     a conversation                 -> the same, tidied, or the fault that is in it
    template  Jinja, in a sandbox            -> the text that a model reads
    tokens    tokenizer.json                 -> ids of plain text, and of the markers apart from it
    render    conversation + template        -> ids and mask; text that spells a marker stays text
    turns     a conversation that grows      -> the prompt for its next answer
    doctor    files                          -> what is kept, cut and skipped, line by line
    order     what is wanted                 -> checked, and told apart from what was done before
    prepare   conversations                  -> shards (ids, mask, index) and a manifest, whole or absent

What reads them in the trainer is `lm/shards/conversations`: rows, packed, each conversation by itself.
"""
