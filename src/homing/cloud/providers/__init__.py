"""Cloud providers: one adapter per provider, all implementing the protocol in `base`."""
