"""Use a trained model: generate, chat, evaluate, export, publish, serve."""
