"""The server behind `homing serve`, which lets programs and browsers use a trained model. Needs the extra `web`.

    app               routes, token and host check; `serving` runs the app with its model on a socket
    openai_requests   request bodies in OpenAI's format -> what is wanted, or an error that names the field
    model_session     a loaded model: prompts and conversations -> ids -> what to generate
    worker            the thread that encodes prompts, and the thread that generates all texts in one batch
    generation        the texts of one request, on their way from the worker to the client
    openai_responses  texts -> responses and chunks in OpenAI's format
    tool_calls        finds tool calls in generated text
    metrics           counters for Prometheus
    threaded_server   runs any app on a socket, in a thread, until it is stopped

    chat              the chat page and the routes of its files
    dashboard         the server of `homing dashboard`: a page about runs; it needs neither a model nor torch

Only `homing.cli` imports this package. The model server knows nothing about rented runs. Both servers require a token.
"""
