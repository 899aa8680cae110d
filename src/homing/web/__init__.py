"""A trained model for programs and browsers: what `homing serve` starts. Needs the extra `web`.

    voice    a loaded model: conversations and prompts to ids, ids to pieces of text up to a stop
    worker   one text at a time, in a thread of its own, with a short queue before it
    openai   the shapes of OpenAI's API: a body to what is wanted, pieces of text to chunks, errors
    app      routes, token, host check and the page
    server   that app with its model, on a socket
    host     any app on a socket, in a thread, until it is told to end

    dashboard   the other server, of `homing dashboard`: a page about runs; it needs neither a model nor torch

Only `homing.cli` imports it. It knows nothing of runs that are rented, and answers nobody without the token.
"""
