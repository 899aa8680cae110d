"""Who rents: one module per provider, all behind the protocol in `base`."""
