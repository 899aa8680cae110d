"""The server behind `homing serve`, which lets programs and browsers use a trained model. Needs the extra `web`.

    model_session    a loaded model: turns conversations and prompts into ids, and ids into chunks of text
    worker           generates one text at a time, in its own thread, with a short queue
    openai_format    the formats of OpenAI's API: request bodies, responses, chunks and errors
    app              routes, token, host check and the page; `serving` runs the app with its model on a socket
    threaded_server  runs any app on a socket, in a thread, until it is stopped

    dashboard        the server of `homing dashboard`: a page about runs; it needs neither a model nor torch

Only `homing.cli` imports this package. The model server knows nothing about rented runs. Both servers require a token.
"""
